"""Measures transfers of one request's KV between two processes, for ``flowpath bench transfer``.

``python -m common.transfer.bench`` prints JSON lines: ``{"doing": TEXT}`` as it goes on, and for
each combination of shape, tokens, pool and transport a ``{"row": {...}}``. In the same turns it
measures the transport's limit with as many bytes: the faster of a memcpy and a copy past the caches
into the other process's memory, or a plain TCP stream to it. Medians count. ``rdma`` is measured
where NIXL is installed; on one host it copies between the two memories, too.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from statistics import median

import flowpath_native
import numpy as np

from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.kv.memory_file import available_bytes
from common.kv.pool import PeerPool
from common.transfer.backend import PeerLink
from common.transfer.bench_peer import (
    STALL_SECONDS,
    BenchPeer,
    bench_peer,
    filled_pool,
    log_to_stderr,
    open_bench_rdma,
)
from common.transfer.nixl_packages import is_nixl_installed
from common.transfer.shm import ShmBackend
from common.transfer.tcp import TcpBackend

BLOCK_SIZE = 64
SHAPES = {
    "smollm2-135m": KVLayout(30, BLOCK_SIZE, 3, 64, "bfloat16"),
    "llama-8b": KVLayout(32, BLOCK_SIZE, 8, 128, "bfloat16"),
    "llama-70b-tp8": KVLayout(80, BLOCK_SIZE, 1, 128, "bfloat16"),
}
"""By name: the KV that one worker holds of a model."""
POOLS = ("fresh", "churned")
TRANSPORTS = ("shm", "tcp", "rdma") if is_nixl_installed() else ("shm", "tcp")
POOL_SHARE = 3
"""A pool has room for this many requests of the measured length."""
NUM_CHURNED = 300
MIN_FREE = 0.4
"""Share of the pool that stays free, which is more than one request of the measured length."""


@dataclass(frozen=True, slots=True)
class Row:
    """One result. ``limit_gigabytes_per_second`` is that of ``limit`` in the same turns."""

    shape: str
    tokens: int
    pool: str
    transport: str
    num_blocks: int
    num_bytes: int
    num_calls: int
    milliseconds: float
    gigabytes_per_second: float
    limit: str
    limit_gigabytes_per_second: float
    share_of_limit: float


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured together, with both pools as they are."""

    shape: str
    tokens: int

    @property
    def layout(self) -> KVLayout:
        """The layout of the shape."""
        return SHAPES[self.shape]

    @property
    def num_blocks(self) -> int:
        """Blocks of one request."""
        return self.layout.num_blocks_for(self.tokens)

    @property
    def pool_blocks(self) -> int:
        """Blocks of each pool."""
        return POOL_SHARE * self.num_blocks


def place(pool: str, num_blocks: int, pool_blocks: int, seed: int) -> list[int]:
    """Return where a request of ``num_blocks`` blocks lies in a fresh or a churned pool."""
    allocator = flowpath_native.SegmentAllocator(pool_blocks, 0)
    if pool == "churned":
        _churn(allocator, num_blocks, Random(seed))  # noqa: S311 - the same pools every time
    runs = allocator.allocate(num_blocks)
    assert runs is not None, "the pool is never filled beyond that"
    return [block for start, length in runs for block in range(start, start + length)]


def _churn(allocator: flowpath_native.SegmentAllocator, num_blocks: int, random: Random) -> None:
    """Let requests of up to that length come, and go in random order."""
    held: list[list[tuple[int, int]]] = []
    for _ in range(NUM_CHURNED):
        length = random.randint(1, num_blocks)
        while allocator.num_free - length < MIN_FREE * allocator.num_blocks:
            allocator.free(held.pop(random.randrange(len(held))))
        held.append(allocator.allocate(length) or [])


