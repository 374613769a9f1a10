"""A side stream of one device, the kernels of ``native/cuda/transfer.cu``, and their small memory.

Ids and sums of a launch lie in one buffer, pinned on the host and once more on the device::

    | source ids, int32 x n | target ids, int32 x n | sums, uint64 x n |

One copy on the stream takes ids and zeroed sums up ahead of the kernel, and one brings the sums
back behind it, so that neither waits for the host.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.cuda.checksum import finish_checksums
from common.cuda.driver import BlockCopies, Copy, CudaError, PieceCopies
from common.errors import ConfigError

SOURCE = Path(__file__).parents[2] / "native" / "cuda" / "transfer.cu"
THREADS = 512
UNROLL = 4
VECTOR_BYTES = 16
CTAS_PER_MULTIPROCESSOR = 2
PAIR_BYTES = 16
MIN_PAIRS = 4096
HIGHEST_PRIORITY = -100
"""CUDA takes the highest that the device has."""

# CuPy has no types: its objects are Any throughout this file.


@cache
def _kernels(cupy: Any) -> Any:
    try:
        code = SOURCE.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the GPU kernels are missing: {SOURCE}: {error.strerror}") from error
    return cupy.RawModule(code=code, options=("-std=c++17",))


class CupyQueue:
    """``CudaQueue`` on a CUDA stream that does not wait for the default stream."""

    def __init__(self, cupy: Any, device: int) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._device = device
        with self._called("making a stream"):
            self._runtime.setDevice(device)
            self._stream = cupy.cuda.Stream(non_blocking=True, priority=HIGHEST_PRIORITY)
            self._spinning = cupy.cuda.Event(disable_timing=True)
            self._sleeping = cupy.cuda.Event(block=True, disable_timing=True)
            self._ctas = CTAS_PER_MULTIPROCESSOR * self._runtime.deviceGetAttribute(
                self._runtime.cudaDevAttrMultiProcessorCount, device
            )
        with self._called("compiling the kernels of transfers"):
            module = _kernels(cupy)
            self._copy_kernel = module.get_function("copy_blocks")
            self._piece_kernel = module.get_function("copy_pieces")
            self._sum_kernel = module.get_function("sum_blocks")
        self._num_pairs = 0
        self._pairs_address = 0
        self._host = np.empty(0, dtype=np.uint8)
        self._pinned: Any = None
        self._block_bytes = 0
        """Of the blocks whose checksums are to be finished; 0 where sums stay as they are."""
        self._num_sums = 0
        self._is_closed = False
        with self._called("allocating room for block ids"):
            self._make_room(MIN_PAIRS)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Enqueue contiguous copies."""
        with self._called("copying bytes"):
            self._runtime.setDevice(self._device)
            self._enqueue(copies)

    def copy_blocks(self, copies: BlockCopies, *, num_ctas: int = 0) -> None:
        """Enqueue one launch that copies every block and computes its checksum."""
        count = len(copies.source_ids)
        with self._called(f"copying {count} blocks"):
            ids, sums = self._prepare(copies.source_ids, copies.target_ids, copies.block_bytes)
            vectors = copies.block_bytes // VECTOR_BYTES
            self._launch(
                self._copy_kernel,
                (copies.source, copies.target, ids, ids + 4 * count, sums),
                (vectors,),
                vectors,
                num_ctas,
            )

    def copy_pieces(self, copies: PieceCopies, *, num_ctas: int = 0) -> None:
        """Enqueue one launch that copies parts of every block and sums what it writes."""
        count = len(copies.source_ids)
        with self._called(f"copying parts of {count} blocks"):
            shape, num_vectors = _piece_shape(copies)
            ids, sums = self._prepare(copies.source_ids, copies.target_ids, 0)
            self._launch(
                self._piece_kernel,
                (copies.source, copies.target, ids, ids + 4 * count, sums),
                shape,
                num_vectors,
                num_ctas,
            )

    def checksum_blocks(self, source: int, block_ids: NDArray[np.int32], block_bytes: int) -> None:
        """Enqueue one launch that computes the checksum of every named block."""
        with self._called(f"computing the checksums of {len(block_ids)} blocks"):
            ids, sums = self._prepare(block_ids, block_ids, block_bytes)
            vectors = block_bytes // VECTOR_BYTES
            self._launch(self._sum_kernel, (source, ids, sums), (vectors,), vectors, 0)

    def wait(self, *, is_long: bool) -> NDArray[np.uint64]:
        """Wait until all enqueued work is done; return the last launch's checksums (or sums)."""
        event = self._sleeping if is_long else self._spinning
        count, self._num_sums = self._num_sums, 0
        with self._called("waiting for copies"):
            self._runtime.setDevice(self._device)
            event.record(self._stream)
            event.synchronize()
        sums = self._host[8 * count : PAIR_BYTES * count].view(np.uint64)
        return finish_checksums(sums, self._block_bytes) if self._block_bytes else sums.copy()

    def copy_seconds(self, copies: Sequence[Copy]) -> float:
        """Do copies one after another; return the device's time for all."""
        with self._called("measuring copies"):
            self._runtime.setDevice(self._device)
            begin, end = (self._cupy.cuda.Event() for _ in range(2))
            begin.record(self._stream)
            self._enqueue(copies)
            end.record(self._stream)
            end.synchronize()
            return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    def close(self) -> None:
        """Let go of the stream, after the work on it."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._called("closing a stream"):
            self._runtime.setDevice(self._device)
            self._stream.synchronize()
            if self._pairs_address:
                self._runtime.free(self._pairs_address)
                self._pairs_address = 0

    # ---- inside ----------------------------------------------------------------------------------

    def _enqueue(self, copies: Sequence[Copy]) -> None:
        enqueue, kind = self._runtime.memcpyAsync, self._runtime.memcpyDefault
        stream = self._stream.ptr
        for target, source, num_bytes in copies:
            enqueue(target, source, num_bytes, kind, stream)

    def _prepare(
        self, source_ids: NDArray[np.int32], target_ids: NDArray[np.int32], block_bytes: int
    ) -> tuple[int, int]:
        """Enqueue the upload of ids and zeroed sums; return their addresses on the device."""
        if self._num_sums:
            raise CudaError("a second launch before the first was waited for")
        count = len(source_ids)
        self._runtime.setDevice(self._device)
        self._make_room(count)
        self._host[: 4 * count].view(np.int32)[:] = source_ids
        self._host[4 * count : 8 * count].view(np.int32)[:] = target_ids
        self._host[8 * count : PAIR_BYTES * count] = 0
        self._enqueue([(self._pairs_address, self._pinned.ptr, PAIR_BYTES * count)])
        self._num_sums = count
        self._block_bytes = block_bytes
        return self._pairs_address, self._pairs_address + 8 * count

    def _make_room(self, count: int) -> None:
        if count <= self._num_pairs:
            return
        num_pairs = max(MIN_PAIRS, 1 << (count - 1).bit_length())
        self._stream.synchronize()
        if self._pairs_address:
            self._runtime.free(self._pairs_address)
            self._pairs_address, self._num_pairs = 0, 0
        self._pairs_address = self._runtime.malloc(PAIR_BYTES * num_pairs)
        self._pinned = self._cupy.cuda.alloc_pinned_memory(PAIR_BYTES * num_pairs)
        self._host = np.frombuffer(self._pinned, dtype=np.uint8, count=PAIR_BYTES * num_pairs)
        self._num_pairs = num_pairs

    def _launch(
        self,
        kernel: Any,
        addresses: tuple[int, ...],
        shape: tuple[int, ...],
        num_vectors: int,
        num_ctas: int,
    ) -> None:
        """Enqueue a kernel over the prepared blocks, and the download of their sums.

        It works on ``num_vectors`` vectors of each; ``shape`` are its arguments after the blocks'
        number.
        """
        count = self._num_sums
        threads = max(32, min(THREADS, num_vectors // UNROLL // 32 * 32))
        # Small blocks get small CTAs: as many threads in all.
        ctas = (num_ctas or self._ctas) * (THREADS // threads)
        num_chunks = count * -(-num_vectors // (threads * UNROLL))
        arguments = (
            *(np.uint64(address) for address in addresses),
            *(np.uint32(number) for number in (count, *shape)),
        )
        with self._stream:
            kernel((min(ctas, num_chunks),), (threads,), arguments)
        offset = 8 * count
        self._enqueue([(self._pinned.ptr + offset, self._pairs_address + offset, 8 * count)])

    @contextmanager
    def _called(self, doing: str) -> Iterator[None]:
        errors = (
            self._runtime.CUDARuntimeError,
            self._cupy.cuda.driver.CUDADriverError,
            self._cupy.cuda.compiler.CompileException,
        )
        try:
            yield
        except errors as error:
            raise CudaError(f"{doing} on GPU {self._device}: {error}") from error


def _piece_shape(copies: PieceCopies) -> tuple[tuple[int, ...], int]:
    """Return the arguments of ``copy_pieces`` after the blocks' number, and the vectors written."""
    sizes = (
        *(copies.source_block_bytes, copies.target_block_bytes),
        *copies.pieces[:3],
        *copies.pieces[4:],
        *copies.rest,
    )
    if any(size % VECTOR_BYTES for size in sizes):
        raise ValueError(f"parts of blocks are no multiples of {VECTOR_BYTES} bytes: {copies}")
    count = copies.pieces[3]
    source, target, source_offset, target_offset, piece, *others = (
        size // VECTOR_BYTES for size in sizes
    )
    num_vectors = piece * count + others[4] + others[5]
    return (source, target, source_offset, target_offset, piece, count, *others), num_vectors
