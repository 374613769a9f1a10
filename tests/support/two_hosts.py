"""Two network namespaces as two hosts, the cable between them, and FlowPath's programs on both.

The hosts have loopbacks and one Ethernet link of their own, so a port that is fixed here collides
with nothing. They share files and process ids, which real hosts do not, and would share the host's
name: B has another one, so that its programs count as those of another host (host_id).
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from uuid import uuid4

from common.config.load import save_settings
from common.config.settings import Settings
from common.messages.admin import StatusReport
from common.telemetry.story import LogEntry, read_log_folder
from common.transport.addresses import controller_endpoint, load_keys
from services.cli.admin import ask_status
from tests.support.answers import Answer, Json, read_whole
from tests.support.cluster import REPOSITORY

DEVICE = "eth0"
B_HOSTNAME = "flowpath-b"
TOOL_SECONDS = 20.0
POLL_SECONDS = 0.05
START_SECONDS = 120.0
WAIT_SECONDS = 30.0
STOP_SECONDS = 20.0
TAIL_LINES = 15
CLIENT = Path(__file__).with_name("post_json.py")


class HostError(Exception):
    """Something on the two hosts did not come about; the text ends with their logs."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host: its namespace, its address on the cable, and its own folder of files."""

    namespace: str
    address: str
    folder: Path
    hostname: str = ""

    @property
    def keys(self) -> Path:
        """Its key folder, which a test makes."""
        return self.folder / "keys"

    @property
    def log_dir(self) -> Path:
        """Where its programs log."""
        return self.folder / "log"

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs a command on this host, as one process."""
        entered = ["nsenter", f"--net=/run/netns/{self.namespace}"]
        if self.hostname:
            rename = 'hostname "$0" && exec "$@"'
            entered += ["unshare", "--uts", "sh", "-c", rename, self.hostname]
        return [*entered, *command]

    def run(self, *command: str) -> str:
        """Run a tool on this host and return what it printed. HostError when it fails."""
        return _run(*self.inside(*command))


class Cable:
    """The only link between two hosts."""

    def __init__(self, a: Host, b: Host) -> None:
        self.a = a
        self.b = b

    def cut(self, at: Host) -> None:
        """Let nothing through any more; this host's kernel knows it, the other's does not."""
        at.run("ip", "link", "set", DEVICE, "down")

    def mend(self, at: Host) -> None:
        """Let everything through again."""
        at.run("ip", "link", "set", DEVICE, "up")

    def slow_down(self, megabits_per_second: int) -> None:
        """Limit both directions."""
        for host in (self.a, self.b):
            host.run(
                *("tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf"),
                *("rate", f"{megabits_per_second}mbit", "burst", "256kb", "latency", "50ms"),
            )

    def speed_up(self) -> None:
        """Take the limit away."""
        for host in (self.a, self.b):
            host.run("tc", "qdisc", "del", "dev", DEVICE, "root")

    def num_bytes_to_b(self) -> int:
        """Bytes that host B has got so far."""
        told = json.loads(self.b.run("ip", "-j", "-s", "link", "show", "dev", DEVICE))
        return int(told[0]["stats64"]["rx"]["bytes"])


def why_no_hosts() -> str | None:
    """Say why this machine cannot play two hosts, if so."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian package {package})"
    probe = f"fp{uuid4().hex[:8]}"
    try:
        _run("ip", "netns", "add", probe)
        try:
            _run("nsenter", f"--net=/run/netns/{probe}", "ip", "link", "set", "lo", "up")
        finally:
            _run("ip", "netns", "del", probe)
    except HostError as error:
        return f"no network namespace can be made here: {error}"
    return None


@contextmanager
def two_hosts() -> Iterator[Cable]:
    """Make two hosts joined by a cable; they are gone at the end of the block, however it ends."""
    root = Path(tempfile.mkdtemp(prefix="fp-"))
    name = f"fp{uuid4().hex[:8]}"
    a = Host(f"{name}a", "10.77.0.1", root / "a")
    b = Host(f"{name}b", "10.77.0.2", root / "b", B_HOSTNAME)
    try:
        for host in (a, b):
            host.folder.mkdir()
            _run("ip", "netns", "add", host.namespace)
        _run(
            *("ip", "link", "add", DEVICE, "netns", a.namespace, "type", "veth"),
            *("peer", "name", DEVICE, "netns", b.namespace),
        )
        for host in (a, b):
            host.run("ip", "address", "add", f"{host.address}/30", "dev", DEVICE)
            for device in ("lo", DEVICE):
                host.run("ip", "link", "set", device, "up")
        yield Cable(a, b)
    finally:
        for host in (a, b):
            if Path("/run/netns", host.namespace).exists():
                _run("ip", "netns", "del", host.namespace)
        shutil.rmtree(root)


