"""NIXL between processes that stop and die, over UCX's tcp: both processors move the bytes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from common.transfer.nixl_packages import HOW_TO_INSTALL, is_nixl_installed

ROOT = Path(__file__).parents[3]
SIDE = Path(__file__).parent / "rdma_side.py"

pytestmark = pytest.mark.skipif(not is_nixl_installed(), reason=f"no NIXL here; {HOW_TO_INSTALL}")


class Side:
    """A process of ``rdma_side``."""

    def __init__(self, name: str) -> None:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, str(SIDE), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "UCX_TLS": "tcp"},
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def sides() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(sides: ExitStack, name: str) -> Side:
    side = Side(name)
    sides.callback(side.close)
    return side


def begin_write(sides: ExitStack, owner: Side, handle: object) -> Side:
    writer = start(sides, "writer")
    assert writer.ask(json.dumps([handle, owner.ask("grant")])) == "writing"
    return writer


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_writer_that_stops_or_dies_writes_no_late_byte_and_harms_nobody(
    sides: ExitStack, number: signal.Signals
) -> None:
    owner = start(sides, "owner")
    handle = json.loads(owner.hear())
    writer = begin_write(sides, owner, handle)
    assert owner.ask("moved") == "moved"
    writer.process.send_signal(number)
    assert owner.ask("revoke") == "revoked"
    if number is signal.SIGSTOP:
        writer.process.send_signal(signal.SIGCONT)
    assert owner.ask("checked") == "true"
    again = begin_write(sides, owner, handle)
    assert again.hear() == "written"
