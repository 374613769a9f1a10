"""Serving a model of Llama-3.1-8B's shape on GPUs over HTTP: ``python -m benchmarks.cuda_serving``.

A cluster with random bfloat16 weights is started for each layout asked for, and loaded as
``docs/measured.md`` says: five requests one after another, all prompts of a burst at once, and
arrivals at a Poisson rate. Output is 256 tokens (64 one after another), greedy, EOS ignored; no two
prompts share a prefix.

``combined`` is one worker that does both roles; ``split`` is a prefill and a decode worker, on one
GPU or on two. ``handoff`` is, of requests one after another, the time from the first token (from
the prefill side, as the prefill ends) to the second (from the decode side).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic

from benchmarks.dummy_model import SHAPES, write_dummy_model
from benchmarks.report import Cell, print_table, write_results

ROOT = Path(__file__).parents[1]
NAME = "cuda_serving"
START_SECONDS = 420.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.5
NUM_SERIAL = 5
SERIAL_OUTPUT = 64
OUTPUT = 256
POISSON_SHARE = 0.7
"""Of the burst's throughput in the same run."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of ``num_tokens`` tokens, ``num_requests`` of them in a burst."""

    name: str
    num_tokens: int
    num_requests: int


WORKLOADS = (Workload("1k", 1024, 256), Workload("5k", 5120, 96), Workload("10k", 10240, 64))


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running server: where it answers and logs."""

    layout: str
    url: str
    log_dir: Path
    vocab_size: int


@contextmanager
def serving(layout: str, arguments: argparse.Namespace) -> Iterator[Cluster]:
    """Run ``flowpath serve`` as long as the block."""
    with tempfile.TemporaryDirectory(prefix="fp-") as root:
        folder = Path(root)
        write_dummy_model(folder / "model", arguments.shape)
        command = [
            *(sys.executable, "-m", "services.cli", "serve"),
            *("--model", str(folder / "model"), "--served-model-name", "dummy"),
            *("--load-format", "dummy", "--dtype", "bfloat16", "--device", arguments.device),
            *("--port", str(arguments.port), "--run-dir", str(folder / "run")),
            *("--log-dir", str(folder / "log"), "--max-model-len", str(arguments.max_model_len)),
            *(["--combined"] if layout == "combined" else ["--prefill", "1", "--decode", "1"]),
            *arguments.serve,
        ]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        url = f"http://127.0.0.1:{arguments.port}"
        try:
            started = monotonic()
            _wait_ready(url, process, folder)
            print(f"{layout}: ready after {monotonic() - started:.1f} s", flush=True)
            size = SHAPES[arguments.shape]["vocab_size"]
            assert isinstance(size, int), "the vocabulary is counted"
            yield Cluster(layout, url, folder / "log", size)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            if arguments.keep_logs is not None:
                arguments.keep_logs.mkdir(parents=True, exist_ok=True)
                for path in sorted((folder / "log").glob("*.jsonl")):
                    lines = path.read_text().splitlines()[-arguments.log_lines :]
                    kept = arguments.keep_logs / f"{layout}-{path.name}"
                    kept.write_text("\n".join(lines) + "\n")


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = monotonic() + START_SECONDS
    never = Event()
    while monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        if process.poll() is not None:
            break
        never.wait(POLL_SECONDS)
    logs = [
        f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-8:])
        for path in sorted((folder / "log").glob("*.jsonl"))
    ]
    tail = (folder / "output").read_text(errors="replace")[-2000:]
    raise RuntimeError("\n".join([f"the server did not get ready\n{tail}", *logs]))


def bench(cluster: Cluster, folder: Path, seed: int, *options: str) -> dict[str, object]:
    """Run ``flowpath bench serve`` and return its document."""
    path = folder / "result.json"
    command = [
        *(sys.executable, "-m", "services.cli", "bench", "serve", "--url", cluster.url),
        *("--log-dir", str(cluster.log_dir), "--vocab-size", str(cluster.vocab_size)),
        *("--seed", str(seed), "--json", str(path), *options),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"bench serve failed\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    document: dict[str, object] = json.loads(path.read_text())
    return document


def measure(
    cluster: Cluster, workload: Workload, kinds: list[str], output: int
) -> list[dict[str, Cell]]:
    """Run one workload's loads; one row each."""
    rows: list[dict[str, Cell]] = []
    size = ("--input-tokens", str(workload.num_tokens))
    base = 1000 * workload.num_tokens
    with tempfile.TemporaryDirectory(prefix="fp-") as root:
        folder = Path(root)
        if "serial" in kinds:
            load = ("--requests", str(NUM_SERIAL), "--concurrency", "1", "--warmup", "2")
            tokens = ("--output-tokens", str(min(output, SERIAL_OUTPUT)))
            document = bench(cluster, folder, base, *size, *load, *tokens)
            rows.append(_row(cluster, workload, "serial", document))
        many = (
            *("--requests", str(workload.num_requests), "--warmup", "0"),
            *("--output-tokens", str(output)),
        )
        if "burst" in kinds:
            burst = ("--burst", str(workload.num_requests))
            document = bench(cluster, folder, base + 1, *size, *many, *burst)
            rows.append(_row(cluster, workload, "burst", document))
        if "poisson" in kinds:
            rate = POISSON_SHARE * float(rows[-1]["req/s"]) if rows else 1.0
            arrivals = ("--rate", f"{rate:g}")
            document = bench(cluster, folder, base + 2, *size, *many, *arrivals)
            rows.append(_row(cluster, workload, f"poisson {rate:.2f}/s", document))
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def _row(
    cluster: Cluster, workload: Workload, load: str, document: dict[str, object]
) -> dict[str, Cell]:
    latencies = document["latencies_ms"]
    assert isinstance(latencies, dict), "bench serve writes it so"

    def quantile(name: str, share: str) -> float:
        found = latencies.get(name)
        return round(float(found[share]), 2) if found else float("nan")

    rate = document["requests_per_second"]
    assert isinstance(rate, float), "bench serve writes it so"
    return {
        "layout": cluster.layout,
        "workload": workload.name,
        "load": load,
        "req/s": round(rate, 3),
        "TTFT p50": quantile("TTFT", "p50"),
        "TTFT p99": quantile("TTFT", "p99"),
        "TPOT p50": quantile("TPOT", "p50"),
        "TPOT p99": quantile("TPOT", "p99"),
        "handoff p50": quantile("first ITL", "p50"),
        "handoff p99": quantile("first ITL", "p99"),
        "E2E p50": quantile("E2E", "p50"),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"benchmarks.{NAME}")
    parser.add_argument("--layouts", default="combined,split", help="combined, split")
    parser.add_argument("--workloads", default="1k,5k,10k", help="1k, 5k, 10k")
    parser.add_argument("--loads", default="serial,burst", help="serial, burst, poisson")
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--output", type=int, default=OUTPUT, help="output tokens of a request")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--max-model-len", type=int, default=12288)
    parser.add_argument("--name", default=NAME, help="name of the file of results")
    parser.add_argument("--keep-logs", type=Path, help="folder for the end of each program's log")
    parser.add_argument("--log-lines", type=int, default=400)
    parser.add_argument("--share", type=float, default=1.0, help="share of a burst's prompts")
    parser.add_argument("serve", nargs="*", help="more options of flowpath serve, after --")
    arguments = parser.parse_args(argv)
    wanted = [w for w in WORKLOADS if w.name in arguments.workloads.split(",")]
    rows: list[dict[str, Cell]] = []
    for layout in arguments.layouts.split(","):
        with serving(layout, arguments) as cluster:
            for workload in wanted:
                count = max(1, round(workload.num_requests * arguments.share))
                scaled = Workload(workload.name, workload.num_tokens, count)
                rows += measure(cluster, scaled, arguments.loads.split(","), arguments.output)
    print_table(rows)
    path = write_results("cuda_serving", argv, rows, name=arguments.name)
    print(f"kept in benchmarks/results/{path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
