"""Types of FlowPath's native core (C++ sources in ``native/``).

Buffers are C-contiguous objects of the buffer protocol: ``memoryview``, ``mmap``, shared memory,
numpy arrays (a torch CPU tensor gives one by ``tensor.view(torch.uint8).numpy()``). Block ids and
runs are int32 arrays; other integer sequences are accepted and copied.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

# numpy declares the buffer protocol from Python 3.12 on.
_Memory = Buffer | NDArray[np.generic]

class SegmentAllocator:
    """Hands out runs of adjacent blocks of one pool; a run is ``(start, length)`` in blocks.

    Best fit with ``min_remainder`` as the shortest piece worth leaving behind (SEGMENT_MIN_SIZE in
    blocks), largest-first when a request must be split, coalescing on free. Not thread-safe
    without the GIL.
    """

    def __init__(self, num_blocks: int, min_remainder: int) -> None:
        """Start with ``num_blocks`` free blocks; ``ValueError`` on a wrong argument."""

    def allocate(self, n: int, tail: int | None = None) -> list[tuple[int, int]] | None:
        """Take ``n`` blocks, all or nothing; ``None`` when fewer are free.

        ``tail`` is the block right after the request's last one: what fits is taken there first,
        and the first run returned then begins at ``tail``. ``ValueError`` when ``n < 1``, or when
        the block before ``tail`` is free.
        """

    def allocate_like(self, run_lengths: Sequence[int]) -> list[tuple[int, int]] | None:
        """Take room for a sender's runs, in their order; ``None`` when too few blocks are free.

        One best-fit segment for the total where there is one, else whole runs, longest first.
        """

    def free(self, runs: Sequence[tuple[int, int]]) -> None:
        """Give runs back, joined with free neighbours.

        ``ValueError`` names a run that is empty, out of range, free already or given twice; then
        nothing has changed.
        """

    def is_free(self, start: int, length: int) -> bool:
        """Tell whether the whole run lies in the pool and is free."""

    def free_segments(self) -> list[tuple[int, int]]:
        """Return the free runs by start; no two overlap or touch."""

    def check(self) -> None:
        """Raise ``RuntimeError`` with the first broken invariant."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def min_remainder(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def largest_free(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def fragmentation(self) -> float:
        """1 - largest free run / free blocks; 0.0 when nothing is free."""

def align(
    src: NDArray[np.int32] | Sequence[int],
    dst: NDArray[np.int32] | Sequence[int],
    max_length: int = 0,
) -> NDArray[np.int32]:
    """Return the fewest contiguous copies for ``src[i] -> dst[i]``.

    The rows ``(src, dst, length)`` are sorted by ``(dst - src, src)``; shape ``(k, 3)``. A source
    may repeat, a repeated target is a ``ValueError``. ``max_length`` cuts copies to that many
    blocks; 0 means no limit.
    """

def copy_runs(
    dst: _Memory,
    src: _Memory,
    runs: NDArray[np.int32] | Sequence[tuple[int, int, int]],
    block_bytes: int,
) -> int:
    """Copy rows ``(src, dst, length)`` of blocks from ``src`` to ``dst`` without the GIL.

    Returns the bytes copied. A run outside of a buffer is a ``ValueError`` that names it, and
    nothing is copied.
    """

def copy_runs_checksummed(
    dst: _Memory,
    src: _Memory,
    runs: NDArray[np.int32] | Sequence[tuple[int, int, int]],
    block_bytes: int,
) -> NDArray[np.uint64]:
    """Copy like ``copy_runs`` and return the checksum of each block, in the order of the runs.

    Memory is read once. A run must not overlap its own target.
    """

def checksum(data: _Memory) -> int:
    """Return the 64-bit block checksum; ``memory/checksum.hpp`` defines the function."""

def checksum_kernels() -> list[str]:
    """Return the names of the kernels that this machine can run, the fastest first."""

def checksum_with(kernel: str, data: _Memory) -> int:
    """Return the checksum by the named kernel; all kernels give the same value."""

def checksum_blocks(
    buf: _Memory, block_ids: NDArray[np.int32] | Sequence[int], block_bytes: int
) -> NDArray[np.uint64]:
    """Return the checksum of each named block; an id outside of ``buf`` is a ``ValueError``."""
