"""The records of all requests, and the sums over them."""

from collections import OrderedDict
from math import inf

from common.ids import RequestId
from services.controller.effects import Effect, Fact, Note, PeerKey
from services.controller.members import Members
from services.controller.request_machine import (
    DECODED,
    NOT_STARTED,
    UNPLACED,
    Dispatched,
    RequestEvent,
    RequestPhase,
)
from services.controller.request_record import RequestRecord

MAX_STOPPED_KEPT = 4096
"""Ids that ended otherwise than by a report, kept to stop a decode that starts late."""


class RequestBook:
    """Every request's record. ``num_queued`` have not started to decode.

    ``queued`` are the ids in the phases QUEUED and LOOKING_UP, ``waiting`` those in WAITING, both
    in the order of their submission. ``last_submitted_at`` is when the newest came. Keeps each
    worker's ``placed_blocks`` and ``num_placed`` right. ``requests`` is read by others and changed
    here alone.
    """

    def __init__(self, members: Members) -> None:
        self.requests: dict[RequestId, RequestRecord] = {}
        self.queued: dict[RequestId, None] = {}
        self.waiting: dict[RequestId, None] = {}
        self.num_queued = 0
        self.last_submitted_at = -inf
        self._num_added = 0
        self._members = members
        self._stopped: OrderedDict[RequestId, None] = OrderedDict()

    def add(self, record: RequestRecord) -> None:
        """Take a fresh record in."""
        self._num_added += 1
        record.arrival = self._num_added
        self.last_submitted_at = record.submitted_at
        self.requests[record.request_id] = record
        self.queued[record.request_id] = None
        self._stopped.pop(record.request_id, None)
        self._count(record, 1)

    def num_queued_tokens(self) -> int:
        """Count the prompt tokens that no worker has yet."""
        return sum(self.requests[name].submission.num_prompt_tokens for name in self.queued)

    def count_phases(self) -> dict[RequestPhase, int]:
        """Count the requests in each phase that a record can be in."""
        counts: dict[RequestPhase, int]
        counts = {phase: 0 for phase in RequestPhase if phase is not RequestPhase.UNKNOWN}
        for record in self.requests.values():
            counts[record.phase] += 1
        return counts

    def was_stopped(self, request_id: RequestId) -> bool:
        """Whether we ended this id, lately, other than by its owner's report."""
        return request_id in self._stopped

    def side_of(self, request_id: RequestId, peer: PeerKey) -> str | None:
        """Return "prefill" or "decode", or None for no record or no part in it."""
        record = self.requests.get(request_id)
        return None if record is None else record.side_of(peer)

    def step(
        self, request_id: RequestId, event: RequestEvent, cause: str, now: float
    ) -> list[Effect]:
        """Hand an event to a record and keep every sum over the records."""
        record = self.requests.get(request_id)
        if record is None:
            return [ignored(request_id, cause, f"{type(event).__name__}: no record")]
        before = record.phase
        self._count(record, -1)
        try:
            effects = record.handle(event, cause, now)
        finally:
            self._count(record, 1)
        self.queued = self._ordered(self.queued, record, UNPLACED)
        self.waiting = self._ordered(self.waiting, record, (RequestPhase.WAITING,))
        if record.phase is RequestPhase.UNKNOWN:
            self._forget(record)
            facts: tuple[Fact, ...] = (
                ("by", type(event).__name__),
                ("phase", before),
                ("prefill", record.prefill and record.prefill[0]),
                ("decode", record.decode and record.decode[0]),
                ("seconds", round(now - record.submitted_at, 6)),
            )
            effects = [*effects, Note("request_ended", cause, request_id, facts)]
        elif record.phase is not before and not isinstance(event, Dispatched):  # noted with reason
            moved: tuple[Fact, ...] = (("by", type(event).__name__), ("phase", record.phase))
            effects = [*effects, Note("request_moved", cause, request_id, moved)]
        return effects

    def _ordered(
        self, ids: dict[RequestId, None], record: RequestRecord, phases: tuple[RequestPhase, ...]
    ) -> dict[RequestId, None]:
        """Return the ids in some phases, with or without the record as its phase says."""
        if record.phase not in phases:
            ids.pop(record.request_id, None)
        elif record.request_id not in ids:
            return dict.fromkeys(sorted([record.request_id, *ids], key=self._arrival_of))
        return ids

    def _arrival_of(self, request_id: RequestId) -> int:
        return self.requests[request_id].arrival

    def _forget(self, record: RequestRecord) -> None:
        del self.requests[record.request_id]
        if record.was_stopped:
            self._stopped[record.request_id] = None
            if len(self._stopped) > MAX_STOPPED_KEPT:
                self._stopped.popitem(last=False)

    def _count(self, record: RequestRecord, sign: int) -> None:
        if record.phase in NOT_STARTED:
            self.num_queued += sign
        if record.phase is RequestPhase.PLACED and record.decode in self._members.workers:
            decode = self._members.workers[record.decode]
            decode.placed_blocks += sign * record.num_blocks
            decode.num_placed += sign

    def validate(self) -> None:
        """Check every sum over the records. Raises AssertionError: a bug of ours."""
        records = self.requests.values()
        queued = [record for record in records if record.phase in NOT_STARTED]
        assert self.num_queued == len(queued), (self.num_queued, len(queued))
        for ids, phases in ((self.queued, UNPLACED), (self.waiting, (RequestPhase.WAITING,))):
            assert set(ids) == {r.request_id for r in records if r.phase in phases}, (phases, ids)
            order = [self._arrival_of(request_id) for request_id in ids]
            assert order == sorted(order), (phases, ids)
        for key, worker in self._members.workers.items():
            placed = [
                record.num_blocks
                for record in records
                if record.phase is RequestPhase.PLACED and record.decode == key
            ]
            assert worker.placed_blocks == sum(placed), (key, worker.placed_blocks, placed)
            assert worker.num_placed == len(placed), (key, worker.num_placed, placed)
        for record in records:
            record.validate()
            assert record.phase is not RequestPhase.UNKNOWN, record.request_id
            owner = record.decode if record.phase in DECODED else record.prefill
            owner = record.asked if record.phase is RequestPhase.LOOKING_UP else owner
            is_ours = record.phase is RequestPhase.QUEUED
            assert is_ours or owner in self._members.workers, (record.request_id, record.phase)


def ignored(request_id: RequestId, cause: str, reason: str) -> Note:
    """Return the note of an event that changes nothing."""
    return Note("event_ignored", cause, request_id, (("reason", reason),))
