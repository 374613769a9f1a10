"""Two real processes: one owns a pool, the other maps and writes it, and both may die."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest

from common.errors import TransferError
from common.kv.pool import KVPool
from common.messages.fields import PoolHandle
from common.transfer.shm import ShmBackend

ROOT = Path(__file__).parents[3]
BLOCK = 64 * 1024
NUM_BLOCKS = 32
POISON = 0x5A

_MAPPER = """
import json, sys
from common.kv.pool import PeerPool
from common.messages.fields import PoolHandle
pid, fd, num_bytes, nonce = json.loads(sys.argv[1])
peer = PeerPool.open(PoolHandle(kind="memfd", pid=pid, fd=fd, num_blocks={blocks},
    block_bytes={size}, num_bytes=num_bytes, nonce=bytes.fromhex(nonce)))
print("mapped", flush=True)
sys.stdin.read()
"""


class Owner:
    """A started owner of a poisoned pool, with its handle."""

    def __init__(self) -> None:
        script = Path(__file__).parent / "pool_owner.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(NUM_BLOCKS), str(BLOCK)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.fields = json.loads(self._read())
        pid, fd, num_bytes, nonce = self.fields
        self.handle = PoolHandle(
            kind="memfd",
            pid=pid,
            fd=fd,
            num_blocks=NUM_BLOCKS,
            block_bytes=BLOCK,
            num_bytes=num_bytes,
            nonce=bytes.fromhex(nonce),
        )

    def verify(self, block_ids: list[int], checksums: list[int]) -> int | None:
        """Return the first wrong block's index, as the owner sees its own memory."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([block_ids, checksums]) + "\n")
        self.process.stdin.flush()
        answer: int | None = json.loads(self._read())
        return answer

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start_owner() -> Iterator[Callable[[], Owner]]:
    owners: list[Owner] = []

    def start() -> Owner:
        owners.append(Owner())
        return owners[-1]

    yield start
    for owner in owners:
        owner.kill()


@pytest.fixture
def source() -> Iterator[KVPool]:
    pool = KVPool(NUM_BLOCKS, BLOCK)
    numbers = np.frombuffer(pool.buffer, dtype=np.uint8)
    numbers[:] = np.random.default_rng(1).integers(0, 256, numbers.size, dtype=np.uint8)
    del numbers
    yield pool
    pool.close()


def inode_of(handle: PoolHandle) -> int:
    return Path(f"/proc/{handle.pid}/fd/{handle.fd}").stat().st_ino


def users_of(inode: int) -> set[int]:
    """Return the processes of this machine that have the pool file open or mapped."""
    return {
        int(folder.name) for folder in Path("/proc").glob("[0-9]*") if inode in inodes_of(folder)
    }


def inodes_of(folder: Path) -> set[int]:
    inodes: set[int] = set()
    with suppress(OSError):  # the process ended meanwhile, or is another user's
        maps = (folder / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        inodes |= {int(line.split()[4]) for line in maps if "memfd:flowpath-kv" in line}
        for fd in (folder / "fd").iterdir():
            with suppress(OSError):  # this scan's own descriptors come and go
                inodes.add(fd.stat().st_ino)
    return inodes


def test_scattered_blocks_arrive_whole_and_nothing_else_changes(
    start_owner: Callable[[], Owner], source: KVPool
) -> None:
    owner = start_owner()
    link = ShmBackend(source).open_peer(owner.handle)
    random = Random(7)
    targets = random.sample(range(NUM_BLOCKS), 20)
    sources = random.sample(range(NUM_BLOCKS), 20)
    report = link.write(sources, targets)
    checksums = [int(value) for value in report.checksums]
    assert owner.verify(targets, checksums) is None
    # The poison is where nobody wrote: its checksum is that of a poisoned block.
    poisoned = KVPool(1, BLOCK)
    poisoned.buffer[:] = bytes([POISON]) * BLOCK
    untouched = sorted(set(range(NUM_BLOCKS)) - set(targets))
    inside = ShmBackend(poisoned).open_peer(source.handle())
    poison_sum = int(inside.write([0], [0]).checksums[0])
    assert owner.verify(untouched, [poison_sum] * len(untouched)) is None
    for opened in (inside, link):
        opened.close()
    poisoned.close()


def test_the_owner_sees_a_damaged_block(start_owner: Callable[[], Owner], source: KVPool) -> None:
    owner = start_owner()
    link = ShmBackend(source).open_peer(owner.handle)
    checksums = [int(value) for value in link.write([0, 1, 2], [4, 5, 6]).checksums]
    link.write([9], [5])
    assert owner.verify([4, 5, 6], checksums) == 1
    link.close()


def test_writing_after_the_owners_death_harms_nobody_and_leaves_nothing(
    start_owner: Callable[[], Owner], source: KVPool
) -> None:
    owner = start_owner()
    link = ShmBackend(source).open_peer(owner.handle)
    inode = inode_of(owner.handle)
    assert users_of(inode) == {owner.handle.pid, os.getpid()}
    owner.kill()
    assert users_of(inode) == {os.getpid()}, "the mapping keeps the memory"
    everything = list(range(NUM_BLOCKS))
    report = link.write(everything, everything)
    assert report.num_bytes == NUM_BLOCKS * BLOCK
    with pytest.raises(TransferError, match="the peer is gone"):
        ShmBackend(source).open_peer(owner.handle)
    link.close()
    assert users_of(inode) == set()


def test_nothing_is_left_when_both_sides_are_killed(start_owner: Callable[[], Owner]) -> None:
    owner = start_owner()
    mapper = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _MAPPER.format(blocks=NUM_BLOCKS, size=BLOCK),
            json.dumps(owner.fields),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert mapper.stdout is not None
    assert mapper.stdout.readline() == "mapped\n"
    inode = inode_of(owner.handle)
    assert users_of(inode) == {owner.handle.pid, mapper.pid}
    mapper.kill()
    mapper.communicate()
    owner.kill()
    assert users_of(inode) == set()
