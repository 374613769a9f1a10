"""The image built and brought up by Docker Compose on a fresh checkout, chatted with, taken down.

Where no registry can be reached, the image stands on Debian as debootstrap installs it, and its
packages come from wheels that pip downloads before.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time

import pytest

from tests.support.docker_engine import (
    DockerEngine,
    EngineError,
    compose_command,
    docker_engine,
    why_no_engine,
)

ROOT = Path(__file__).parents[2]
PROGRAMS = ("controller", "prefill", "decode", "gateway")
PUBLIC_BASE = "python:3.12-slim"
OFFLINE_PYTHON = "3.11"
MINUTE = 60.0
HEALTHY_SECONDS = 180
SETTINGS = {"FLOWPATH_KV_BYTES": "128MiB", "FLOWPATH_DTYPE": "float32"}

BASES = ("FLOWPATH_BASE_IMAGE", "FLOWPATH_BUILD_BASE_IMAGE")

Note = Callable[[str], None]


def test_compose_takes_the_file_and_reserves_gpus_in_the_gpu_profile_alone() -> None:
    command = compose_command()
    if command is None:
        pytest.skip("neither `docker compose` nor docker-compose is installed")
    engine = DockerEngine(command)
    usual, gpu = (
        engine.run((*command, "-f", str(ROOT / "compose.yaml"), *profile, "config"), MINUTE)
        for profile in ((), ("--profile", "gpu"))
    )
    assert gpu.count("driver: nvidia") == 2
    # Version 1 prints services of other profiles too, each with its profile.
    assert usual.count("driver: nvidia") == usual.count("profiles:")
    assert "TORCH: cuda" in gpu


@dataclass(frozen=True, slots=True)
class Composed:
    """A project of compose in a checkout of its own."""

    engine: DockerEngine
    checkout: Path
    project: str
    port: int

    def compose(self, *arguments: str, deadline_seconds: float = 2 * MINUTE) -> str:
        """Run a command of compose."""
        command = (*self.engine.compose_command, *arguments)
        return self.engine.run(command, deadline_seconds, self.checkout)

    def inside(self, program: str, *command: str) -> str:
        """Run a command in a program's container."""
        return self.compose("exec", "-T", program, *command)

    def is_refused(self, program: str, *command: str) -> bool:
        """Whether a command in a program's container fails."""
        try:
            self.inside(program, *command)
        except EngineError:
            return True
        return False

    def of_project(self, *kind: str) -> list[str]:
        """Return the ids of the containers, networks or volumes of the project."""
        label = f"label=com.docker.compose.project={self.project}"
        return self.engine.docker(*kind, "--quiet", "--filter", label).split()

    def up(self) -> None:
        """Bring everything up and wait until every program is healthy."""
        template = '{{.Action}} {{index .Actor.Attributes "com.docker.compose.service"}}'
        command = ("docker", "events", "--until", str(int(time()) + HEALTHY_SECONDS))
        watched = subprocess.Popen(
            (*command, "--filter", "event=health_status", "--format", template),
            env={**os.environ, **self.engine.variables},
            stdout=subprocess.PIPE,
            text=True,
        )
        unhealthy = set(PROGRAMS)
        with watched:
            try:
                self.compose("up", "--detach")
                assert watched.stdout is not None
                for line in watched.stdout:
                    action, _, program = line.strip().rpartition(" ")
                    if action == "health_status: healthy":
                        unhealthy.discard(program)
                    if not unhealthy:
                        return
            finally:
                watched.kill()
        logs = self.compose("logs", "--tail", "20")
        raise EngineError(f"not healthy in {HEALTHY_SECONDS} s: {sorted(unhealthy)}\n{logs}")


@pytest.fixture
def composed(tmp_path: Path, note: Note, monkeypatch: pytest.MonkeyPatch) -> Iterator[Composed]:
    """The image, built; whatever a test leaves running is taken down."""
    if missing := why_no_engine():
        pytest.skip(missing)
    for name in [name for name in os.environ if name.startswith(("FLOWPATH_", "COMPOSE_"))]:
        monkeypatch.delenv(name)
    project = f"flowpath-{secrets.token_hex(4)}"
    checkout = _fresh_checkout(tmp_path / "checkout")
    with docker_engine() as engine:
        port = _free_port()
        image = f"{project}:test"
        engine.variables.update(
            SETTINGS, COMPOSE_PROJECT_NAME=project, FLOWPATH_IMAGE=image, FLOWPATH_PORT=str(port)
        )
        if not _reaches_registry(engine):
            _prepare_offline(engine, checkout, project, note)
        project_of_test = Composed(engine, checkout, project, port)
        started = monotonic()
        project_of_test.compose("build", deadline_seconds=20 * MINUTE)
        num_bytes = int(engine.docker("image", "inspect", "--format", "{{.Size}}", image))
        note(f"image: {num_bytes / 1e6:.0f} MB, built in {monotonic() - started:.0f} s")
        try:
            yield project_of_test
        finally:
            project_of_test.compose("down", "--volumes", "--rmi", "all")
            if bases := [engine.variables[name] for name in BASES if name in engine.variables]:
                engine.docker("rmi", *bases)


