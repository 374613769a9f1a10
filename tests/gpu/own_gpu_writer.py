"""A process that sees its own GPU alone and writes the pool of a peer on another one.

``python -m tests.gpu.own_gpu_writer`` reads a handle from its input and writes runs, by copy
engines, then scattered blocks, by a launch. It tells the checksum of each block that it wrote, and
how fast it reads the peer's pool.
"""

import json
import random
import sys

import torch

from common.cuda.cupy_driver import cuda_driver
from common.kv.device_pool import DevicePool
from common.transfer.cuda_ipc import CudaIpcBackend
from common.transfer.cuda_movers import MAX_PEER_COPIES
from tests.gpu.pool_owner import unpack_handle


def main() -> None:
    handle = unpack_handle(sys.stdin.readline())
    pool = DevicePool(handle.num_blocks, handle.block_bytes, 0)
    pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
    torch.cuda.synchronize(0)
    link = CudaIpcBackend(pool).open_peer(handle)
    rate = link.measure()
    half = handle.num_blocks // 2
    chance = random.Random(0)
    scattered = chance.sample(range(half, handle.num_blocks), half - 2)
    checksums: dict[int, int] = {}
    for sources, targets in (
        ([*range(half - 1)], [*range(1, half)]),
        (chance.sample(range(handle.num_blocks), len(scattered)), scattered),
    ):
        report = link.write(sources, targets)
        assert report.num_calls == 1, f"{report.num_calls} calls"
        checksums.update(zip(targets, report.checksums.tolist(), strict=True))
    assert len(scattered) > MAX_PEER_COPIES
    print(
        json.dumps(
            {
                "checksums": checksums,
                "num_devices": cuda_driver().num_devices(),
                "is_flagged": rate.is_flagged,
                "gigabytes_per_second": rate.gigabytes_per_second,
            }
        )
    )
    link.close()
    pool.close()


if __name__ == "__main__":
    main()
