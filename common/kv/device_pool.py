"""The bytes of a KV pool in one GPU's memory, which peers open by CUDA IPC and write directly.

One plain allocation, exported whole; the blocks begin at a multiple of 4096::

    | up to 4096 bytes | block 0 | block 1 | ... | block n - 1 | scratch block | rest of 2 MiB |
      address - offset ^ address                               ^ never given out

The scratch block takes what must be written somewhere and is never read: the padding rows of
captured batches, and the bytes by which a link is measured.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from common.cuda.cupy_driver import cuda_driver
from common.cuda.driver import CudaDriver, CudaError
from common.errors import ConfigError
from common.kv.layout import PAGE_BYTES
from common.messages.fields import CudaPoolHandle

_GIB = 1024**3


class DevicePool:
    """This process's pool on GPU ``device_index``: ``num_blocks`` blocks of ``block_bytes`` bytes.

    ``block_bytes`` is a multiple of 4096. The memory is zero at the start and is not torch's: its
    allocator knows nothing of it. ConfigError when it does not fit. ``driver`` is the process's
    own by default.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        device_index: int,
        *,
        driver: CudaDriver | None = None,
    ) -> None:
        if num_blocks < 1 or block_bytes < 1 or block_bytes % PAGE_BYTES:
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks of {block_bytes} bytes is impossible: it needs"
                f" at least one block, of a multiple of {PAGE_BYTES} bytes"
            )
        self.driver: CudaDriver = driver or cuda_driver()
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.num_bytes = num_blocks * block_bytes
        """Of the blocks that are given out: without the scratch block."""
        self.device_index = device_index
        self.scratch_block = num_blocks
        """One more block behind the last, whose content nobody reads."""
        if not 0 <= device_index < self.driver.num_devices():
            raise ConfigError(
                f"there is no GPU {device_index}: this process sees {self.driver.num_devices()}"
            )
        self._base = self._allocate(self.num_bytes + block_bytes + PAGE_BYTES)
        self.address = -(-self._base // PAGE_BYTES) * PAGE_BYTES
        """Of block 0, in this process; block ``i`` starts at ``i * block_bytes`` from there."""
        self._is_closed = False
        self._lock = threading.Lock()
        try:
            self._queue = self.driver.queue(device_index)
            self._handle = CudaPoolHandle(
                kind="cuda",
                pid=os.getpid(),
                device_uuid=self.driver.device_uuid(device_index),
                ipc_handle=self.driver.export_memory(device_index, self._base),
                offset=self.address - self._base,
                num_blocks=num_blocks,
                block_bytes=block_bytes,
                num_bytes=self.num_bytes,
            )
            self.tensor = self.driver.tensor(
                device_index, self.address, self.num_bytes + block_bytes
            )
            """All blocks and the scratch block as torch bytes (uint8), in place."""
        except BaseException:
            self.driver.free(device_index, self._base)
            raise

    def handle(self) -> CudaPoolHandle:
        """Return what a peer on this host needs to open the pool."""
        return self._handle

    def checksum(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Return the checksum of each named block; ValueError for one outside of the pool.

        Computed on the GPU, from what was written before the call. CudaError when that fails.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        outside = ids[(ids < 0) | (ids >= self.num_blocks)]
        if len(outside):
            raise ValueError(f"block {outside[0]} is outside of {self.num_blocks} blocks")
        if not len(ids):
            return np.empty(0, dtype=np.uint64)
        with self._lock:
            if self._is_closed:
                raise ValueError("the pool is closed")
            self._queue.checksum_blocks(self.address, ids.astype(np.int32), self.block_bytes)
            return self._queue.wait(is_long=False)

    def close(self) -> None:
        """Free the memory; a second call does nothing.

        Nobody may use the tensor any more, and peers must have closed their mappings or be dead.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with suppress(CudaError):  # a broken device has nothing to wait for
                self._queue.close()
            self.driver.free(self.device_index, self._base)

    def _allocate(self, num_bytes: int) -> int:
        free, total = self.driver.memory_bytes(self.device_index)
        wish = (
            f"the KV pool needs {num_bytes / _GIB:.2f} GiB ({self.num_blocks} blocks of"
            f" {self.block_bytes} bytes and a spare one), and of the {total / _GIB:.2f} GiB of GPU"
            f" {self.device_index} {free / _GIB:.2f} GiB are free"
        )
        advice = "make the pool smaller or free memory (`nvidia-smi` shows who holds it)"
        if num_bytes > free:
            raise ConfigError(f"{wish}; {advice}")
        try:
            return self.driver.allocate(self.device_index, num_bytes)
        except CudaError as error:
            raise ConfigError(f"{wish}: {error}; {advice}") from error
