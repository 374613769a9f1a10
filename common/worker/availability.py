"""Whether a worker takes new work, and why not."""

from common.errors import ErrorCode
from common.ids import WorkerId

Refusal = tuple[ErrorCode, str]
"""The code that the caller gets, and what people read."""


class Availability:
    """A worker takes work unless it drains or its books are wrong."""

    def __init__(self, worker_id: WorkerId) -> None:
        self._id = worker_id
        self.is_draining = False
        self.is_quarantined = False

    def why_refuse(self) -> Refusal | None:
        """Say why no work is taken in now, if so."""
        if self.is_quarantined:
            return ErrorCode.NO_WORKER, f"{self._id} is quarantined"
        if self.is_draining:
            return ErrorCode.SHUTTING_DOWN, f"{self._id} is shutting down"
        return None
