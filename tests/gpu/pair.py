"""Two processes with a pool each and a transport between hosts, for tests."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.data_stream import wait_until
from tests.support.source_tree import ROOT

NUM_BLOCKS = 96
GPU_BLOCK = 720 * 4096
HOST_BLOCK = 45 * 4096
BLOCKS = list(range(NUM_BLOCKS))
STALL = 2.0
ENDS_SECONDS = 60.0

Places = list[tuple[str, dict[str, str]]]
"""Of source and target: the device and the environment's variables."""


class Side:
    """A process with a pool (see ``pair_side``)."""

    def __init__(self, transport: str, device: str, environment: dict[str, str]) -> None:
        block_bytes = HOST_BLOCK if device == "host" else GPU_BLOCK
        arguments = [str(number) for number in (transport, device, NUM_BLOCKS, block_bytes, STALL)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.pair_side", *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, command: str, *arguments: object) -> object:
        self.begin(command, *arguments)
        return self.answer()

    def begin(self, command: str, *arguments: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps([command, *arguments]), file=self.process.stdin, flush=True)

    def answer(self) -> object:
        line = self._line()
        assert "is" in line, line
        return line["is"]

    def ids(self, command: str, *arguments: object) -> list[int]:
        answer = self(command, *arguments)
        assert isinstance(answer, list)
        return answer

    def fails(self, command: str, *arguments: object) -> str:
        self.begin(command, *arguments)
        return str(self._line()["error"])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=ENDS_SECONDS)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=ENDS_SECONDS)
            assert self.process.returncode == 0

    def _line(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line: dict[str, object] = json.loads(self.process.stdout.readline())
        return line


class Pair:
    """A source and a target, each with its device and environment."""

    def __init__(self, transport: str, places: Places) -> None:
        self._transport = transport
        self._places = places
        self._num_transfers = 0
        self.source, self.target = self._begin(0), self._begin(1)
        self.source.answer()
        self.target.answer()
        self.link()

    def restart_source(self) -> None:
        self.source = self._begin(0)
        self.source.answer()
        self.link()

    def restart_target(self) -> None:
        self.target = self._begin(1)
        self.target.answer()
        self.link()

    def link(self) -> None:
        self.source("fill", 1)
        self.source("link", 0, self.target("handle"))
        self.target("link", 0, self.source("handle"))

    def end(self) -> None:
        self.source.end()
        self.target.end()

    @contextmanager
    def granted(self, side: Side, ids: list[int]) -> Iterator[str]:
        """Yield a token, and revoke it afterwards."""
        self._num_transfers += 1
        transfer = f"tr-{self._num_transfers}"
        yield str(side("grant", transfer, ids))
        side("revoke", transfer)

    def assert_arrives(self, sources: list[int], targets: list[int]) -> None:
        with self.granted(self.target, targets) as token:
            sums = self.source.ids("write", 0, sources, targets, token)
        assert sums == self.source.ids("native", sources), "the source's checksums"
        assert self.target.ids("native", targets) == sums, "the target's, by its CPU"

    def write_on(self, token: str) -> None:
        """Have the source write every block without end."""
        self.source("write_on", 0, BLOCKS, BLOCKS, token)
        wait_until(lambda: bool(self.source("num_written")))

    def _begin(self, number: int) -> Side:
        return Side(self._transport, *self._places[number])


def churned(count: int, seed: int) -> tuple[list[int], list[int]]:
    chance = random.Random(seed)
    return [chance.choice(BLOCKS) for _ in range(count)], chance.sample(BLOCKS, count)
