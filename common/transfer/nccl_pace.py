"""How both sides of transport ``nccl`` hand work over: no call into it waits for a peer."""

from collections.abc import Callable, Sequence

from common.errors import TransferError
from common.transfer.nccl_driver import Communicator, Mark, Piece
from common.transfer.pace import Pace

SETTLE_SECONDS = 5.0
"""How long the device may go on after an abort; microseconds, unless it is broken."""


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
