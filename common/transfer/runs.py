"""One aligned, checksummed copy of block pairs between two pools in host memory."""

import time
from collections.abc import Sequence

import flowpath_native
import numpy as np
from numpy.typing import NDArray

from common.errors import TransferError
from common.transfer.backend import WriteReport

_Int32 = NDArray[np.int32]


def write_blocks(
    target: memoryview, source: memoryview, pairs: tuple[Sequence[int], Sequence[int]], size: int
) -> WriteReport:
    """Copy blocks of ``size`` bytes, given as (source ids, target ids), in the fewest runs.

    A block outside of its pool, a repeated target and lists of different lengths raise
    TransferError, and nothing is copied.
    """
    start = time.perf_counter()
    try:
        src = np.asarray(pairs[0], dtype=np.int32)
        dst = np.asarray(pairs[1], dtype=np.int32)
        runs = flowpath_native.align(src, dst)
        checksums = flowpath_native.copy_runs_checksummed(target, source, runs, size)
    except (ValueError, OverflowError) as error:
        raise TransferError(f"cannot write {len(pairs[0])} blocks: {error}") from error
    return WriteReport(
        num_blocks=len(dst),
        num_calls=len(runs),
        num_bytes=len(dst) * size,
        seconds=time.perf_counter() - start,
        checksums=in_pair_order(checksums, runs, dst),
    )


def in_pair_order(checksums: NDArray[np.uint64], runs: _Int32, dst: _Int32) -> NDArray[np.uint64]:
    """Reorder values that stand in the order of ``runs`` to that of the targets ``dst``."""
    if len(dst) == 0:
        return checksums
    written = np.concatenate(
        [np.arange(first, first + length, dtype=np.int32) for _, first, length in runs.tolist()]
    )
    by_target = np.argsort(written)
    reordered: NDArray[np.uint64] = checksums[by_target[np.searchsorted(written[by_target], dst)]]
    return reordered
