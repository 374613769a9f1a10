"""One request's KV between two GPUs in pieces of any size: ``python -m benchmarks.cuda_fragments``.

``cuda_ipc`` writes 1.34 GB (10 240 tokens of Llama-3.1-8B) from a pool to another process's, by
turns with one plain copy of as many bytes over the same mapping: as one run, as 640 blocks of 2 MiB
in random order, and as 40 960 blocks of 32 KiB in random order, which is what a layer-major cache
would have. End to end with checksums, medians; every way's bytes are compared once. ``device ms``
is the longest of what one write has the device do: the copy or the launch, without the upload of
ids. ``--own`` hides each process's GPU from the other.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.report import Cell, print_table, write_results
from common.engine.cuda.profiling import profile_kernels
from common.errors import TransferError
from common.kv.device_pool import DevicePool
from common.transfer.bench_cuda_peer import bench_cuda_peer
from common.transfer.cuda_ipc import CudaIpcBackend

NUM_BYTES = 640 * 2 * 1024 * 1024
CASES = (("one run", 2 * 1024 * 1024), ("random", 2 * 1024 * 1024), ("random", 32 * 1024))
VISIBLE = "CUDA_VISIBLE_DEVICES"
TARGETS_MS = (3.6, 4.5, 3.9)
"""The last is for what the device does."""


def measure(
    devices: tuple[int, int],
    environment: dict[str, str] | None,
    case: tuple[str, int],
    num_turns: int,
) -> dict[str, Cell]:
    """Measure one case; TransferError where bytes differ.

    ``environment`` is the other process's, where that is not this one's.
    """
    order, block_bytes = case
    count = NUM_BYTES // block_bytes
    num_blocks = 2 * count
    pool = DevicePool(num_blocks, block_bytes, devices[0])
    words = pool.tensor.view(torch.int64)
    torch.arange(len(words), out=words)
    words.mul_(0x2545F4914F6CDD1D)
    torch.cuda.synchronize(devices[0])
    if order == "random":
        sources, targets = (random.Random(seed).sample(range(num_blocks), count) for seed in (1, 2))
    else:
        sources, targets = [*range(count)], [*range(count, 2 * count)]
    with bench_cuda_peer(devices[1], num_blocks, block_bytes, environment=environment) as handle:
        link = CudaIpcBackend(pool).open_peer(handle)
        mapped = pool.driver.open_memory(devices[0], handle.ipc_handle)
        queue = pool.driver.queue(devices[0])

        def copy() -> None:
            queue.copy([(mapped + handle.offset, pool.address, NUM_BYTES)])
            queue.wait(is_long=True)

        copy()
        first = link.write(sources, targets)
        ids = torch.tensor(targets, dtype=torch.int32).numpy()
        queue.checksum_blocks(mapped + handle.offset, ids, block_bytes)
        if queue.wait(is_long=False).tolist() != first.checksums.tolist():
            raise TransferError(f"{order}, blocks of {block_bytes}: other bytes came")
        write = partial(link.write, sources, targets)
        ways: dict[str, Callable[[], object]] = {"write": write, "copy": copy}
        taken: dict[str, list[float]] = {"write": [], "copy": []}
        for _ in range(num_turns):
            for name, move in ways.items():
                taken[name].append(_timed(move))
        longest = profile_kernels(write)[0]
        queue.close()
        pool.driver.close_memory(devices[0], handle.ipc_handle)
        link.close()
    pool.close()
    seconds = {name: median(each) for name, each in taken.items()}
    return {
        "order": order,
        "blocks": count,
        "block KiB": block_bytes // 1024,
        "calls": first.num_calls,
        "ms": round(1e3 * seconds["write"], 3),
        "device ms": round(1e3 * longest.seconds, 3),
        "best ms": round(1e3 * min(taken["write"]), 3),
        "copy ms": round(1e3 * seconds["copy"], 3),
        "copy / write": round(seconds["copy"] / seconds["write"], 3),
    }


def _timed(move: Callable[[], object]) -> float:
    began = time.perf_counter()
    move()
    return time.perf_counter() - began


def main(argv: list[str]) -> int:
    """Measure, print and keep the results."""
    parser = argparse.ArgumentParser(prog="benchmarks.cuda_fragments")
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--own", action="store_true", help="each process sees its own GPU alone")
    arguments = parser.parse_args(argv)
    source, target = arguments.devices.split(",")
    devices, environment = (int(source), int(target)), None
    if arguments.own:
        devices, environment = (0, 0), os.environ | {VISIBLE: target}
        os.environ[VISIBLE] = source  # nothing has asked CUDA for anything yet
    rows = [measure(devices, environment, case, arguments.turns) for case in CASES]
    for row, bound in zip(rows, TARGETS_MS, strict=True):
        row["target ms"] = bound
    print_table(rows)
    name = "cuda_fragments_own" if arguments.own else "cuda_fragments"
    print(f"kept in {write_results(name, argv, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
