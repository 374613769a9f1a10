"""What the worker tells the controller of its prefix cache, batch by batch."""

from common.kv.blocks import BlockManager
from common.messages.control import KVIndexEvents

IndexReport = tuple[KVIndexEvents, tuple[bytes, bytes]]
"""The message and its raw frames: hashes added, hashes removed."""


class IndexReports:
    """Numbers the batches. ``sequence`` is the number of the last one, 0 before the first."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._is_snapshot_due = False
        self.sequence = 0

    def request_snapshot(self) -> None:
        """Events are missing at the controller: the next report tells everything."""
        self._is_snapshot_due = True

    def take(self) -> IndexReport | None:
        """Return what changed since the last report; None when there is nothing to tell."""
        changes = self._blocks.take_index_changes(is_snapshot=self._is_snapshot_due)
        says_nothing = not changes.is_snapshot or self.sequence == 0  # nothing was told before
        if changes.is_empty and says_nothing and not self._is_snapshot_due:
            return None
        self._is_snapshot_due = False
        self.sequence += 1
        events = KVIndexEvents(sequence=self.sequence, is_snapshot=changes.is_snapshot)
        return events, (changes.added, changes.removed)
