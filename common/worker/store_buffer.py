"""The bounded buffer between the store and a pool (papers: DualPath 4.1, PE and DE buffer)."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from common.worker.host_memory import HostMemory

TURNS = 4
"""A turn takes at most one part of so many: what reads, what writes, and what each still copies."""


@dataclass(frozen=True, slots=True)
class BufferStats:
    """Bytes that have passed a buffer, each counted where it was written or read there."""

    loaded_bytes: int = 0
    """From the store into the buffer."""
    uploaded_bytes: int = 0
    """From host memory into the pool; blocks of the host tier go there without the buffer."""
    downloaded_bytes: int = 0
    """From the pool into the buffer, for the store."""
    wait_seconds: float = 0.0
    """For which reads and writes waited for room."""


class StoreBuffer:
    """Slots of one block each, which whoever reads or writes takes for a while.

    Nobody may wait for room while it holds some: then whoever holds room is about to give it back.
    May be used from any thread.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.turn = max(1, memory.num_blocks // TURNS)
        """Slots that one turn may take."""
        self._free = list(reversed(range(memory.num_blocks)))
        self._changed = threading.Condition()
        self._loaded_bytes = 0
        self._uploaded_bytes = 0
        self._downloaded_bytes = 0
        self._wait_seconds = 0.0

    def try_take(self, num_wanted: int) -> list[int]:
        """Take at most so many slots, and at most a turn; none where there is no room."""
        with self._changed:
            return self._take(num_wanted)

    def take(self, num_wanted: int) -> list[int]:
        """Take at most so many slots, and at most a turn, as soon as there is one."""
        began = perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            self._wait_seconds += perf_counter() - began
            return self._take(num_wanted)

    def give_back(self, slots: Sequence[int]) -> None:
        """Nothing reads or writes these slots any more."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def count(self, *, loaded: int = 0, uploaded: int = 0, downloaded: int = 0) -> None:
        """Count bytes (see ``BufferStats``)."""
        with self._changed:
            self._loaded_bytes += loaded
            self._uploaded_bytes += uploaded
            self._downloaded_bytes += downloaded

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        with self._changed:
            return len(self._free)

    def stats(self) -> BufferStats:
        """Return the counts of now."""
        with self._changed:
            return BufferStats(
                self._loaded_bytes,
                self._uploaded_bytes,
                self._downloaded_bytes,
                self._wait_seconds,
            )

    def _take(self, num_wanted: int) -> list[int]:
        count = min(num_wanted, self.turn, len(self._free))
        return [self._free.pop() for _ in range(count)]
