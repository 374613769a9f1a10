"""Two network namespaces as two hosts, and the cable between them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SIDE = Path(__file__).parent / "tcp_side.py"
LEASE_SECONDS = 5.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    """Two hosts on one cable."""

    ADDRESS = "10.213.7.1"

    def __init__(self) -> None:
        self.names = (f"fp{os.getpid()}a", f"fp{os.getpid()}b")
        self._processes: list[subprocess.Popen[str]] = []

    def lay_cable(self) -> None:
        first, second = self.names
        for name in self.names:
            ip("netns", "add", name)
        cable = ["link", "add", "fp0", "netns", first, "type", "veth"]
        ip(*cable, "peer", "name", "fp0", "netns", second)
        for name, address in zip(self.names, (self.ADDRESS, "10.213.7.2"), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "fp0")
            ip("-n", name, "link", "set", "fp0", "up")

    def cut_cable(self) -> None:
        ip("-n", self.names[0], "link", "set", "fp0", "down")

    def start(self, host: int, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], sys.executable, str(SIDE), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    hosts = Hosts()
    try:
        try:
            hosts.lay_cable()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield hosts
    finally:
        hosts.close()


def test_a_cable_cut_in_the_middle_of_a_transfer_is_an_error_within_the_lease(
    hosts: Hosts,
) -> None:
    owner = hosts.start(0, "owner", hosts.ADDRESS)
    writer = hosts.start(1, "writer")
    assert owner.stdout is not None
    assert owner.stdin is not None
    assert writer.stdout is not None
    assert writer.stdin is not None
    writer.stdin.write(owner.stdout.readline())
    writer.stdin.flush()
    for _ in range(3):
        assert writer.stdout.readline() == "written\n"
    hosts.cut_cable()
    told = next(line for line in writer.stdout if line != "written\n")
    seconds, error = json.loads(told)
    assert seconds < LEASE_SECONDS
    assert f"tcp {hosts.ADDRESS}:" in error
    assert "writing 33554432 bytes failed" in error
    owner.stdin.write("revoke\n")
    owner.stdin.flush()
    assert int(owner.stdout.readline()) <= 2, "the fence stands although nobody can be reached"
