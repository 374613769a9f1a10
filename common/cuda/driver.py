"""What FlowPath asks of CUDA, and nothing more. ``CupyDriver`` does it; tests have a double.

Addresses are plain numbers of this process. Devices are counted as this process sees them, which
``CUDA_VISIBLE_DEVICES`` decides; a device's UUID is the same in every process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import TransferError

if TYPE_CHECKING:
    import torch

IPC_HANDLE_BYTES = 64

Copy = tuple[int, int, int]
"""(target, source, bytes) of one contiguous copy, in a device's or the host's memory."""


class CudaError(TransferError):
    """A call of CUDA failed; the message names the call and CUDA's error.

    Work that was enqueued before may have happened or not. After an error of a kernel (an illegal
    address) CUDA refuses all further work of this process.
    """


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks to copy: ``source_ids[i]`` at ``source`` to ``target_ids[i]`` at ``target``.

    Both addresses are aligned to 16 bytes and ``block_bytes`` is a multiple of 4096. No target may
    be given twice, and no block may be both read and written.
    """

    source: int
    target: int
    source_ids: NDArray[np.int32]
    target_ids: NDArray[np.int32]
    block_bytes: int


@dataclass(frozen=True, slots=True)
class PieceCopies:
    """Parts of blocks to copy, between pools whose blocks differ in size.

    ``pieces`` and ``rest`` are as ``flowpath_native.copy_pieces`` takes them, in bytes, here all
    multiples of 16. Addresses and ids are as in ``BlockCopies``.
    """

    source: int
    target: int
    source_ids: NDArray[np.int32]
    target_ids: NDArray[np.int32]
    pieces: tuple[int, int, int, int, int, int]
    rest: tuple[int, int, int, int]
    source_block_bytes: int
    target_block_bytes: int


class CudaQueue(Protocol):
    """A stream of its own on one device, before all other work of this process's priority.

    Calls enqueue and return; only ``wait`` and ``copy_seconds`` wait, with the GIL released. Work
    runs in the order in which it was enqueued, and in no order with other streams: whoever computed
    the blocks must have been waited for. One thread at a time, which may be any.
    """

    def copy(self, copies: Sequence[Copy]) -> None:
        """Enqueue contiguous copies, each one call of CUDA.

        Copy engines do them, between GPUs or GPU and host: they take no multiprocessor there.
        """
        ...

    def copy_blocks(self, copies: BlockCopies, *, num_ctas: int = 0) -> None:
        """Enqueue one launch that copies every block and computes its checksum.

        ``num_ctas`` bounds how much of the device it takes; 0 fills it.
        """
        ...

    def copy_pieces(self, copies: PieceCopies, *, num_ctas: int = 0) -> None:
        """Enqueue one launch that copies parts of every block and sums what it writes.

        ``wait`` returns these sums of terms instead of checksums: they are parts of them.
        ValueError for numbers that are no multiples of 16.
        """
        ...

    def checksum_blocks(self, source: int, block_ids: NDArray[np.int32], block_bytes: int) -> None:
        """Enqueue one launch that computes the checksum of every named block."""
        ...

    def wait(self, *, is_long: bool) -> NDArray[np.uint64]:
        """Wait until all enqueued work is done; CudaError when any of it failed.

        Returns the checksums of the last launch since the previous ``wait``, in the order of its
        ids; none without a launch. ``is_long`` lets the thread sleep instead of spin, which costs
        some microseconds at the end.
        """
        ...

    def copy_seconds(self, copies: Sequence[Copy]) -> float:
        """Do copies one after another; return the device's time for all."""
        ...

    def close(self) -> None:
        """Let go of the stream, after the work on it; a second call does nothing."""
        ...


class CudaDriver(Protocol):
    """Devices and their memory. Calls may come from any thread. They raise CudaError."""

    def num_devices(self) -> int:
        """Return how many devices this process sees."""
        ...

    def device_uuid(self, device: int) -> str:
        """Return ``GPU-`` and the UUID, as ``nvidia-smi -L`` prints it."""
        ...

    def memory_bytes(self, device: int) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        ...

    def allocate(self, device: int, num_bytes: int) -> int:
        """Return the address of a plain allocation of its own, filled with zeros.

        It is not shared with other allocations, so that exporting it exposes nothing else.
        """
        ...

    def free(self, device: int, address: int) -> None:
        """Give an allocation back; no work may use it any more."""
        ...

    def export_memory(self, device: int, address: int) -> bytes:
        """Return the 64 bytes by which other processes of this host open an allocation."""
        ...

    def open_memory(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for work on ``device``; return its address here.

        It may be on a device that this process does not see: whether ``device`` reaches that is
        CUDA's to say then, and peer access comes with the mapping.

        The same handle may be opened again, and goes with its last ``close_memory``. The memory
        outlives its owner.
        """
        ...

    def close_memory(self, device: int, handle: bytes) -> None:
        """Undo one ``open_memory``; no work may use the mapping any more."""
        ...

    def pin(self, device: int, address: int, num_bytes: int) -> None:
        """Lock pages of host memory, so that copies from and to it are fast."""
        ...

    def unpin(self, address: int) -> None:
        """Unlock what begins at ``address``."""
        ...

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether ``device`` can read and write the memory of ``peer`` directly."""
        ...

    def enable_peer_access(self, device: int, peer: int) -> None:
        """Let ``device`` read and write the memory of ``peer`` directly; again is fine.

        Without it copies still give the right bytes, through the host, at a tenth of the speed.
        """
        ...

    def peer_gigabytes_per_second(self, device: int, peer_uuid: str) -> float:
        """Return what the link to another device, seen or not, should give, one way.

        The sum of the NVLinks where those join them, else the rate of copies to pinned host memory.
        """
        ...

    def tensor(self, device: int, address: int, num_bytes: int) -> "torch.Tensor":
        """Return memory as a torch tensor of bytes (uint8, one dimension), at the same address."""
        ...

    def queue(self, device: int) -> CudaQueue:
        """Return a new queue."""
        ...


@contextmanager
def draining(*queues: CudaQueue) -> Iterator[None]:
    """On CudaError let nothing go on: the memory may be given to others as soon as it is raised."""
    try:
        yield
    except CudaError:
        for queue in queues:
            with suppress(CudaError):  # the first failure is the one to tell
                queue.wait(is_long=True)
        raise