def _fresh_checkout(folder: Path) -> Path:
    listed = subprocess.run(
        ("git", "-C", str(ROOT), "ls-files", "-z"), capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not run from a git checkout, which is what the image is built from")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _reaches_registry(engine: DockerEngine) -> bool:
    if engine.own_pid is not None:
        return False
    try:
        engine.docker("pull", PUBLIC_BASE, deadline_seconds=10 * MINUTE)
    except (EngineError, subprocess.TimeoutExpired):
        return False
    return True


def _prepare_offline(engine: DockerEngine, checkout: Path, project: str, note: Note) -> None:
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("no registry can be reached, and debootstrap as root is not there either")
    run, build = f"{project}:base", f"{project}:build"
    offline = ("bash", str(checkout / "deploy" / "offline.sh"))
    engine.variables.update(zip(BASES, (run, build), strict=True), PYTHON=sys.executable)
    started = monotonic()
    wheels = str(checkout / "deploy" / "wheels")
    engine.run((*offline, "wheels", wheels, OFFLINE_PYTHON), 10 * MINUTE)
    note(f"wheels for a build without network: {monotonic() - started:.0f} s")
    started = monotonic()
    engine.run((*offline, "bases", run, build), 15 * MINUTE)
    note(f"base images by debootstrap: {monotonic() - started:.0f} s")


@pytest.mark.compose
@pytest.mark.e2e
@pytest.mark.timeout(45 * MINUTE)
def test_a_fresh_checkout_is_built_brought_up_chatted_with_and_taken_down(
    composed: Composed, note: Note
) -> None:
    started = monotonic()
    composed.up()
    note(f"every program healthy {monotonic() - started:.0f} s after `up`")

    pieces = _stream_chat(composed, "What is the capital of France?")
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 2, "the answer came in one piece"
    _check_pools_are_mapped(composed)
    _check_confinement(composed)

    composed.compose("stop")
    codes = "{{.State.ExitCode}}"
    for program in PROGRAMS:
        container = composed.compose("ps", "--all", "--quiet", program).strip()
        code = composed.engine.docker("inspect", "--format", codes, container).strip()
        assert code == "0", f"{program} ended with exit code {code}"

    composed.compose("down", "--volumes")
    left = {
        kind: composed.of_project(*command)
        for kind, command in {
            "containers": ("ps", "--all"),
            "networks": ("network", "ls"),
            "volumes": ("volume", "ls"),
        }.items()
    }
    assert left == {"containers": [], "networks": [], "volumes": []}


def _stream_chat(composed: Composed, question: str) -> list[str]:
    """Ask through the published port; return the texts as they came."""
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 16,
        "stream": True,
    }
    connection = composed.engine.connect(composed.port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    lines = response.read().decode().splitlines()
    connection.close()
    assert response.status == 200, lines
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return [text for choice in choices if (text := choice["delta"].get("content"))]


def _check_pools_are_mapped(composed: Composed) -> None:
    """The workers talk over shm, and the prefill worker has both pools' memory mapped."""
    lines = composed.inside("prefill", "cat", "/var/log/flowpath/prefill-0.jsonl").splitlines()
    events = [json.loads(line) for line in lines]
    paired = [event for event in events if event["event"] == "paired"]
    assert [event["transport"] for event in paired] == ["shm"]
    accepted = composed.inside("decode", "cat", "/var/log/flowpath/decode-0.jsonl")
    assert '"handoff_accepted"' in accepted

    report = json.loads(composed.inside("gateway", "flowpath", "status", "--json"))
    pid = next(worker["pid"] for worker in report["workers"] if worker["id"] == "prefill-0")
    maps = composed.inside("prefill", "cat", f"/proc/{pid}/maps").splitlines()
    pools = {line.split()[4] for line in maps if "/memfd:flowpath-kv" in line}
    assert len(pools) == 2, f"inodes of pools that prefill-0 has mapped: {pools}"


def _check_confinement(composed: Composed) -> None:
    """No program is root, may write its files or has capabilities; one has a network."""
    for program in PROGRAMS:
        assert composed.inside(program, "id", "-u").strip() == "10001", program
        assert composed.is_refused(program, "touch", "/opt/flowpath/written"), program
        capabilities = composed.inside(program, "grep", "^CapBnd", "/proc/self/status")
        assert int(capabilities.split()[1], 16) == 0, program
        interfaces = composed.inside(program, "ls", "/sys/class/net").split()
        assert ("eth0" in interfaces) is (program == "gateway"), f"{program}: {interfaces}"
    assert composed.inside("gateway", "stat", "-c", "%a", "/run/flowpath").strip() == "700"
    published = composed.compose("port", "gateway", "8000").strip()
    assert published == f"127.0.0.1:{composed.port}"
