"""Carries out plans of KV heads between pools on GPUs: one launch for each pair of ranks."""

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from common.cuda.driver import CudaDriver, CudaError, PieceCopies, draining
from common.transfer.cuda_movers import LONG_BYTES
from common.transfer.heads import NO_REST, HeadTransfer


class HeadMover:
    """Copies parts of blocks on the source's GPU, on a stream of its own; for one thread at a time.

    It waits for its copies, not for whoever computed the blocks: those must be whole before.
    """

    def __init__(self, driver: CudaDriver, device: int, *, num_ctas: int = 0) -> None:
        """``num_ctas`` bounds how much of the device a launch takes; 0 fills it."""
        self._queue = driver.queue(device)
        self._num_ctas = num_ctas

    def move(
        self,
        transfer: HeadTransfer,
        addresses: tuple[int, int],
        source_ids: NDArray[np.int32],
        target_ids: NDArray[np.int32],
    ) -> NDArray[np.uint64]:
        """Copy every pair's part and wait; ``addresses`` are of block 0 at source and target.

        Returns each pair's partial sum (see ``common.transfer.head_copies.block_checksums``).
        CudaError when the copy failed; nothing of it runs any more then. ValueError where heads are
        no multiple of 16 bytes.
        """
        copies = PieceCopies(
            *addresses,
            source_ids,
            target_ids,
            pieces=transfer.pieces.numbers(),
            rest=(transfer.rest or NO_REST).numbers(),
            source_block_bytes=transfer.source_block_bytes,
            target_block_bytes=transfer.target_block_bytes,
        )
        with draining(self._queue):
            self._queue.copy_pieces(copies, num_ctas=self._num_ctas)
            is_long = len(source_ids) * transfer.written_bytes >= LONG_BYTES
            return self._queue.wait(is_long=is_long)

    def close(self) -> None:
        """Let go of the stream."""
        with suppress(CudaError):  # a broken device has nothing to wait for
            self._queue.close()
