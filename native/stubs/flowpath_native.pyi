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

def copy_pieces(
    dst: _Memory,
    src: _Memory,
    dst_ids: NDArray[np.int32] | Sequence[int],
    src_ids: NDArray[np.int32] | Sequence[int],
    *,
    pieces: tuple[int, int, int, int, int, int],
    rest: tuple[int, int, int, int],
    src_block_bytes: int,
    dst_block_bytes: int,
) -> NDArray[np.uint64]:
    """Copy parts of block ``src_ids[i]`` into block ``dst_ids[i]``, for all i, without the GIL.

    ``pieces`` are source and target offset, bytes and number of the pieces and their distances at
    source and target; ``rest`` source and target offset, bytes, and how many zeros follow; all in
    multiples of 8 bytes. Returns, for each pair, the sum of the checksum's terms of what was
    written, where it lies in the target. What is outside of a block or a buffer is a
    ``ValueError``, and nothing is copied.
    """

def copy_streamed(dst: _Memory, src: _Memory) -> None:
    """Copy past the caches, without the GIL, and do nothing else.

    This is what memory gives a copy at best, as a measure for others. Buffers of different sizes
    are a ``ValueError``; they must not overlap.
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

# Stored blocks: storage_bindings.cpp

def has_io_uring() -> bool:
    """Tell whether this system has and allows io_uring."""

def seal_block(target: _Memory, head: _Memory, payload: _Memory) -> None:
    """Fill ``target`` (4096 bytes more than ``payload``) with a whole block file.

    That is ``head`` (at most 256 bytes) and zeros, at 4080 the payload's checksum, at 4088 that of
    the 4088 bytes before, then the payload. ValueError where the sizes do not fit.
    """

class BlockFiles:
    """Reads and writes block files, ``queue_depth`` of them at a time, without the GIL.

    Paths are relative to the folder ``root_fd``, which must stay open. Calls of several threads
    wait for each other. An outcome is 0, an errno, -1 (the file is too short) or -2 (a checksum
    does not fit).
    """

    def __init__(self, engine: str, root_fd: int, queue_depth: int, is_direct: bool) -> None:
        """Choose ``io_uring`` (RuntimeError where there is none) or ``threads``.

        ``is_direct`` passes the page cache by, where the file system can.
        """
    def register_memory(self, buffers: Sequence[_Memory]) -> bool:
        """Pin writable memory that reads and writes often use, in place of what was before.

        The buffers are held. False where the engine or the system cannot: then all else works as
        before.
        """
    def read(
        self, paths: Sequence[str], buffer: _Memory, offsets: Sequence[int], payload_bytes: int
    ) -> tuple[list[int], bytes]:
        """Read and verify each file's payload into ``buffer``, at the offset beside its path.

        Returns the outcomes and the first 256 bytes of each header, one after the other. What
        a failed read leaves in ``buffer`` and in its header is undefined.
        """
    def write(
        self, paths: Sequence[str], buffer: _Memory, offsets: Sequence[int], num_bytes: int
    ) -> list[int]:
        """Create files of ``num_bytes`` from offsets of ``buffer``, which are aligned to 4096.

        Outcome 0 says that the bytes are on the disk; a file that failed is removed. A file that
        exists is one that fails.
        """

# CPU engine: cpu_bindings.cpp

def cpu_instruction_sets() -> list[str]:
    """Return the instruction sets that the CPU kernels can use here, widest first."""

class CpuKernels:
    """What a decoder layer does beside its matrix products, over one pool and one ragged batch.

    Tensors are passed by address (0 for none); they must be contiguous and of ``dtype``. ``qkv``
    is (tokens, num_heads + 2 * num_kv_heads, head_dim), flat tokens in the batch's order.
    """

    def __init__(
        self,
        pool: _Memory,
        *,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        block_bytes: int,
        dtype: str,
        num_heads: int,
        cosine: NDArray[np.float32],
        sine: NDArray[np.float32],
        num_threads: int = 1,
        instruction_set: str = "",
    ) -> None:
        """Bind to a writable pool; ValueError where the shape does not fit.

        ``cosine`` and ``sine`` are (positions, head_dim / 2). ``instruction_set`` "" chooses the
        widest; ``dtype`` is ``float32`` or ``bfloat16``.
        """
    @property
    def instruction_set(self) -> str:
        """Return the name of the set in use."""
    def set_batch(
        self,
        positions: NDArray[np.int32],
        slots: NDArray[np.int64],
        tables: NDArray[np.int32],
        chunks: NDArray[np.int32],
    ) -> None:
        """Take the batch of the next calls; ValueError where an index is out of range.

        ``slots`` are block * block_size + offset. ``chunks`` is (n, 3): first and last token
        (exclusive) and start position; they cover the batch's end, and all tokens before are
        single. ``tables`` has a row of block numbers for each single token, then each chunk.
        """
    def rotate_store(
        self, layer: int, qkv: int, q_weight: int, k_weight: int, epsilon: float
    ) -> None:
        """RMS-normalise (where weights are given) and rotate q and k in place; store k and v."""
    def attend(self, layer: int, qkv: int, out: int, window: int, scale: float) -> None:
        """Write all tokens' attention over the pool to ``out``, (tokens, num_heads, head_dim).

        ``window`` is how many positions a token sees, itself included; 0 is all.
        """
    def rms_norm(
        self, residual: int, delta: int, weight: int, out: int, rows: int, size: int, epsilon: float
    ) -> None:
        """Add ``delta`` (where given) to ``residual`` in place; write its RMSNorm to ``out``."""
    def silu_mul(self, gate_up: int, out: int, rows: int, size: int) -> None:
        """Write silu(gate) * up of (rows, 2 * size) to ``out``, (rows, size)."""
