"""A process that writes a peer's pool without end.

``python -m tests.gpu.pool_writer DEVICE`` reads a handle from its input, and tells a line after
each write into all of the peer's blocks.
"""

import random
import sys

import torch

from common.kv.device_pool import DevicePool
from common.transfer.cuda_ipc import CudaIpcBackend
from tests.gpu.pool_owner import unpack_handle


def main(device: int) -> None:
    handle = unpack_handle(sys.stdin.readline())
    pool = DevicePool(handle.num_blocks, handle.block_bytes, device)
    pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
    torch.cuda.synchronize(device)
    link = CudaIpcBackend(pool).open_peer(handle)
    blocks = list(range(handle.num_blocks))
    targets = random.Random(device).sample(blocks, len(blocks))
    while True:
        report = link.write(blocks, targets)
        print(report.num_blocks, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
