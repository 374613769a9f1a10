"""What each request's time on this worker went into, for its caller. Pure.

Theory of operation. Every time is an argument, in seconds on one monotonic clock. The phases of a
request follow one another without a gap: ``queue``, ``prefix`` or ``load`` (the wait for blocks of
another worker or of the store, which is no part of ``queue``), ``prefill`` until the first tokens
are out, ``decode_wait`` until the first decode step begins, ``decode`` until the last token is out;
a decode that moves is cut in two by ``migration``, from when it is frozen until its first step
elsewhere. Only ``transfer`` runs beside them, and within ``prefix`` the ``load`` of the worker that
copies it. What ended is told with the next tokens that go to the gateway, by whichever worker sends
them: records of a worker that sends none any more travel with the commit.
"""

from dataclasses import dataclass, field, replace

from common.ids import RequestId, WorkerId
from common.messages.fields import PhaseName, PhaseRecord, Phases
from common.messages.tokens import TokenDelta


@dataclass(frozen=True, slots=True)
class PrefixCopied:
    """What another worker copied here for a request; nothing where that failed.

    ``phases`` ended there before.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    num_calls: int = 0
    phases: Phases = ()


@dataclass(frozen=True, slots=True)
class PrefixLoaded:
    """What came from the store, and how long its reads took; nothing where that failed.

    ``had_room`` is false where nothing was tried, since the pool had no room.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    num_calls: int = 0
    read_seconds: float = 0.0
    had_room: bool = True


@dataclass(slots=True)
class _Times:
    """``done_at`` is when the prefill ended, here or elsewhere, or a decode was frozen elsewhere.

    ``repeated`` are choices whose next delta begins with a token that was counted elsewhere.
    """

    open_choices: set[int]
    received_at: float = 0.0
    queued_seconds: float = 0.0
    prefix_seconds: float = 0.0
    prefill_at: float | None = None
    num_prefill_tokens: int = 0
    done_at: float | None = None
    wait: PhaseName = PhaseName.DECODE_WAIT
    is_taken_over: bool = False
    decode_at: float | None = None
    frozen_at: float | None = None
    frozen_seconds: float = 0.0
    num_decoded: int = 0
    repeated: set[int] = field(default_factory=set)
    pending: list[PhaseRecord] = field(default_factory=list)


