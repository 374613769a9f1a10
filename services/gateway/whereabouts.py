"""On which incarnations of workers the requests of one submission are, as far as was told. Pure."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from common.ids import Epoch, RequestId

Incarnation = tuple[str, Epoch]
"""Name and epoch of a worker."""


@dataclass(slots=True)
class _Place:
    """``needed`` are the workers without which the request cannot go on."""

    needed: set[Incarnation] = field(default_factory=set)
    prefill: Incarnation | None = None
    last_sender: Incarnation | None = None
    heard_at: float = 0.0


class Whereabouts:
    """What placements and tokens tell of each request's workers."""

    def __init__(self) -> None:
        self._places: dict[RequestId, _Place] = {}

    def placed(
        self,
        request_id: RequestId,
        prefill: Incarnation | None,
        decode: Incarnation | None,
        now: float,
    ) -> None:
        """The controller chose workers; None for one whose incarnation is not known."""
        needed = {worker for worker in (prefill, decode) if worker is not None}
        self._places[request_id] = _Place(needed, prefill, None, now)

    def heard(self, request_id: RequestId, sender: Incarnation, now: float) -> None:
        """Tokens came. Those of the prefill side are followed by another worker's; it is needed."""
        place = self._places.setdefault(request_id, _Place())
        place.heard_at = now
        if sender != place.last_sender:
            place.last_sender = sender
            place.needed = place.needed | {sender} if sender == place.prefill else {sender}

    def orphaned(self, request_id: RequestId, now: float) -> None:
        """Count its silence from now on."""
        if request_id in self._places:
            self._places[request_id].heard_at = now

    def forget(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._places.pop(request_id, None)

    def quiet_seconds(self, request_id: RequestId, now: float) -> float:
        """Return for how long nothing was heard of a request, since it was placed or orphaned."""
        place = self._places.get(request_id)
        return now - place.heard_at if place is not None else 0.0

    def gone(self, request_id: RequestId, living: AbstractSet[Incarnation]) -> str | None:
        """Return a worker without which the request cannot go on and that lives no more."""
        place = self._places.get(request_id)
        missing = place.needed - living if place is not None else set()
        return min(missing)[0] if missing else None
