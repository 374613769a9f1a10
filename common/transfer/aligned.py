"""Block pairs as the fewest runs, checked against both pools before a byte moves."""

from collections.abc import Sequence

import flowpath_native
import numpy as np
from numpy.typing import NDArray

from common.errors import TransferError

Side = tuple[Sequence[int], int]
"""``(block ids, number of blocks of the pool)``."""


def align_checked(where: str, source: Side, target: Side) -> NDArray[np.int32]:
    """Return the fewest runs, rows (source, target, length), that cover all pairs.

    A block outside of its pool, a repeated target and lists of different lengths raise
    TransferError, which begins with ``where``.
    """
    count = len(source[0])
    try:
        src = np.asarray(source[0], dtype=np.int32)
        dst = np.asarray(target[0], dtype=np.int32)
        rows = flowpath_native.align(src, dst)
    except (ValueError, OverflowError) as error:
        raise TransferError(f"{where}: cannot write {count} blocks: {error}") from error
    for name, ids, bound in (("source", src, source[1]), ("target", dst, target[1])):
        if len(ids) and not 0 <= ids.min() <= ids.max() < bound:
            raise TransferError(
                f"{where}: cannot write {count} blocks: a {name} block is outside of"
                f" the {bound} blocks of its pool"
            )
    return rows
