"""``flowpath serve`` as a user runs it, and what it must not leave behind."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import httpx
import psutil

from common.config.settings import Settings
from common.messages.admin import StatusReport
from common.telemetry.story import read_log_folder
from services.cli.admin import ask_status
from tests.support.answers import Answer, Json, events_of, gather_stream, read_whole
from tests.support.cluster import REPOSITORY
from tests.support.held_port import held_port

POOL_FILE = "memfd:flowpath-kv"
READY = "ready after"
START_SECONDS = 120.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.05
ANSWER_SECONDS = 180.0
MAX_TOLD_LINES = 200


class ServeError(Exception):
    """``flowpath serve`` did not do in time what it should have; the text ends with its output."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a running cluster holds: process ids and the memory files of its pools."""

    pids: frozenset[int]
    memory_files: frozenset[tuple[str, int]]
    """Device, as in /proc/PID/maps, and inode."""


class Served:
    """One run of ``flowpath serve``; made by ``serving``."""

    def __init__(self, process: Process, settings: Settings) -> None:
        self.settings = settings
        self.lines: list[str] = []
        self._process = process
        self._changed = asyncio.Event()

    async def read(self) -> None:
        """Take its output until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip())
            self._changed.set()
        await self._process.wait()
        self._changed.set()

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self._process.pid

    @property
    def output(self) -> str:
        """All that it has printed."""
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.settings.url

    async def line(self, part: str, deadline_seconds: float = START_SECONDS) -> str:
        """Wait for a line with this part. ServeError when it ends before, or at the deadline."""
        deadline = monotonic() + deadline_seconds
        while True:
            found = next((line for line in self.lines if part in line), None)
            if found is not None:
                return found
            if self._process.returncode is not None or monotonic() > deadline:
                raise ServeError(f"no line with {part!r}\n{self.output}")
            await self._pause()

    async def ended(self, deadline_seconds: float = STOP_SECONDS) -> int:
        """Wait for its end and return the exit code (negative: a signal)."""
        deadline = monotonic() + deadline_seconds
        while self._process.returncode is None:
            if monotonic() > deadline:
                raise ServeError(f"it did not end\n{self.output}")
            await self._pause()
        return self._process.returncode

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Signal its process group, as a terminal does at Ctrl-C."""
        os.killpg(self._process.pid, number)

    async def status(self) -> StatusReport | None:
        """Return the controller's report, or None when none comes at once."""
        return await ask_status(self.settings, 1.0)

    async def wait_until(
        self, what: str, is_so: Callable[[StatusReport], bool], deadline_seconds: float = 60.0
    ) -> StatusReport:
        """Ask for reports until one is as wanted, and return it. ServeError at the deadline."""
        deadline = monotonic() + deadline_seconds
        report = None
        while monotonic() < deadline:
            report = await self.status()
            if report is not None and is_so(report):
                return report
            await self._pause()
        raise ServeError(f"not within {deadline_seconds:g} s: {what}; {report}\n{self.output}")

    def footprint(self) -> Footprint:
        """Return what it holds now."""
        try:
            processes = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            processes = []
        pids = frozenset({self.pid, *(process.pid for process in processes)})
        return Footprint(pids, frozenset(_mapped_pools(pids)))

    async def _pause(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return


def leftovers(settings: Settings, held: Footprint) -> list[str]:
    """Name what of a cluster that has ended is still there: nothing should be."""
    left = _still_there(settings, held)
    still = set(_mapped_pools(psutil.pids())) & held.memory_files
    left += [f"memory file {inode}" for _, inode in still]
    if settings.run_dir.exists():
        left += [str(path) for path in settings.run_dir.iterdir()]
    left += [str(path) for path in Path("/dev/shm").glob("*flowpath*")]
    return left


def _is_port_taken(settings: Settings) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError:
            return True
    return False


def _still_there(settings: Settings, held: Footprint) -> list[str]:
    left = [f"process {pid}" for pid in held.pids if psutil.pid_exists(pid) and not _is_dead(pid)]
    return [*left, *([f"port {settings.port}"] if _is_port_taken(settings) else [])]


async def wait_gone(settings: Settings, held: Footprint, deadline_seconds: float = 10.0) -> None:
    """Wait until the processes have ended. ServeError at the deadline.

    A killed one is dead as soon as its first thread is, but its sockets close with its last.
    """
    deadline = monotonic() + deadline_seconds
    never = asyncio.Event()
    while left := _still_there(settings, held):
        if monotonic() > deadline:
            raise ServeError(f"{left} are still there")
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await never.wait()
        except TimeoutError:
            continue


def _told_by_children(log_dir: Path) -> str:
    """Return what programs printed and the errors that they logged, for a failing test."""
    entries = read_log_folder(log_dir) if log_dir.exists() else ()
    lines = [
        f"{entry.ts} {entry.process} {entry.event} {dict(entry.facts)}"
        for entry in entries
        if entry.event == "child_output" or entry.level in ("error", "critical")
    ]
    return "\n".join(lines[-MAX_TOLD_LINES:])


def _is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _mapped_pools(pids: Iterable[int]) -> list[tuple[str, int]]:
    found = []
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if POOL_FILE in line:
                _, _, _, device, inode, *_ = line.split()
                found.append((device, int(inode)))
    return found


@asynccontextmanager
async def serving(
    values: Mapping[str, object], *, folder: Path | None = None, is_ready: bool = True
) -> AsyncIterator[Served]:
    """Run ``flowpath serve`` as long as the block; what is left of it at the end is killed.

    ``values`` are settings by name, given in the environment as a user may. Sockets and logs go
    into ``folder``.
    """
    with ExitStack() as stack:
        port = values.get("port") or stack.enter_context(held_port())
        async with _serving({**values, "port": port}, folder, is_ready=is_ready) as served:
            yield served


@asynccontextmanager
async def _serving(
    values: Mapping[str, object], folder: Path | None, *, is_ready: bool
) -> AsyncIterator[Served]:
    root = folder or Path(tempfile.mkdtemp(prefix="fp-"))
    settings = Settings.model_validate(
        {
            "run_dir": root / "run",
            "log_dir": root / "log",
            "kv_bytes": 64 * 2**20,
            "threads": 1,
            "store": "none",
            **values,
        }
    )
    given = {
        f"FLOWPATH_{name.upper()}": str(getattr(settings, name))
        for name in settings.model_fields_set
    }
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FLOWPATH_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "serve"),
        cwd=REPOSITORY,
        env={**kept, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **given},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    served = Served(process, settings)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(served.read())
            try:
                if is_ready:
                    await served.line(READY)
                yield served
            except BaseException as error:
                error.add_note(_told_by_children(settings.log_dir))
                raise
            finally:
                if process.returncode is None:
                    process.kill()
    finally:
        if folder is None:
            shutil.rmtree(root)


