"""The part of the block checksum that comes after the sum (``native/.../memory/checksum.hpp``)."""

import numpy as np
from numpy.typing import NDArray

_LENGTH_STEP = 0xD6E8FEB86659FD93
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def finish_checksums(sums: NDArray[np.uint64], block_bytes: int) -> NDArray[np.uint64]:
    """Return the checksums of blocks from the sums of their terms, all modulo 2^64."""
    state = sums + np.uint64(block_bytes * _LENGTH_STEP % 2**64)
    for shift, factor in _FACTORS:
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    finished: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return finished
