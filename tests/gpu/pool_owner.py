"""A process that owns a poisoned pool in a GPU's memory and answers questions about it.

``python -m tests.gpu.pool_owner DEVICE NUM_BLOCKS BLOCK_BYTES`` tells its handle, then answers each
line of its input, ``checksum ID ...``, ``native ID ...``, ``poisoned`` or ``poison``, with one line
of JSON, and ends with its input.
"""

import json
import sys

import flowpath_native
from pydantic import TypeAdapter

from common.kv.device_pool import DevicePool
from common.messages.fields import CudaPoolHandle

POISON = 0xEE
HANDLE: TypeAdapter[CudaPoolHandle] = TypeAdapter(CudaPoolHandle)


def pack_handle(handle: CudaPoolHandle) -> str:
    fields = HANDLE.dump_python(handle)
    return json.dumps(fields | {"ipc_handle": handle.ipc_handle.hex()})


def unpack_handle(line: str) -> CudaPoolHandle:
    fields = json.loads(line)
    return HANDLE.validate_python(fields | {"ipc_handle": bytes.fromhex(fields["ipc_handle"])})


def native_checksums(pool: DevicePool, ids: list[int]) -> list[int]:
    """The checksums that the CPU computes of the pool's downloaded bytes."""
    bytes_here = pool.tensor.cpu().numpy()
    return flowpath_native.checksum_blocks(bytes_here, ids, pool.block_bytes).tolist()


def _answer(pool: DevicePool, line: str) -> list[int]:
    what, *numbers = line.split()
    ids = [int(number) for number in numbers]
    if what == "checksum":
        return pool.checksum(ids).tolist()
    if what == "native":
        return native_checksums(pool, ids)
    if what == "poison":
        pool.tensor.fill_(POISON)
        pool.tensor[:1].cpu()  # fills run on a stream; a download waits for it
        return []
    blocks = pool.tensor.view(-1, pool.block_bytes)
    return (blocks == POISON).all(dim=1).nonzero().flatten().tolist()


def main(device: int, num_blocks: int, block_bytes: int) -> None:
    pool = DevicePool(num_blocks, block_bytes, device)
    _answer(pool, "poison")
    print(pack_handle(pool.handle()), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(pool, line)), flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
