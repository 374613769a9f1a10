"""Measures transfers of one request's KV between two processes with pools in GPU memory.

``python -m common.transfer.bench_cuda --devices SOURCE,TARGET`` prints JSON lines as
``common.transfer.bench`` does. In the same turns it measures one plain copy of as many bytes over
the same mapping. Every transfer's bytes are checked once, by checksums of what is at the target.

Beside the transports there are ``copies`` and ``launch:N``: FlowPath's own way with a copy for
every run whatever their number, and with a launch of N CTAs; they are for setting its thresholds.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from common.cuda.driver import CudaQueue
from common.errors import ConfigError, FlowPathError, TransferError
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.messages.fields import CudaPoolHandle
from common.transfer.backend import PeerLink
from common.transfer.bench import (
    POOLS,
    SHAPES,
    Case,
    Row,
    listed,
    numbers,
    place,
    take_turns,
    tell,
)
from common.transfer.bench_cuda_peer import bench_cuda_peer
from common.transfer.cuda_ipc import (
    CUDA_IPC,
    GATHER_BUFFER,
    LAYERWISE,
    CudaIpcBackend,
    gather_buffer_backend,
    layerwise_backend,
)
from common.transfer.cuda_movers import LONG_BYTES, BlockMover, DirectMover

TRANSPORTS = (CUDA_IPC, LAYERWISE, GATHER_BUFFER)
COPIES = "copies"
LAUNCH = "launch:"
TOKENS = "500,1000,2000,4000,5000,8000,10000,32768,131072"
SHAPE_NAMES = ("llama-8b", "llama-70b-tp8")
MEMORY_SHARE = 0.9
"""Of the free memory, that pools and the gather buffer may take."""
SLOW_SECONDS = 0.1
MAX_SLOW_TURNS = 3


@dataclass(frozen=True, slots=True)
class Place:
    """What one shape is measured with: a pool here, one in the other process, and a way to it."""

    source: DevicePool
    handle: CudaPoolHandle
    address: int
    queue: CudaQueue

    def plain_copy(self, num_bytes: int) -> None:
        """Copy the first bytes of the pools, as any program would over the same mapping."""
        self.queue.copy([(self.address, self.source.address, num_bytes)])
        self.queue.wait(is_long=num_bytes >= LONG_BYTES)

    def check(self, targets: Sequence[int], expected: Sequence[int]) -> None:
        """TransferError unless the blocks at the target have these checksums."""
        ids = np.asarray(targets, dtype=np.int32)
        self.queue.checksum_blocks(self.address, ids, self.source.block_bytes)
        if self.queue.wait(is_long=False).tolist() != list(expected):
            raise TransferError("the bytes at the target are not those of the source")


def backend_of(way: str, pool: DevicePool, layout: KVLayout) -> CudaIpcBackend:
    """Return what writes in the way of that name."""
    if way == LAYERWISE:
        return layerwise_backend(pool, layout)
    if way == GATHER_BUFFER:
        return gather_buffer_backend(pool)
    if way == CUDA_IPC:
        return CudaIpcBackend(pool)

    def make(pool: DevicePool, _: str) -> BlockMover:
        if way == COPIES:
            return DirectMover(pool.driver, pool.device_index, max_copies=pool.num_blocks)
        return DirectMover(pool.driver, pool.device_index, num_ctas=int(way.removeprefix(LAUNCH)))

    return CudaIpcBackend(pool, name=way, make_mover=make)


def measure_shape(
    cases: list[Case], devices: tuple[int, int], pools: list[str], ways: list[str], num_turns: int
) -> Iterator[Row]:
    """Measure every size of one shape, in pools as large as the largest needs."""
    layout = cases[0].layout
    num_blocks = max(case.pool_blocks for case in cases)
    source = DevicePool(num_blocks, layout.block_bytes, devices[0])
    _fill(source)
    with bench_cuda_peer(devices[1], num_blocks, layout.block_bytes) as handle:
        links: dict[str, PeerLink] = {
            way: backend_of(way, source, layout).open_peer(handle) for way in ways
        }
        driver = source.driver
        mapped = driver.open_memory(devices[0], handle.ipc_handle)
        queue = driver.queue(devices[0])
        there = Place(source, handle, mapped + handle.offset, queue)
        for case in cases:
            tell(doing=f"{case.shape}, {case.tokens} tokens")
            for pool in pools:
                for way, link in links.items():
                    yield _measure(case, there, pool, (way, link), num_turns)
        queue.close()
        driver.close_memory(devices[0], handle.ipc_handle)
        for link in links.values():
            link.close()
    source.close()


def _measure(case: Case, there: Place, pool: str, way: tuple[str, PeerLink], num_turns: int) -> Row:
    name, link = way
    sources, targets = (place(pool, case.num_blocks, case.pool_blocks, seed) for seed in (1, 2))
    write = partial(link.write, sources, targets)
    # Block i onto block i, so that no earlier transfer has left the right bytes already.
    there.plain_copy(case.pool_blocks * case.layout.block_bytes)
    first = write()
    there.check(targets, first.checksums.tolist())
    num_bytes = first.num_bytes
    turns = min(num_turns, MAX_SLOW_TURNS) if first.seconds > SLOW_SECONDS else num_turns
    both: list[Callable[[], object]] = [write, partial(there.plain_copy, num_bytes)]
    seconds, plain_seconds = take_turns(both, turns)
    return Row(
        shape=case.shape,
        tokens=case.tokens,
        pool=pool,
        transport=name,
        num_blocks=case.num_blocks,
        num_bytes=num_bytes,
        num_calls=first.num_calls,
        milliseconds=round(seconds * 1e3, 3),
        gigabytes_per_second=round(num_bytes / seconds / 1e9, 3),
        limit="plain copy",
        limit_gigabytes_per_second=round(num_bytes / plain_seconds / 1e9, 3),
        share_of_limit=round(plain_seconds / seconds, 3),
    )


def _fill(pool: DevicePool) -> None:
    """Give every block bytes of its own."""
    words = pool.tensor.view(torch.int64)
    torch.arange(len(words), out=words)
    words.mul_(0x2545F4914F6CDD1D)
    torch.cuda.synchronize(pool.device_index)


def _that_fit(cases: list[Case], devices: tuple[int, int]) -> list[Case]:
    """Return the cases whose pools the GPUs have room for; tell the others."""
    num_pools = 2 if devices[0] == devices[1] else 1
    free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
    fitting: list[Case] = []
    for case in cases:
        # The gather buffer may need as much as one request.
        needed = (num_pools * case.pool_blocks + case.num_blocks) * case.layout.block_bytes
        if needed <= MEMORY_SHARE * free:
            fitting.append(case)
        else:
            tell(
                doing=f"{case.shape}, {case.tokens} tokens: left out, it needs"
                f" {needed / 1024**3:.1f} GiB of a GPU's memory"
            )
    return fitting


def _ways(text: str) -> list[str]:
    tuned = [
        name
        for name in text.split(",")
        if name == COPIES or (name.startswith(LAUNCH) and name.removeprefix(LAUNCH).isdecimal())
    ]
    others = [name for name in text.split(",") if name not in tuned]
    if others:
        listed(",".join(others), TRANSPORTS)
    return text.split(",")


def _devices(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{text} are not two GPUs: say for example 0,1")
    count = torch.cuda.device_count()
    if not all(int(part) < count for part in parts):
        raise ConfigError(f"GPUs {text}: this process sees {count} of them")
    return int(parts[0]), int(parts[1])


def main(argv: list[str]) -> int:
    """Measure what the arguments name; 2 when they cannot be used."""
    parser = argparse.ArgumentParser(prog="common.transfer.bench_cuda")
    parser.add_argument("--devices", default="0,0")
    parser.add_argument("--shapes", default=",".join(SHAPE_NAMES))
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--pools", default=",".join(POOLS))
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args(argv)
    try:
        shapes = listed(arguments.shapes, tuple(SHAPES))
        tokens = numbers(arguments.tokens)
        pools = listed(arguments.pools, POOLS)
        ways = _ways(arguments.transports)
        devices = _devices(arguments.devices)
        for shape in shapes:
            cases = _that_fit([Case(shape, count) for count in tokens], devices)
            if cases:
                for row in measure_shape(cases, devices, pools, ways, arguments.turns):
                    tell(row=asdict(row))
    except FlowPathError as error:
        tell(error=str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
