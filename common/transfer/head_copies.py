"""Carries out plans of KV heads between pools in host memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import flowpath_native
import numpy as np
from numpy.typing import NDArray

from common.cuda.checksum import finish_checksums
from common.errors import TransferError
from common.transfer.heads import NO_REST, HeadTransfer


@dataclass(frozen=True, slots=True)
class HeadReport:
    """What one source rank has written into one target rank's blocks.

    ``partial_sums`` are of each pair's target block, in the order of the pairs (see
    ``block_checksums``).
    """

    transfer: HeadTransfer
    num_blocks: int
    num_bytes: int
    seconds: float
    partial_sums: NDArray[np.uint64]


def write_heads(
    target: memoryview,
    source: memoryview,
    transfer: HeadTransfer,
    pairs: tuple[Sequence[int], Sequence[int]],
) -> HeadReport:
    """Copy what one rank has for another, of blocks given as (source ids, target ids).

    A block outside of its pool, a repeated target and lists of different lengths raise
    TransferError, and nothing is copied.
    """
    start = time.perf_counter()
    if len(set(pairs[1])) < len(pairs[1]):
        raise TransferError(f"cannot write heads of {len(pairs[1])} blocks: one is given twice")
    try:
        source_ids = np.asarray(pairs[0], dtype=np.int32)
        target_ids = np.asarray(pairs[1], dtype=np.int32)
        sums = flowpath_native.copy_pieces(
            *(target, source, target_ids, source_ids),
            pieces=transfer.pieces.numbers(),
            rest=(transfer.rest or NO_REST).numbers(),
            src_block_bytes=transfer.source_block_bytes,
            dst_block_bytes=transfer.target_block_bytes,
        )
    except (ValueError, OverflowError) as error:
        raise TransferError(f"cannot write heads of {len(pairs[0])} blocks: {error}") from error
    return HeadReport(
        transfer=transfer,
        num_blocks=len(sums),
        num_bytes=len(sums) * transfer.written_bytes,
        seconds=time.perf_counter() - start,
        partial_sums=sums,
    )


def block_checksums(parts: Sequence[NDArray[np.uint64]], block_bytes: int) -> NDArray[np.uint64]:
    """Return the checksums of one target rank's blocks from all the parts that were written.

    Each source rank that has heads for the target rank gives one part, in the same order of blocks.
    They are what ``BlockPool.checksum`` computes of the blocks there.
    """
    return finish_checksums(np.sum(parts, axis=0, dtype=np.uint64), block_bytes)