class ServedClient:
    """Asks a served cluster. ServeError for an answer that is an error."""

    def __init__(self, served: Served, client: httpx.AsyncClient) -> None:
        self.http = client
        self.model = served.settings.model_name

    async def ask(self, path: str, body: Json) -> Answer:
        """Post a completion, streamed where ``body`` says so, and return the whole answer.

        RefusedError for an error instead, or in the middle.
        """
        body = {"model": self.model, **body}
        if not body.get("stream"):
            response = await self.http.post(path, json=body)
            if response.status_code != 200:
                raise RefusedError.of(response.status_code, response.json())
            return read_whole(response.json(), response.headers["x-request-id"])
        async with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise RefusedError.of(response.status_code, response.json())
            events = [event async for event in events_of(response)]
        failed = [event for event in events if "error" in event]
        if failed:
            raise RefusedError.of(200, failed[0])
        return gather_stream(events, response.headers["x-request-id"])


class RefusedError(Exception):
    """An error that the server told; status 200 when it came inside a stream."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code

    @classmethod
    def of(cls, status: int, body: Json) -> "RefusedError":
        """Read an error object."""
        error = body["error"]
        return cls(status, error["code"], error["message"])


@asynccontextmanager
async def client_of(served: Served) -> AsyncIterator[ServedClient]:
    """Open a client of a served cluster."""
    async with httpx.AsyncClient(
        base_url=served.url,
        timeout=ANSWER_SECONDS,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    ) as client:
        yield ServedClient(served, client)
