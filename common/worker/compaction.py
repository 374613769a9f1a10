"""An idle worker's tidying of its pool (common/kv/compaction.py says what moves)."""

import structlog

from common.errors import TransferError
from common.kv.blocks import BlockManager
from common.transfer.backend import PeerLink

log = structlog.get_logger()

ROUND_BYTES = 32 * 2**20
"""About what is copied before the loop gets its turn: some milliseconds."""


class Compactor:
    """Moves cached blocks inside of a pool so that its longest free run grows.

    Call it in the loop while no step is under way: nobody may take or read the blocks meanwhile.
    """

    def __init__(self, blocks: BlockManager, own_pool: PeerLink, block_bytes: int) -> None:
        self._blocks = blocks
        self._own_pool = own_pool
        self._max_moves = max(1, ROUND_BYTES // block_bytes)
        self._has_failed = False

    def move_some(self) -> int:
        """Move blocks for one round; return how many, 0 when nothing is to be gained."""
        moves = [] if self._has_failed else self._blocks.plan_compaction(self._max_moves)
        if not moves:
            return 0
        before = self._blocks.counts().largest_free_run
        try:
            self._own_pool.write([source for source, _ in moves], [target for _, target in moves])
        except TransferError as error:
            # What was written is free memory; the blocks are where they were.
            self._has_failed = True
            log.warning("compaction_failed", reason=str(error))
            return 0
        self._blocks.relocate(moves)
        log.info(
            "pool_compacted",
            num_blocks=len(moves),
            longest_before=before,
            longest=self._blocks.counts().largest_free_run,
        )
        return len(moves)