class PhaseLedger:
    """The times of every request here, from its arrival until it is forgotten."""

    def __init__(self, worker_id: WorkerId) -> None:
        self._id = worker_id
        self._times: dict[RequestId, _Times] = {}

    def received(
        self, request_id: RequestId, choices: range, queued_seconds: float, now: float
    ) -> None:
        """A request came to be prefilled, after so long in the controller's queue."""
        self._times[request_id] = _Times(set(choices), now, queued_seconds)

    def prefix_ended(self, request_id: RequestId, copied: PrefixCopied, now: float) -> None:
        """The wait for another worker's blocks is over."""
        times = self._times.get(request_id)
        if times is not None and times.prefill_at is None:
            times.pending += copied.phases
            self._waited(times, PhaseName.PREFIX, copied, now)

    def prefix_loaded(self, request_id: RequestId, loaded: PrefixLoaded, now: float) -> None:
        """The wait for blocks of the store is over."""
        times = self._times.get(request_id)
        if times is not None and times.prefill_at is None:
            self._waited(times, PhaseName.LOAD, loaded, now)

    def loaded_for_other(self, loaded: PrefixLoaded, seconds: float) -> Phases:
        """Return what the worker for which a prefix was loaded here is to tell."""
        record = self._record(PhaseName.LOAD, seconds, loaded.num_tokens)
        return (replace(record, num_bytes=loaded.num_bytes, num_calls=loaded.num_calls),)

    def _waited(
        self, times: _Times, name: PhaseName, came: PrefixCopied | PrefixLoaded, now: float
    ) -> None:
        times.prefix_seconds = now - times.received_at
        record = self._record(name, times.prefix_seconds, came.num_tokens)
        times.pending.append(replace(record, num_bytes=came.num_bytes, num_calls=came.num_calls))

    def prefill_started(self, request_id: RequestId, num_tokens: int, now: float) -> None:
        """The first step with the prompt is planned: so many tokens are to be computed."""
        times = self._times.get(request_id)
        if times is None:
            return
        times.prefill_at = now
        times.num_prefill_tokens = num_tokens
        queued = times.queued_seconds + now - times.received_at - times.prefix_seconds
        times.pending.insert(0, self._record(PhaseName.QUEUE, queued, 0))

    def taken_over(
        self,
        request_id: RequestId,
        choices: tuple[int, ...],
        done_at: float,
        *,
        is_migration: bool,
        phases: Phases,
    ) -> None:
        """A request came to be decoded; ``phases`` ended elsewhere and are told by us."""
        self._times[request_id] = _Times(
            set(choices),
            done_at=done_at,
            wait=PhaseName.MIGRATION if is_migration else PhaseName.DECODE_WAIT,
            is_taken_over=True,
            repeated=set(choices),
            pending=list(phases),
        )

    def decode_began(self, request_id: RequestId, now: float) -> None:
        """The request decodes where it was prefilled, perhaps after a wait for another worker."""
        times = self._times.get(request_id)
        if times is not None and times.done_at is not None and not times.is_taken_over:
            self._begin_decode(times, now)

    def attach(self, delta: TokenDelta, started_at: float, now: float) -> TokenDelta:
        """Return a delta that is to be sent with what ended; its step began at ``started_at``."""
        times = self._times.get(delta.request_id)
        if times is None:
            return delta
        if times.done_at is None and times.prefill_at is not None:
            times.done_at = now
            seconds = now - times.prefill_at
            record = self._record(PhaseName.PREFILL, seconds, times.num_prefill_tokens)
            times.pending.append(record)
        elif times.is_taken_over and times.decode_at is None:
            self._begin_decode(times, started_at)
        if times.decode_at is not None:
            times.num_decoded += len(delta.tokens) - (delta.choice in times.repeated)
            times.repeated.discard(delta.choice)
        if delta.finish_reason is not None:
            times.open_choices.discard(delta.choice)
            if not times.open_choices:
                self._end_decode(times, now)
        if not times.pending:
            return delta
        phases = tuple(times.pending)
        times.pending.clear()
        return replace(delta, phases=phases)

    def done_at(self, request_id: RequestId, otherwise: float) -> float:
        """Return when the request's first tokens went out."""
        times = self._times.get(request_id)
        return otherwise if times is None or times.done_at is None else times.done_at

    def choice_cancelled(self, request_id: RequestId, choice: int) -> None:
        """A choice ends without a last delta."""
        times = self._times.get(request_id)
        if times is not None:
            times.open_choices.discard(choice)

    def frozen(self, request_id: RequestId, now: float) -> Phases:
        """The decode stands still to be moved; return what its new worker is to tell."""
        times = self._times.get(request_id)
        if times is None:
            return ()
        times.frozen_at = now
        told = list(times.pending)
        if times.decode_at is not None:
            told.append(self._record(PhaseName.DECODE, _decoded(times, now), times.num_decoded))
        elif times.done_at is not None:
            told.append(self._record(times.wait, now - times.done_at, 0))
        return tuple(told)

    def thawed(self, request_id: RequestId, now: float) -> None:
        """The decode goes on here after all."""
        times = self._times.get(request_id)
        if times is None or times.frozen_at is None:
            return
        seconds = now - times.frozen_at
        times.frozen_at = None
        if times.decode_at is not None:  # else it is part of the wait for the first step
            times.frozen_seconds += seconds
            times.pending.append(self._record(PhaseName.MIGRATION, seconds, 0))

    def forget(self, request_id: RequestId) -> None:
        """The request is over here."""
        self._times.pop(request_id, None)

    def _begin_decode(self, times: _Times, at: float) -> None:
        assert times.done_at is not None, "a decode follows a prefill"
        times.decode_at = max(at, times.done_at)
        if times.decode_at > times.done_at:
            seconds = times.decode_at - times.done_at
            times.pending.append(self._record(times.wait, seconds, 0))

    def _end_decode(self, times: _Times, now: float) -> None:
        if times.decode_at is not None:
            seconds = _decoded(times, now)
            times.pending.append(self._record(PhaseName.DECODE, seconds, times.num_decoded))

    def _record(self, name: PhaseName, seconds: float, num_tokens: int) -> PhaseRecord:
        return PhaseRecord(
            name=name, worker=self._id, seconds=max(0.0, seconds), num_tokens=num_tokens
        )


def _decoded(times: _Times, now: float) -> float:
    assert times.decode_at is not None, "asked of a request that decodes"
    return now - times.decode_at - times.frozen_seconds
