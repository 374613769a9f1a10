"""How both sides of transport ``nccl`` wait: by looking, so that every wait can be ended.

No call into NCCL or the device waits for a peer. Between two looks at the device a wait looks at
the stream to the peer, which shows its death at once, and gives up when nothing moves.
"""

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from common.errors import TransferError
from common.transfer.nccl_driver import Communicator, Mark, Piece

POLL_SECONDS = 20e-6
"""Between two looks at the device; the system's timers make it some more."""
LOOK_SECONDS = 1e-3
"""Between two looks at the stream, each of which gives the interpreter's lock away once more."""
SETTLE_SECONDS = 5.0
"""How long the device may go on after an abort; microseconds, unless it is broken."""


class Pace:
    """Waits of one stream; ``look`` raises what ends them."""

    def __init__(self, look: Callable[[], None], stall_seconds: float) -> None:
        self._look = look
        self._stall_seconds = stall_seconds
        self._never = threading.Event()

    def until(
        self, progress: Callable[[], int], goal: int, stall_seconds: float | None = None
    ) -> None:
        """Wait until ``progress()`` is ``goal``; TransferError when it stays the same too long."""
        limit = self._stall_seconds if stall_seconds is None else stall_seconds
        before, deadline, next_look = -1, 0.0, 0.0
        while (count := progress()) < goal:
            now = monotonic()
            if now >= next_look:
                self._look()
                next_look = now + LOOK_SECONDS
            if count != before:
                before, deadline = count, now + limit
            elif now > deadline:
                raise TransferError(f"nothing moved for {limit:g} s")
            self._never.wait(POLL_SECONDS)


class Progress:
    """How many of some marks, in order, the device has come past."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks = marks
        self._num_done = 0

    def __call__(self) -> int:
        """Look again."""
        while self._num_done < len(self._marks) and self._marks[self._num_done].is_done():
            self._num_done += 1
        return self._num_done


def hand_over(
    communicator: Communicator,
    begin: Callable[[Sequence[Piece]], None],
    groups: Sequence[Sequence[Piece]],
    pace: Pace,
) -> list[Mark]:
    """Begin every group with the communicator's ``begin``; return the mark behind each."""
    marks: list[Mark] = []
    for group in groups:
        begin(group)
        pace.until(lambda: int(communicator.is_ready()), 1)
        marks.append(communicator.mark())
    return marks


def has_settled(mark: Mark) -> bool:
    """Wait, not for long, until the device has come past the mark of an abort."""
    pace = Pace(lambda: None, SETTLE_SECONDS)
    try:
        pace.until(lambda: int(mark.is_done()), 1)
    except TransferError:
        return False
    return True
