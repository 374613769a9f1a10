"""How fast one request's KV moves into another process's pool, beside a bare memcpy.

All ways write into shared memory, in the same run and by turns in random order: a plain memcpy into
an own shared mapping (of the whole run, and of block by block), and the ``shm`` transport into the
pool of a second process, without and with the checksum of each block. Every copy uses other blocks
than the few before it, so that no cache favours one way.

The ratio is that of the copying thread's processor time: on an idle machine it is the wall time,
and other programs on a busy one do not disturb it.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import flowpath_native
import numpy as np

from benchmarks.report import Cell, print_table, write_results
from common.kv.layout import KVLayout
from common.kv.pool import KVPool, PeerPool
from common.messages.fields import PoolHandle
from common.transfer.shm import ShmBackend
from common.transfer.verify import verify_blocks

SMOLLM2 = KVLayout(num_layers=30, block_size=64, num_kv_heads=3, head_dim=64, dtype="bfloat16")
BLOCK_BYTES = SMOLLM2.block_bytes
NUM_COPIED = 16
"""1 024 tokens."""
NUM_GROUPS = 6
NUM_BLOCKS = NUM_GROUPS * NUM_COPIED
NUM_TURNS = 60
MIN_RATIO = 0.8


def own_pool() -> None:
    """Own a pool for a peer until the input ends: the second process."""
    pool = KVPool(NUM_BLOCKS, BLOCK_BYTES)
    handle = pool.handle()
    print(json.dumps([handle.pid, handle.fd, handle.nonce.hex()]), flush=True)
    sys.stdin.read()


def open_handle(line: str) -> PoolHandle:
    pid, fd, nonce = json.loads(line)
    return PoolHandle(
        kind="memfd",
        pid=pid,
        fd=fd,
        num_blocks=NUM_BLOCKS,
        block_bytes=BLOCK_BYTES,
        num_bytes=NUM_BLOCKS * BLOCK_BYTES,
        nonce=bytes.fromhex(nonce),
    )


def filled_pool() -> KVPool:
    pool = KVPool(NUM_BLOCKS, BLOCK_BYTES)
    numbers = np.frombuffer(pool.buffer, dtype=np.uint64)
    numbers[:] = np.random.default_rng(0).integers(0, 2**63, numbers.size, dtype=np.uint64)
    return pool


def group(turn: int) -> list[int]:
    first = turn % NUM_GROUPS * NUM_COPIED
    return list(range(first, first + NUM_COPIED))


def scattered(blocks: list[int]) -> list[int]:
    """Put the same blocks into five runs that lie elsewhere in the group."""
    return [*blocks[12:], *blocks[9:12], *blocks[6:9], *blocks[3:6], *blocks[:3]]


def make_ways(source: KVPool, handle: PoolHandle) -> dict[str, Callable[[int], None]]:
    """Return the ways to move the blocks of a turn, by name; the bare memcpy first."""
    plain = KVPool(NUM_BLOCKS, BLOCK_BYTES)
    plain_bytes = np.frombuffer(plain.buffer, dtype=np.uint8)
    source_bytes = np.frombuffer(source.buffer, dtype=np.uint8)
    peer = PeerPool.open(handle)
    link = ShmBackend(source).open_peer(handle)

    def memcpy(turn: int) -> None:
        first = group(turn)[0] * BLOCK_BYTES
        span = slice(first, first + NUM_COPIED * BLOCK_BYTES)
        np.copyto(plain_bytes[span], source_bytes[span])

    def memcpy_blocks(turn: int) -> None:
        for block in group(turn):
            span = slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES)
            np.copyto(plain_bytes[span], source_bytes[span])

    def write_plain(turn: int) -> None:
        runs = flowpath_native.align(group(turn), group(turn))
        flowpath_native.copy_runs(peer.buffer, source.buffer, runs, BLOCK_BYTES)

    def write(turn: int) -> None:
        link.write(group(turn), group(turn))

    def write_scattered(turn: int) -> None:
        link.write(group(turn), scattered(group(turn)))

    def verify(turn: int) -> None:
        verify_blocks(plain, group(turn), np.zeros(NUM_COPIED, dtype=np.uint64))

    return {
        "memcpy, 1 run": memcpy,
        "memcpy, 16 blocks": memcpy_blocks,
        "shm, 1 run, no checksums": write_plain,
        "shm, 1 run, checksums": write,
        "shm, 5 runs, checksums": write_scattered,
        "receiver verifies": verify,
    }


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians of one way."""

    wall_seconds: float
    cpu_seconds: float


def measure(ways: dict[str, Callable[[int], None]]) -> dict[str, Cost]:
    """Return the medians of each way over turns that take all ways in random order."""
    random = Random(0)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    number = 0
    for _ in range(NUM_TURNS):
        for name in random.sample(list(ways), len(ways)):
            number += 1
            wall, cpu = time.perf_counter(), time.thread_time()
            ways[name](number)
            taken[name].append((time.perf_counter() - wall, time.thread_time() - cpu))
    return {
        name: Cost(median(wall for wall, _ in each), median(cpu for _, cpu in each))
        for name, each in taken.items()
    }


def main(argv: list[str]) -> int:
    if argv == ["--own-pool"]:
        own_pool()
        return 0
    argparse.ArgumentParser(prog="benchmarks.handoff_copy").parse_args(argv)
    num_bytes = NUM_COPIED * BLOCK_BYTES
    print(f"{NUM_COPIED} blocks of {BLOCK_BYTES} bytes, {NUM_TURNS} turns", flush=True)
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.handoff_copy", "--own-pool"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        handle = open_handle(owner.stdout.readline())
        source = filled_pool()
        medians = measure(make_ways(source, handle))
        link = ShmBackend(source).open_peer(handle)
        rate = link.measure()
        link.close()
        owner.communicate()
    bare = min(medians[name].cpu_seconds for name in ("memcpy, 1 run", "memcpy, 16 blocks"))
    rows: list[dict[str, Cell]] = [
        {
            "way": name,
            "ms, wall": round(cost.wall_seconds * 1e3, 3),
            "ms, processor": round(cost.cpu_seconds * 1e3, 3),
            "GB/s": round(num_bytes / cost.cpu_seconds / 1e9, 2),
            "of memcpy": round(bare / cost.cpu_seconds, 3),
        }
        for name, cost in medians.items()
    ]
    print_table(rows)
    print(
        f"link measured at pairing: {rate.gigabytes_per_second:.1f} GB/s,"
        f" {rate.ratio:.2f} of a memcpy"
    )
    print(f"kept in benchmarks/results/{write_results('handoff_copy', argv, rows).name}")
    ratio = bare / medians["shm, 1 run, checksums"].cpu_seconds
    print(f"with checksums {ratio:.2f} of the faster bare memcpy (target {MIN_RATIO})")
    return 0 if ratio >= MIN_RATIO else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
