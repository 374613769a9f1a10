"""What a store counts, safely with several threads."""

import threading
from dataclasses import astuple, replace

from common.storage.interface import StoreStats


class Tally:
    """Sums of counts since the store was opened."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._sums = StoreStats()

    def add(self, counts: StoreStats) -> None:
        """Add every field to its sum."""
        with self._mutex:
            pairs = zip(astuple(self._sums), astuple(counts), strict=True)
            self._sums = StoreStats(*(before + more for before, more in pairs))

    def stats(
        self, num_blocks: int, stored_bytes: int, capacity_bytes: int, queued_bytes: int
    ) -> StoreStats:
        """Return the sums with the state of now beside them."""
        with self._mutex:
            return replace(
                self._sums,
                num_blocks=num_blocks,
                stored_bytes=stored_bytes,
                capacity_bytes=capacity_bytes,
                queued_bytes=queued_bytes,
            )