def measure_case(
    case: Case, pools: list[str], transports: list[str], num_turns: int
) -> Iterator[Row]:
    """Measure one size with every pool and transport."""
    layout = case.layout
    source = filled_pool(case.pool_blocks, layout.block_bytes)
    with ExitStack() as stack:
        peer = stack.enter_context(bench_peer(case.pool_blocks, layout.block_bytes))
        links: dict[str, PeerLink] = {}
        if "shm" in transports:
            links["shm"] = ShmBackend(source).open_peer(peer.memory)
        if "tcp" in transports:
            links["tcp"] = TcpBackend(source, STALL_SECONDS).open_peer(peer.network)
        if "rdma" in transports and peer.rdma is not None:
            own, backend = open_bench_rdma(source)
            stack.callback(own.close)
            links["rdma"] = backend.open_peer(peer.rdma)
        num_bytes = case.num_blocks * layout.block_bytes
        limits = _limits(peer, source.buffer[:num_bytes])
        for pool in pools:
            sources, targets = (
                place(pool, case.num_blocks, case.pool_blocks, seed) for seed in (1, 2)
            )
            for transport, link in links.items():
                bare = limits[transport]
                write = partial(link.write, sources, targets, peer.token)
                num_calls = write().num_calls
                seconds, *of_limits = take_turns([write, *bare.values()], num_turns)
                bare_seconds, name = min(zip(of_limits, bare, strict=True))
                yield Row(
                    shape=case.shape,
                    tokens=case.tokens,
                    pool=pool,
                    transport=transport,
                    num_blocks=case.num_blocks,
                    num_bytes=num_bytes,
                    num_calls=num_calls,
                    milliseconds=round(seconds * 1e3, 3),
                    gigabytes_per_second=round(num_bytes / seconds / 1e9, 3),
                    limit=name,
                    limit_gigabytes_per_second=round(num_bytes / bare_seconds / 1e9, 3),
                    share_of_limit=round(bare_seconds / seconds, 3),
                )
        for link in links.values():
            link.close()
    source.close()


def _limits(peer: BenchPeer, data: memoryview) -> dict[str, dict[str, Callable[[], object]]]:
    """Return what moves bytes and does nothing else, by transport; the fastest is the limit."""
    mapped = PeerPool.open(peer.memory)
    target = np.frombuffer(mapped.buffer, dtype=np.uint8)[: len(data)]
    own = np.frombuffer(data, dtype=np.uint8)
    in_memory: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, own),
        "streamed copy": lambda: flowpath_native.copy_streamed(target, own),
    }
    return {
        "shm": in_memory,
        "rdma": in_memory,
        "tcp": {"plain stream": lambda: peer.stream(data)},
    }


def take_turns(ways: list[Callable[[], object]], num_turns: int) -> list[float]:
    """Return each way's median seconds."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(num_turns):
        for way, seconds in zip(ways, taken, strict=True):
            start = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - start)
    return [median(seconds) for seconds in taken]


def tell(**line: object) -> None:
    """Print a line for the program that started this one."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def listed(text: str, allowed: tuple[str, ...]) -> list[str]:
    """Return the names of a list with commas; ConfigError for one that is not allowed."""
    names = text.split(",")
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ConfigError(f"unknown: {', '.join(unknown)}; there are {', '.join(allowed)}")
    return names


def numbers(text: str) -> list[int]:
    """Return the numbers of tokens of a list with commas; ConfigError when it is none."""
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise ConfigError(f"{text} is no list of numbers of tokens")
    return [int(part) for part in text.split(",")]


def main(argv: list[str]) -> int:
    """Measure what the arguments name; 2 when they cannot be used."""
    parser = argparse.ArgumentParser(prog="common.transfer.bench")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="256,1024,4096")
    parser.add_argument("--pools", default=",".join(POOLS))
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args(argv)
    log_to_stderr()
    try:
        pools = listed(arguments.pools, POOLS)
        transports = listed(arguments.transports, TRANSPORTS)
        cases = [
            Case(shape, tokens)
            for shape in listed(arguments.shapes, tuple(SHAPES))
            for tokens in numbers(arguments.tokens)
        ]
    except ConfigError as error:
        tell(error=str(error))
        return 2
    for number, case in enumerate(cases, start=1):
        step = f"[{number}/{len(cases)}] {case.shape}, {case.tokens} tokens"
        needed = 2 * case.pool_blocks * case.layout.block_bytes
        if needed > available_bytes():
            tell(doing=f"{step}: left out, its two pools need {needed / 1024**3:.1f} GiB")
            continue
        tell(doing=step)
        for row in measure_case(case, pools, transports, arguments.turns):
            tell(row=asdict(row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
