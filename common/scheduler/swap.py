"""Where the K and V of preempted sequences lie in host memory. Pure."""

from collections.abc import Sequence as SequenceOf

from common.errors import InvariantViolationError, LocalProtocolError


class SwapSpace:
    """A free list of host slots, each of the size of one block. Copies nothing."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        # Taken from the end: the slots of lower numbers are used first and again and again.
        self._free = list(reversed(range(num_slots)))

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return self._num_slots - len(self._free)

    def try_take(self, num_slots: int) -> tuple[int, ...] | None:
        """Return as many free slots as are asked for, which are taken from now on, or None."""
        if num_slots > len(self._free):
            return None
        return tuple(self._free.pop() for _ in range(num_slots))

    def give_back(self, slots: SequenceOf[int]) -> None:
        """Free slots that were taken; one that is free already raises LocalProtocolError."""
        if not set(slots).isdisjoint(self._free):
            raise LocalProtocolError(f"some of the slots {list(slots)} are free already")
        self._free.extend(reversed(slots))

    def validate(self, in_use: SequenceOf[int]) -> None:
        """Raise InvariantViolationError unless each slot is either in ``in_use``, once, or free."""
        if sorted([*in_use, *self._free]) != list(range(self._num_slots)):
            raise InvariantViolationError(
                f"of {self._num_slots} host slots {len(self._free)} are free and "
                f"{len(in_use)} in use"
            )
