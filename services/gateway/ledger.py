"""Where the time of one request went, as workers and gateway tell it. Pure."""

from collections.abc import Iterable

from common.messages.fields import PhaseName, PhaseRecord
from services.gateway.logprobs import Json

MAX_PHASES = 512
"""Records of one request that are kept; later ones are dropped."""


class PhaseLedger:
    """The phases of one request in the order in which they were told."""

    def __init__(self, gateway: str, now: float) -> None:
        self._gateway = gateway
        self._records: list[PhaseRecord] = []
        self._submitted_at: float | None = now
        self._lost_at: float | None = None

    @property
    def records(self) -> tuple[PhaseRecord, ...]:
        """All that were told so far."""
        return tuple(self._records)

    def add(self, records: Iterable[PhaseRecord]) -> None:
        """Take what a worker told."""
        room = MAX_PHASES - len(self._records)
        self._records += list(records)[:room]

    def taken_in(self, now: float) -> None:
        """The controller has queued or placed the request; the first time counts."""
        if self._submitted_at is not None:
            self._own(PhaseName.PLACE, now - self._submitted_at)
        self._submitted_at = None

    def lost(self, now: float) -> None:
        """A worker of the request is gone; until it goes on, later losses are part of the same."""
        if self._lost_at is None:
            self._lost_at = now

    def went_on(self, now: float) -> None:
        """Tokens have come."""
        if self._lost_at is not None:
            self._own(PhaseName.RESUME, now - self._lost_at)
        self._lost_at = None

    def _own(self, name: PhaseName, seconds: float) -> None:
        self.add([PhaseRecord(name=name, worker=self._gateway, seconds=max(0.0, seconds))])


def phases_json(records: Iterable[PhaseRecord]) -> list[Json]:
    """Return records as they stand in ``x_phases`` and in the log."""
    return [
        {
            "name": record.name,
            "worker": record.worker,
            "seconds": round(record.seconds, 6),
            "num_tokens": record.num_tokens,
            "num_bytes": record.num_bytes,
            "num_calls": record.num_calls,
            "gigabytes_per_second": _rate(record),
        }
        for record in records
    ]


def _rate(record: PhaseRecord) -> float | None:
    if not record.num_bytes or not record.seconds:
        return None
    return round(record.num_bytes / record.seconds / 1e9, 3)
