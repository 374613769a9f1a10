"""The other process of a GPU transfer benchmark: it owns a pool in a GPU's memory.

``python -m common.transfer.bench_cuda_peer DEVICE NUM_BLOCKS BLOCK_BYTES`` tells on its output how
to open the pool, and ends with its input.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pydantic import TypeAdapter

from common.errors import TransferError
from common.kv.device_pool import DevicePool
from common.messages.fields import CudaPoolHandle

MODULE = "common.transfer.bench_cuda_peer"
_HANDLE: TypeAdapter[CudaPoolHandle] = TypeAdapter(CudaPoolHandle)


@contextmanager
def bench_cuda_peer(
    device: int, num_blocks: int, block_bytes: int, *, environment: Mapping[str, str] | None = None
) -> Iterator[CudaPoolHandle]:
    """Run the other process as long as the block; TransferError when it does not start.

    ``environment`` replaces this process's, for instance to show it other GPUs.
    """
    arguments = [str(number) for number in (device, num_blocks, block_bytes)]
    with subprocess.Popen(  # noqa: S603 - this interpreter, with numbers
        [sys.executable, "-m", MODULE, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None, "it was asked for"
        line = process.stdout.readline()
        if not line:
            raise TransferError("the other process of the benchmark did not start")
        fields, ipc_handle = json.loads(line)
        yield _HANDLE.validate_python(fields | {"ipc_handle": bytes.fromhex(ipc_handle)})
        process.communicate()


def main(device: int, num_blocks: int, block_bytes: int) -> None:
    """Own the pool until the input ends."""
    pool = DevicePool(num_blocks, block_bytes, device)
    handle = pool.handle()
    fields = _HANDLE.dump_python(handle, exclude={"ipc_handle"})
    sys.stdout.write(json.dumps([fields, handle.ipc_handle.hex()]) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    pool.close()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
