"""How many communicators one side of a worker holds, and how many of them move bytes at once.

A communicator holds memory of the device. While it moves bytes it holds some of the device's
multiprocessors as well, until the peer's does too: those of all must fit on the device together, or
two workers could wait for each other for ever. The same holds for the two sides of one worker, so
each has a limit of its own: a sender waits for receivers, and a receiver for nobody.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from common.errors import TransferError

MAX_COMMUNICATORS = 8
MAX_MOVING = 4


class Holder(Protocol):
    """Who holds a communicator."""

    def try_release(self) -> bool:
        """Give the communicator back and say so to the limit; False when it is in use."""
        ...


class CommunicatorLimit:
    """Shared by all peers of one side. Thread-safe; calls holders without a lock of its own."""

    def __init__(
        self, max_communicators: int = MAX_COMMUNICATORS, max_moving: int = MAX_MOVING
    ) -> None:
        self._max_communicators = max_communicators
        self._max_moving = max_moving
        self._moving = threading.BoundedSemaphore(max_moving)
        self._changed = threading.Condition()
        self._holders: list[Holder] = []
        """The one whose use is longest ago first."""
        self._num_changes = 0

    @property
    def num_held(self) -> int:
        """Communicators that are held now."""
        with self._changed:
            return len(self._holders)

    def admit(self, holder: Holder, wait_seconds: float) -> None:
        """Let ``holder`` hold one; the one unused for longest goes where there are too many.

        TransferError when all are in use for so long.
        """
        deadline = monotonic() + wait_seconds
        while True:
            with self._changed:
                if len(self._holders) < self._max_communicators:
                    self._holders.append(holder)
                    return
                others, seen = list(self._holders), self._num_changes
            if any(other.try_release() for other in others):
                continue
            with self._changed:
                left = deadline - monotonic()
                if not self._changed.wait_for(lambda: self._num_changes != seen, max(0.0, left)):  # noqa: B023 - called within this turn
                    raise TransferError(
                        f"all {self._max_communicators} communicators are in use, for"
                        f" {wait_seconds:g} s already"
                    )

    @contextmanager
    def moving(self, wait_seconds: float) -> Iterator[None]:
        """Move bytes within the block; TransferError when too many do for so long."""
        if not self._moving.acquire(timeout=wait_seconds):
            raise TransferError(
                f"{self._max_moving} transfers are under way, for {wait_seconds:g} s already"
            )
        try:
            yield
        finally:
            self._moving.release()

    def used(self, holder: Holder) -> None:
        """The holder has just used its communicator and does not any more."""
        with self._changed:
            if holder in self._holders:
                self._holders.remove(holder)
                self._holders.append(holder)
            self._note_change()

    def remove(self, holder: Holder) -> None:
        """The holder holds none any more; one that held none is fine."""
        with self._changed:
            if holder in self._holders:
                self._holders.remove(holder)
            self._note_change()

    def _note_change(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()