class Program:
    """One program on one host; what it prints goes to a file beside its log."""

    def __init__(self, host: Host, name: str, command: list[str]) -> None:
        self.host = host
        self.name = name
        self._output = host.folder / f"{name}.out"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FLOWPATH_")}
        with self._output.open("ab") as output:
            self.popen = subprocess.Popen(
                host.inside(*command),
                cwd=REPOSITORY,
                env={**kept, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def output(self) -> str:
        """All that it has printed."""
        return self._output.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self.popen.poll() is not None


class HostedCluster:
    """A cluster over two hosts: the controller is on A. Made by ``hosted_cluster``."""

    def __init__(self, cable: Cable, values: Mapping[str, object]) -> None:
        self.cable = cable
        self.programs: dict[str, Program] = {}
        self._values = values
        self.url = ""

    def settings_of(self, host: Host, **more: object) -> Settings:
        """Return a host's settings; ``more`` win over those of the cluster."""
        values: dict[str, object] = {
            "port": 0,
            "threads": 1,
            "cluster_host": host.address,
            "keys": host.keys,
            "run_dir": host.folder / "run",
            "log_dir": host.log_dir,
            **self._values,
            **more,
        }
        if host.namespace == self.cable.b.namespace and "controller" not in values:
            on_a = self.settings_of(self.cable.a)
            values["controller"] = controller_endpoint(on_a, load_keys(on_a))
        return Settings.model_validate(values)

    def join(self) -> str:
        """Return the endpoint that B gives its programs to join A's controller."""
        return str(self.settings_of(self.cable.b).controller)

    # ---- programs --------------------------------------------------------------------------------

    def start(self, host: Host, name: str, **more: object) -> Program:
        """Start one program by its name in the cluster (``controller``, ``decode-0``, …)."""
        role = name.partition("-")[0]
        path = host.folder / f"{name}.json"
        save_settings(self.settings_of(host, **more), path)
        command = [sys.executable, "-m", f"services.{role}", "--settings", str(path), "--id", name]
        return self.run(host, name, [*command, "--parent", str(os.getpid())])

    def run(self, host: Host, name: str, command: list[str]) -> Program:
        """Run a command under a name; what is left of it at the end is killed."""
        self.programs[name] = Program(host, name, command)
        return self.programs[name]

    async def kill(self, name: str) -> None:
        """Kill one program and wait until it is gone."""
        self.programs[name].popen.kill()
        await self.ended(name)

    async def ended(self, name: str, deadline_seconds: float = STOP_SECONDS) -> int:
        """Wait for a program's end and return its exit code (negative: a signal)."""
        program = self.programs[name]
        await self._until(f"{name} ended", lambda: program.has_ended, deadline_seconds)
        return program.popen.wait()

    async def stop(self, *names: str) -> None:
        """End programs with SIGTERM, one after the other. HostError when one ends not with 0."""
        for name in names:
            self.programs[name].popen.send_signal(signal.SIGTERM)
            code = await self.ended(name)
            if code != 0:
                raise HostError(f"{name} ended with exit code {code}\n{self.log_tail()}")

    def kill_all(self) -> None:
        """Kill whatever runs, with its children."""
        for program in self.programs.values():
            if not program.has_ended:
                os.killpg(program.popen.pid, signal.SIGKILL)
                program.popen.wait()

    # ---- what is to be seen ----------------------------------------------------------------------

    async def status(self) -> StatusReport | None:
        """Return the controller's report, or None when none comes at once."""
        return await ask_status(self.settings_of(self.cable.a), 1.0)

    async def wait_until(
        self,
        what: str,
        is_so: Callable[[StatusReport], bool],
        deadline_seconds: float = WAIT_SECONDS,
    ) -> StatusReport:
        """Ask for reports until one is as wanted, and return it. HostError at the deadline."""
        deadline = monotonic() + deadline_seconds
        report = None
        while monotonic() < deadline:
            report = await self.status()
            if report is not None and is_so(report):
                return report
            await _pause()
        told = f"not within {deadline_seconds:g} s: {what}; last: {report}"
        raise HostError(f"{told}\n{self.log_tail()}")

    async def wait_ready(self, *workers: str) -> None:
        """Wait until these workers and a gateway serve; a program that ends meanwhile is told."""

        def is_ready(report: StatusReport) -> bool:
            if ended := [name for name, one in self.programs.items() if one.has_ended]:
                raise HostError(f"{', '.join(ended)} ended at the start\n{self.log_tail()}")
            known = {worker.id for worker in report.workers if worker.kv is not None}
            return report.is_ready and known.issuperset(workers) and bool(report.gateways)

        report = await self.wait_until("the cluster is ready", is_ready, START_SECONDS)
        self.url = report.gateways[0].url
        deadline = monotonic() + START_SECONDS
        while (await self.http("/health"))["status"] != 200:
            if monotonic() > deadline:
                raise HostError(f"/health is not 200\n{self.log_tail()}")

    async def wait_idle(self, deadline_seconds: float = WAIT_SECONDS) -> StatusReport:
        """Wait until nothing runs and no block is held but for the cache.

        The reports must say so for longer than two heartbeats: older ones could be from before
        the last request.
        """
        idle_since: float | None = None

        def is_idle(report: StatusReport) -> bool:
            nonlocal idle_since
            if not _is_idle(report):
                idle_since = None
                return False
            idle_since = idle_since or monotonic()
            return monotonic() - idle_since > 0.5

        return await self.wait_until("the cluster is idle", is_idle, deadline_seconds)

    def logged(self, host: Host, process: str, event: str) -> list[LogEntry]:
        """Return what a program has logged of one event."""
        entries = read_log_folder(host.log_dir) if host.log_dir.exists() else ()
        return [entry for entry in entries if (entry.process, entry.event) == (process, event)]

    async def wait_logged(
        self,
        host: Host,
        process: str,
        event: str,
        number: int = 1,
        deadline_seconds: float = WAIT_SECONDS,
    ) -> LogEntry:
        """Wait until a program has logged an event so many times; returns the last of them."""
        what = f"{process} logged {event} {number} times"
        enough = lambda: len(self.logged(host, process, event)) >= number  # noqa: E731
        await self._until(what, enough, deadline_seconds)
        return self.logged(host, process, event)[-1]

    async def wait_printed(
        self, name: str, part: str, deadline_seconds: float = START_SECONDS
    ) -> str:
        """Wait until a program has printed a line with this part, and return the line."""
        program = self.programs[name]

        def found() -> str | None:
            return next((line for line in program.output.splitlines() if part in line), None)

        is_over = lambda: found() is not None or program.has_ended  # noqa: E731
        await self._until(f"{name} printed {part!r}", is_over, deadline_seconds)
        line = found()
        if line is None:
            raise HostError(f"{name} ended and never printed {part!r}\n{self.log_tail()}")
        return line

    def log_tail(self) -> str:
        """Return the last lines that every program logged or printed."""
        tails = []
        for host in (self.cable.a, self.cable.b):
            for path in sorted([*host.log_dir.glob("*.jsonl"), *host.folder.glob("*.out")]):
                lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
                tails.append("\n".join([f"--- {path}", *lines]))
        return "\n".join(tails)

    async def _until(
        self, what: str, is_so: Callable[[], bool], deadline_seconds: float = WAIT_SECONDS
    ) -> None:
        deadline = monotonic() + deadline_seconds
        while not is_so():
            if monotonic() > deadline:
                raise HostError(f"not within {deadline_seconds:g} s: {what}\n{self.log_tail()}")
            await _pause()

    # ---- requests --------------------------------------------------------------------------------

    async def http(self, path: str, body: Json | None = None) -> Json:
        """Ask the gateway from host A: ``status``, ``request_id`` and ``body`` of its answer.

        ``body`` is posted, with the model's name filled in.
        """
        process = await asyncio.create_subprocess_exec(
            *self.cable.a.inside(sys.executable, "-I", str(CLIENT), self.url + path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        model = self.settings_of(self.cable.a).model_name
        sent = b"" if body is None else json.dumps({"model": model, **body}).encode()
        output, errors = await process.communicate(sent)
        if process.returncode != 0:
            raise HostError(f"{path}: {errors.decode()}\n{self.log_tail()}")
        told: Json = json.loads(output)
        return told

    async def ask(self, path: str, body: Json) -> Answer:
        """Post a completion and return its whole answer. HostError unless it is 200."""
        told = await self.http(path, body)
        if told["status"] != 200:
            raise HostError(f"{path}: {told}\n{self.log_tail()}")
        return read_whole(told["body"], told["request_id"])


@contextmanager
def hosted_cluster(cable: Cable, values: Mapping[str, object]) -> Iterator[HostedCluster]:
    """Let a test start programs on both hosts; at the end what still runs is killed.

    ``values`` are settings by name, the same for both hosts.
    """
    cluster = HostedCluster(cable, values)
    try:
        yield cluster
    finally:
        cluster.kill_all()


def exchange_keys(cable: Cable) -> None:
    """Let each host in on the other one; both have their keys."""
    for host, other in ((cable.a, cable.b), (cable.b, cable.a)):
        shutil.copy(other.keys / "node.key", host.keys / "allowed" / "other.key")


async def _pause() -> None:
    never = asyncio.Event()
    try:
        async with asyncio.timeout(POLL_SECONDS):
            await never.wait()
    except TimeoutError:
        return


def _is_idle(report: StatusReport) -> bool:
    if report.num_requests or any(gateway.num_streams for gateway in report.gateways):
        return False
    return all(
        worker.kv is not None
        and worker.load is not None
        and worker.kv.referenced == worker.kv.in_transfer == 0
        and worker.load.num_sending == worker.load.num_receiving == 0
        for worker in report.workers
    )


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False
    )
    if done.returncode != 0:
        raise HostError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
