"""A Docker engine for tests: the machine's own where it answers, or one of the test's own.

An own engine has a network and mounts of its own: it changes nothing of the machine, reaches no
registry, and ends with its process. What its containers publish is reached with ``connect``.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic

START_SECONDS = 60.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.2
ANSWER_SECONDS = 120.0
CLONE_NEWNET = 0x40000000
LOG_TAIL_BYTES = 3000
# iptables and ip are what dockerd calls; the networks are its own and need not be free outside.
OWN_ENGINE_NEEDS = ("dockerd", "containerd", "unshare", "ip", "iptables")
OWN_ENGINE = (
    *("unshare", "--net", "--mount", "--"),
    *("sh", "-c", 'ip link set lo up && exec "$@"', "-"),
)
OWN_NETWORKS = (
    *("--bip", "10.88.0.1/24"),
    *("--default-address-pool", "base=10.89.0.0/16,size=24"),
)


class EngineError(Exception):
    """A docker command failed; the text holds what it printed."""


@dataclass(frozen=True, slots=True)
class DockerEngine:
    """An engine that answers. ``own_pid`` is its process where it is the test's own."""

    compose_command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    own_pid: int | None = None

    def run(self, command: Sequence[str], deadline_seconds: float, cwd: Path | None = None) -> str:
        """Run any command against this engine and return what it printed."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **self.variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_seconds,
            check=False,
        )
        if done.returncode != 0:
            told = f"{done.stdout[-LOG_TAIL_BYTES:]}\n{done.stderr[-LOG_TAIL_BYTES:]}"
            raise EngineError(f"{' '.join(command)}: exit code {done.returncode}\n{told}")
        return done.stdout

    def docker(self, *arguments: str, deadline_seconds: float = 60.0) -> str:
        """Run a docker command."""
        return self.run(("docker", *arguments), deadline_seconds)

    def connect(self, port: int) -> HTTPConnection:
        """Connect to a port that a container publishes on loopback."""
        connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        if self.own_pid is None:
            return connection
        # Only the thread moves into the engine's network; a socket stays where it was made.
        with ThreadPoolExecutor(1) as mover:
            connection.sock = mover.submit(_connect_inside, self.own_pid, port).result()
        return connection


def _connect_inside(pid: int, port: int) -> socket.socket:
    with Path(f"/proc/{pid}/ns/net").open("rb") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    return socket.create_connection(("127.0.0.1", port), ANSWER_SECONDS)


def compose_command() -> tuple[str, ...] | None:
    """Return how Docker Compose is called here, version 2 or 1, or None."""
    if shutil.which("docker") and _succeeds("docker", "compose", "version"):
        return ("docker", "compose")
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    return None


def why_no_engine() -> str | None:
    """Return what is missing for any engine, or None."""
    if not shutil.which("docker"):
        return "docker is not installed"
    if compose_command() is None:
        return "neither `docker compose` nor docker-compose is installed"
    if _succeeds("docker", "info"):
        return None
    if os.geteuid() != 0:
        return "no Docker engine answers, and only root can start one"
    if missing := [name for name in OWN_ENGINE_NEEDS if not shutil.which(name)]:
        return f"no Docker engine answers, and to start one {', '.join(missing)} is missing"
    return None


@contextmanager
def docker_engine() -> Iterator[DockerEngine]:
    """Yield an engine, where ``why_no_engine`` misses nothing; an own one ends with the block."""
    compose = compose_command()
    assert compose is not None, "why_no_engine() was asked"
    if _succeeds("docker", "info"):
        yield DockerEngine(compose)
        return
    folder = Path(tempfile.mkdtemp(prefix="fp-docker-"))
    address = f"unix://{folder}/docker.sock"
    command = [
        *OWN_ENGINE,
        *("dockerd", "--host", address, "--pidfile", str(folder / "pid")),
        *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
        *OWN_NETWORKS,
    ]
    log_file = folder / "dockerd.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_ready(process, address, log_file)
        yield DockerEngine(compose, {"DOCKER_HOST": address}, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder)


def _wait_ready(process: subprocess.Popen[bytes], address: str, log_file: Path) -> None:
    deadline = monotonic() + START_SECONDS
    while not _succeeds("docker", "--host", address, "info"):
        try:
            code = process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if monotonic() < deadline:
                continue
            code = None
        tail = log_file.read_text(errors="replace")[-LOG_TAIL_BYTES:]
        raise EngineError(f"dockerd does not answer (exit code {code})\n{tail}")


def _succeeds(*command: str) -> bool:
    done = subprocess.run(command, capture_output=True, check=False, timeout=30.0)
    return done.returncode == 0
