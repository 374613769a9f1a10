"""A cluster of real processes for tests: started, asked, watched, killed and stopped by id.

``running_cluster`` is the way in. A cluster belongs to the event loop that started it, and every
wait has a deadline. What goes wrong is told with the last lines of every process's log.
"""

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import httpx

from common.config.load import save_settings
from common.config.settings import Settings
from common.messages.admin import StatusReport, WorkerStatus
from common.messages.fields import KVCounts
from services.cli.admin import ask_status
from tests.support.answers import Answer, Json, events_of, gather_stream, read_whole

REPOSITORY = Path(__file__).parents[2]
POLL_SECONDS = 0.05
START_SECONDS = 120.0
STOP_SECONDS = 30.0
ANSWER_SECONDS = 180.0
TAIL_LINES = 12

CONTROLLER = "controller"
GATEWAY = "gateway-0"


class ClusterError(Exception):
    """The cluster did not do in time what it should have; the text ends with its logs."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What to start. ``settings`` are further settings by name, which win over the others.

    ``worker_settings`` are those of single workers, by their names, and win over all.
    """

    model: Path
    num_prefill: int = 1
    num_decode: int = 1
    is_combined: bool = False
    dtype: str = "float32"
    kv_bytes: int = 512 * 2**20
    block_size: int = 64
    threads: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)
    worker_settings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The workers' names."""
        if self.is_combined:
            return ("combined-0",)
        return (
            *(f"prefill-{place}" for place in range(self.num_prefill)),
            *(f"decode-{place}" for place in range(self.num_decode)),
        )

    def to_settings(self, root: Path, worker_id: str = "") -> Settings:
        """Return the cluster's settings, or one worker's, with sockets and logs under ``root``."""
        values: dict[str, object] = {
            "port": 0,
            "model": str(self.model),
            "dtype": self.dtype,
            "device": "cpu",  # also where there is a GPU
            "prefill": self.num_prefill,
            "decode": self.num_decode,
            "combined": self.is_combined,
            "kv_bytes": self.kv_bytes,
            "block_size": self.block_size,
            "threads": self.threads,
            "run_dir": root / "run",
            "log_dir": root / "log",
        }
        own = self.worker_settings.get(worker_id, {})
        return Settings.model_validate({**values, **self.settings, **own})


