"""Handoff latency: from the end of the prefill's last step to the decode side's first step.

Starts a real 1P1D cluster, sends prompts one after another so that the decode side is idle, and
reads both moments from the workers' logs (one host, one monotonic clock).
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

TARGET_P50_MILLISECONDS = 5.0
VOCABULARY = range(1000, 40000)


def main(argv: list[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks handoff_latency")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=21)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fp-") as folder:
        log_dir = Path(folder) / "logs"
        seconds = _run(options, Path(folder), log_dir)
    report = {
        "benchmark": "handoff_latency",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks handoff_latency " + " ".join(argv),
        "device": f"CPU, {os.cpu_count()} cores",
        "dtype": options.dtype,
        "prompt_tokens": options.tokens,
        "milliseconds": [round(s * 1e3, 3) for s in seconds],
        "p50_milliseconds": round(statistics.median(seconds) * 1e3, 3),
        "max_milliseconds": round(max(seconds) * 1e3, 3),
        "target_p50_milliseconds": TARGET_P50_MILLISECONDS,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"handoff_latency-{datetime.now(UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"handoff of {options.tokens} tokens, {options.dtype}, decode side idle: "
        f"p50 {report['p50_milliseconds']} ms, max {report['max_milliseconds']} ms over "
        f"{len(seconds)} requests (target p50 {TARGET_P50_MILLISECONDS} ms)"
    )
    return 0


def _run(options: argparse.Namespace, folder: Path, log_dir: Path) -> list[float]:
    command = [sys.executable, "-m", "services.cli", "serve", "--port", "0"]
    command += ["--dtype", options.dtype, "--kv-bytes", "512MiB"]
    command += ["--run-dir", str(folder / "run"), "--log-dir", str(log_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = ""
        for line in server.stdout:
            print(f"  {line.rstrip()}", flush=True)
            if line.startswith("ready"):
                url = line.split()[-1]
                break
        try:
            if not url:
                raise SystemExit("the server did not start")
            draw = random.Random(1)  # a repeatable workload
            for number in range(options.requests + 1):
                prompt = draw.choices(VOCABULARY, k=options.tokens)
                body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 3}
                request = urllib.request.Request(  # loopback
                    f"{url}/completions",
                    json.dumps({**body, "ignore_eos": True}).encode(),
                    {"content-type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=120) as answer:
                    answer.read()
                print(f"\r  request {number} of {options.requests}", end="", flush=True)
            print()
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
    lines = [json.loads(line) for line in _decode_log(log_dir).read_text().splitlines()]
    accepted = [x["seconds_since_prefill"] for x in lines if x["event"] == "handoff_accepted"]
    return accepted[1:]  # the first one warms caches up


def _decode_log(log_dir: Path) -> Path:
    return next(log_dir.rglob("decode-0.jsonl"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
