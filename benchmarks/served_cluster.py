"""Clusters that a benchmark starts with ``flowpath serve``, and loads that it gives them."""

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import monotonic

from services.cli.supervisor.prepare import claim_port

ROOT = Path(__file__).parents[1]
START_SECONDS = 120.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class ServedCluster:
    """A running cluster: its name in the results, where it answers and where its files are."""

    name: str
    url: str
    port: int
    run_dir: Path
    log_dir: Path


@contextmanager
def served(name: str, options: Sequence[str]) -> Iterator[ServedCluster]:
    """Run ``flowpath serve`` with these options on a free port as long as the block.

    Without ``--store`` among them it keeps no KV beyond its workers' own.
    RuntimeError when it does not get ready.
    """
    with tempfile.TemporaryDirectory(prefix="fp-") as root:
        folder, port = Path(root), claim_port("127.0.0.1", 0)
        cluster = ServedCluster(
            name, f"http://127.0.0.1:{port}", port, folder / "run", folder / "log"
        )
        command = [
            *(sys.executable, "-m", "services.cli", "serve", "--port", str(port)),
            *("--run-dir", str(cluster.run_dir), "--log-dir", str(cluster.log_dir)),
            *("--store", "none", *options),
        ]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            if not _is_ready(cluster.url, process):
                told = (folder / "output").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} did not get ready\n{told}")
            yield cluster
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_ready(url: str, process: "subprocess.Popen[bytes]") -> bool:
    deadline, never = monotonic() + START_SECONDS, Event()
    while monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass
        never.wait(POLL_SECONDS)
    return False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one run of ``flowpath bench serve`` measured: seconds, requests/s, milliseconds."""

    seconds: float
    requests_per_second: float
    num_failed: int
    latencies: dict[str, dict[str, float]]

    def latency(self, name: str, share: str) -> float:
        """Return a quantile, such as ``latency("TPOT", "p99")``, in milliseconds."""
        return self.latencies[name][share]


def bench_serve(cluster: ServedCluster, *options: str) -> LoadResult:
    """Load a cluster with ``flowpath bench serve``. RuntimeError when that cannot run."""
    with tempfile.TemporaryDirectory(prefix="fp-") as root:
        path = Path(root) / "result.json"
        command = [
            *(sys.executable, "-m", "services.cli", "bench", "serve", "--url", cluster.url),
            *("--log-dir", str(cluster.log_dir), "--json", str(path), *options),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not path.exists():
            raise RuntimeError(f"bench serve failed\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
        document = json.loads(path.read_text())
    return LoadResult(
        seconds=float(document["seconds"]),
        requests_per_second=float(document["requests_per_second"]),
        num_failed=int(document["num_requests"]) - int(document["num_complete"]),
        latencies=document["latencies_ms"],
    )
