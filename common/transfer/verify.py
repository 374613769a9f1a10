"""The receiving side's proof that the bytes in its pool are the bytes that were sent."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import RemoteProtocolError, TransferError
from common.kv.pool import BlockPool


def checksum_blocks(pool: BlockPool, block_ids: Sequence[int]) -> NDArray[np.uint64]:
    """Return the checksum of each named block, with the GIL released while bytes are read."""
    try:
        return pool.checksum(block_ids)
    except ValueError as error:
        raise TransferError(f"cannot checksum {len(block_ids)} blocks: {error}") from error


def verify_blocks(
    pool: BlockPool, block_ids: Sequence[int], expected: NDArray[np.uint64]
) -> int | None:
    """Return the index of the first block whose checksum is wrong, or None when all are right.

    RemoteProtocolError when the sender did not give one checksum for each block.
    """
    if len(expected) != len(block_ids):
        raise RemoteProtocolError(f"{len(expected)} checksums for {len(block_ids)} blocks")
    wrong = np.flatnonzero(checksum_blocks(pool, block_ids) != expected)
    return int(wrong[0]) if len(wrong) else None
