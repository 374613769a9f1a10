"""Whether a worker takes new work, and why not."""

from common.errors import ErrorCode
from common.ids import WorkerId

Refusal = tuple[ErrorCode, str]
"""The code that the caller gets, and what people read."""


class Availability:
    """A worker takes work unless it was told to drain, shuts down, or its books are wrong."""

    def __init__(self, worker_id: WorkerId) -> None:
        self._id = worker_id
        self.is_ordered_to_drain = False
        self.is_shutting_down = False
        self.is_quarantined = False

    @property
    def is_draining(self) -> bool:
        """Whether the worker finishes what it has, for either reason."""
        return self.is_ordered_to_drain or self.is_shutting_down

    def why_refuse(self) -> Refusal | None:
        """Say why no work is taken in now, if so."""
        if self.is_quarantined:
            return ErrorCode.NO_WORKER, f"{self._id} is quarantined"
        if self.is_shutting_down:
            return ErrorCode.SHUTTING_DOWN, f"{self._id} is shutting down"
        if self.is_ordered_to_drain:
            return ErrorCode.SHUTTING_DOWN, f"{self._id} is draining"
        return None