class _Process:
    """One started program; ``ended`` is set when it has ended, however."""

    def __init__(
        self, name: str, settings_file: Path, log_dir: Path, on_end: Callable[[], None]
    ) -> None:
        role = name.partition("-")[0]
        program = "prefill" if role == "combined" else role
        self.name = name
        self.was_killed = False
        self.ended = asyncio.Event()
        self._tell = on_end
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FLOWPATH_")}
        with (log_dir / f"{name}.out").open("ab") as output:
            self.popen = subprocess.Popen(
                [
                    *(sys.executable, "-m", f"services.{program}", "--id", name),
                    *("--settings", str(settings_file), "--parent", str(os.getpid())),
                ],
                cwd=REPOSITORY,
                env={**environment, "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._pidfd = os.pidfd_open(self.popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.popen.wait()
        self.ended.set()
        self._tell()

    def send(self, number: signal.Signals) -> None:
        """Send a signal; none when the process has ended."""
        if not self.ended.is_set():
            self.was_killed |= number is signal.SIGKILL
            self.popen.send_signal(number)

    async def wait(self, deadline_seconds: float) -> int:
        """Return the exit code (negative: a signal). Raises TimeoutError."""
        async with asyncio.timeout(deadline_seconds):
            await self.ended.wait()
        return self.popen.wait()


class Cluster:
    """A running cluster; made by ``running_cluster``."""

    def __init__(self, options: ClusterOptions, root: Path) -> None:
        self.options = options
        self.settings = options.to_settings(root)
        self.log_dir = self.settings.log_dir
        self.run_dir = self.settings.run_dir
        self.url = ""
        self._root = root
        self._processes: dict[str, _Process] = {}
        self._client: httpx.AsyncClient | None = None
        self._some_ended = asyncio.Event()

    @property
    def client(self) -> httpx.AsyncClient:
        """An HTTP client with the gateway's URL as its base."""
        if self._client is None:
            raise ClusterError("the cluster is not ready: it has no URL yet")
        return self._client

    @property
    def model_name(self) -> str:
        """The served model's name."""
        return self.settings.model_name

    # ---- processes -------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start one program by its name in the cluster (``controller``, ``prefill-0``, …)."""
        running = self._processes.get(name)
        if running is not None and not running.ended.is_set():
            raise ClusterError(f"{name} is running")
        self._processes[name] = _Process(
            name, self._settings_file(name), self.log_dir, self._some_ended.set
        )

    def _settings_file(self, name: str) -> Path:
        return self._root / f"{name if name in self.options.worker_settings else 'all'}.json"

    async def start_all(self) -> None:
        """Start every program and wait until the cluster is ready."""
        self.run_dir.mkdir(mode=0o700)
        self.log_dir.mkdir(mode=0o700)
        for name in ("all", *self.options.worker_settings):
            save_settings(self.options.to_settings(self._root, name), self._settings_file(name))
        for name in (CONTROLLER, *self.options.worker_ids, GATEWAY):
            self.start(name)
        await self.wait_ready()

    def pid(self, name: str) -> int:
        """Return the process id of a program."""
        return self._processes[name].popen.pid

    def pids(self) -> dict[str, int]:
        """Return the process ids of what runs."""
        return {n: p.popen.pid for n, p in self._processes.items() if not p.ended.is_set()}

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one program."""
        self._processes[name].send(number)

    async def kill(self, name: str) -> None:
        """Kill one program with SIGKILL and wait until it is gone."""
        self._processes[name].send(signal.SIGKILL)
        await self.end_of(name, STOP_SECONDS)

    async def restart(self, name: str) -> None:
        """Kill one program where it still runs, start it anew and wait until all is ready."""
        await self.kill(name)
        self.start(name)
        await self.wait_ready()

    async def stop(self) -> None:
        """End every program with SIGTERM: gateway, workers, controller.

        ClusterError when one does not end in time or not with exit code 0 (a killed one aside),
        or when a socket file is left.
        """
        await self._close_client()
        for names in ((GATEWAY,), self.options.worker_ids, (CONTROLLER,)):
            for name in names:
                self._processes[name].send(signal.SIGTERM)
            for name in names:
                code = await self.end_of(name, STOP_SECONDS)
                if code != 0 and not self._processes[name].was_killed:
                    raise ClusterError(f"{name} ended with exit code {code}\n{self.log_tail()}")
        if left := self.leftover_sockets():
            raise ClusterError(f"socket files are left: {left}\n{self.log_tail()}")

    def leftover_sockets(self) -> list[str]:
        """Return the socket files of programs that have ended, those of killed ones aside."""
        killed = {name for name, process in self._processes.items() if process.was_killed}
        return sorted(
            path.name
            for path in self.run_dir.iterdir()
            if stat.S_ISSOCK(path.lstat().st_mode)
            and (owner := path.name.partition(".")[0]) not in killed
            and self._processes[owner].ended.is_set()
        )

    async def end_at_once(self) -> None:
        """Kill everything; nothing is checked."""
        await self._close_client()
        for name, process in self._processes.items():
            process.send(signal.SIGKILL)
            await self.end_of(name, STOP_SECONDS)

    async def end_of(self, name: str, deadline_seconds: float = STOP_SECONDS) -> int:
        """Wait for a program's end and return its exit code (negative: a signal)."""
        try:
            return await self._processes[name].wait(deadline_seconds)
        except TimeoutError:
            raise ClusterError(
                f"{name} did not end within {deadline_seconds:g} s\n{self.log_tail()}"
            ) from None

    async def _close_client(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    # ---- the operator's view ---------------------------------------------------------------------

    async def status(self) -> StatusReport | None:
        """Return the controller's report, or None when it does not answer at once."""
        return await ask_status(self.settings, 1.0)

    async def worker(self, name: str) -> WorkerStatus | None:
        """Return one worker's status, or None while the controller does not know it."""
        report = await self.status()
        workers = () if report is None else report.workers
        return next((worker for worker in workers if worker.id == name), None)

    async def kv_counts(self) -> dict[str, KVCounts]:
        """Return every worker's block counts as its last heartbeat told them."""
        report = await self.status()
        if report is None:
            raise ClusterError(f"the controller does not answer\n{self.log_tail()}")
        return {worker.id: worker.kv for worker in report.workers if worker.kv is not None}

    async def wait_until(
        self,
        what: str,
        is_so: Callable[[StatusReport], bool],
        deadline_seconds: float = STOP_SECONDS,
    ) -> StatusReport:
        """Ask for reports until one is as wanted, and return it. ClusterError at the deadline."""
        deadline = monotonic() + deadline_seconds
        report = None
        while monotonic() < deadline:
            report = await self.status()
            if report is not None and is_so(report):
                return report
            await self._pause()
        raise ClusterError(
            f"not within {deadline_seconds:g} s: {what}; last: {report}\n{self.log_tail()}"
        )

    async def wait_ready(self) -> None:
        """Wait until every worker and the gateway serve; a program that ends meanwhile is told."""
        num_workers = len(self.options.worker_ids)
        pids = set(self.pids().values())

        def is_ready(report: StatusReport) -> bool:
            if ended := [name for name, p in self._processes.items() if p.ended.is_set()]:
                raise ClusterError(f"{', '.join(ended)} ended at the start\n{self.log_tail()}")
            workers = [w for w in report.workers if w.pid in pids and w.kv is not None]
            gateways = [gateway for gateway in report.gateways if gateway.pid in pids]
            return report.is_ready and len(workers) == num_workers and len(gateways) == 1

        report = await self.wait_until("the cluster is ready", is_ready, START_SECONDS)
        url = next(gateway.url for gateway in report.gateways if gateway.pid in pids)
        if url != self.url:
            await self._close_client()
            self.url = url
            self._client = httpx.AsyncClient(
                base_url=url,
                timeout=ANSWER_SECONDS,
                limits=httpx.Limits(max_connections=None),
                trust_env=False,
            )
        deadline = monotonic() + START_SECONDS
        while (await self.client.get("/health")).status_code != 200:
            if monotonic() > deadline:
                raise ClusterError(f"/health is not 200\n{self.log_tail()}")
            await self._pause()

    async def wait_idle(self, deadline_seconds: float = STOP_SECONDS) -> dict[str, KVCounts]:
        """Wait until nothing runs and no block is referenced or in transfer; return the counts.

        The reports must say so for longer than two heartbeats: older ones could be from before
        the last request.
        """
        idle_since: float | None = None
        settled = 2.5 * self.settings.heartbeat_seconds

        def is_idle(report: StatusReport) -> bool:
            nonlocal idle_since
            if not _is_idle(report):
                idle_since = None
                return False
            idle_since = monotonic() if idle_since is None else idle_since
            return monotonic() - idle_since > settled

        report = await self.wait_until("the cluster is idle", is_idle, deadline_seconds)
        return {worker.id: worker.kv for worker in report.workers if worker.kv is not None}

    def log_tail(self) -> str:
        """Return the last lines that every program logged or printed."""
        tails = []
        for path in sorted([*self.log_dir.glob("*.jsonl"), *self.log_dir.glob("*.out")]):
            lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            if lines:
                tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)

    async def _pause(self) -> None:
        """Wait a little, or until some program ends."""
        self._some_ended.clear()
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._some_ended.wait()
        except TimeoutError:
            return

    # ---- requests --------------------------------------------------------------------------------

    async def ask(self, path: str, body: Json) -> Answer:
        """Post a completion, streamed where ``body`` says so, and return the whole answer.

        The model's name is filled in. ClusterError unless the answer is 200 and complete.
        """
        if not body.get("stream"):
            response = await self.client.post(path, json={"model": self.model_name, **body})
            if response.status_code != 200:
                raise ClusterError(f"{path}: {response.status_code} {response.text}")
            return read_whole(response.json(), response.headers["x-request-id"])
        async with self.stream(path, body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                raise ClusterError(f"{path}: {response.status_code} {text}")
            events = [event async for event in events_of(response)]
        return gather_stream(events, response.headers["x-request-id"])

    @asynccontextmanager
    async def stream(self, path: str, body: Json) -> AsyncIterator[httpx.Response]:
        """Post a streamed completion; leaving the block early disconnects."""
        body = {"model": self.model_name, "stream": True, **body}
        async with self.client.stream("POST", path, json=body) as response:
            yield response


@asynccontextmanager
async def running_cluster(options: ClusterOptions) -> AsyncIterator[Cluster]:
    """Run a cluster as long as the block: ready at its start, stopped and checked at its end.

    When the block fails, everything is killed and nothing more is checked.
    """
    root = Path(tempfile.mkdtemp(prefix="fp-"))
    cluster = Cluster(options, root)
    try:
        await cluster.start_all()
        yield cluster
        await cluster.stop()
    finally:
        await cluster.end_at_once()
        shutil.rmtree(root)


def _is_idle(report: StatusReport) -> bool:
    if report.num_requests or any(gateway.num_streams for gateway in report.gateways):
        return False
    for worker in report.workers:
        kv, load = worker.kv, worker.load
        if kv is None or load is None or kv.referenced or kv.in_transfer:
            return False
        if load.num_waiting or load.num_prefilling or load.num_sending:
            return False
        if load.num_receiving or load.num_decoding:
            return False
    return True
