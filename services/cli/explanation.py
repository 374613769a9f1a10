"""What the log files say of one request: its phases, and every decision about it. Pure."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from common.telemetry.story import LogEntry

Fact = str | int | float | bool | None

DECISIONS = {
    **dict.fromkeys(("request_queued", "request_placed", "placement_refused"), "place"),
    **dict.fromkeys(("decode_placed", "decode_refused"), "place"),
    **dict.fromkeys(("request_refused", "request_failed", "stream_failed"), "end"),
    **dict.fromkeys(("cancelling", "cancel_received", "client_disconnected"), "end"),
    **dict.fromkeys(("migration_started", "migration_failed"), "move"),
    **dict.fromkeys(("prefix_not_cached", "prefix_late", "preempted"), "work"),
    **dict.fromkeys(("store_looked_up", "prefix_not_copied"), "load"),
    **dict.fromkeys(("load_refused", "load_without_room"), "load"),
    "reserve_refused": "work",
    "request_resumed": "resume",
}
"""Log events that are decisions about a request, and what each is about."""
SITUATION = ("scenario_changed", "role_switched", "help_granted", "help_ended")
"""Decisions about the cluster; what was so when a request was placed is told with it."""
_ENDS = ("request_finished", "request_failed", "request_cancelled", "request_refused")
_BEGINS = ("request_queued", "request_placed", "request_resumed", "prefill_started")
_FAILS = ("request_failed", "stream_failed")
_HEAD = ("request_id", "transfer_id", "cause")


@dataclass(frozen=True, slots=True)
class Span:
    """One phase on one worker, in seconds since the request came; ``end`` None: not ended."""

    name: str
    worker: str
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase as workers and gateway measured it."""

    name: str
    worker: str
    seconds: float
    num_tokens: int = 0
    num_bytes: int = 0
    num_calls: int = 0
    gigabytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision: when (in seconds since the request came), by whom, why, and from what."""

    at: float
    process: str
    kind: str
    event: str
    reason: str
    inputs: tuple[tuple[str, Fact], ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """A request's life. ``seconds`` is None while it has not ended, by what the files say."""

    request_id: str
    began: str
    outcome: str
    seconds: float | None
    phases: tuple[PhaseRow, ...]
    """As measured; without a ledger (it has not ended, or was refused) as the spans say."""
    spans: tuple[Span, ...]
    decisions: tuple[Decision, ...]


def explain_request(story: Sequence[LogEntry], log: Iterable[LogEntry]) -> Explanation:
    """Explain a request by its own entries; ``log`` is everything, for the state of the cluster.

    ``story`` is not empty; both are ordered by time.
    """
    first = story[0]
    clock = _Clock(first.ts)
    end = next((e for e in reversed(story) if e.event in _ENDS and _is_gateway(e)), None)
    measured = tuple(_ledger(end)) if end is not None else ()
    spans = tuple(_with_decodes(_Spans(clock).of(story), measured))
    if end is not None:
        outcome = _told_outcome(end)
    else:
        outcome, end = _seen_outcome(story)
    return Explanation(
        request_id=str(first.fact("request_id")),
        began=first.ts,
        outcome=outcome,
        seconds=None if end is None else clock.at(end),
        phases=measured or tuple(_row(span) for span in spans if span.end is not None),
        spans=spans,
        decisions=tuple(_decisions(story, log, clock)),
    )


class _Clock:
    """Tells entries in seconds since the first one."""

    def __init__(self, first: str) -> None:
        self._first = datetime.fromisoformat(first)

    def at(self, entry: LogEntry) -> float:
        return (datetime.fromisoformat(entry.ts) - self._first).total_seconds()


def _is_gateway(entry: LogEntry) -> bool:
    return "gateway" in entry.process or entry.fact("finish_reasons") is not None


def _seen_outcome(story: Sequence[LogEntry]) -> tuple[str, LogEntry | None]:
    """Say how a request ended of which no gateway tells an end, and by which line.

    One prompt of several and a request that goes on for another one have no end at the gateway:
    there the controller's word counts, and the worker's.
    """
    is_whole = any(e.event == "request_received" and _is_gateway(e) for e in story)
    outcome, end, has_failed = _UNENDED, None, False
    for entry in story:
        if entry.event in _BEGINS:  # whatever ended before: it goes on
            outcome, end, has_failed = _UNENDED, None, False
        elif entry.event == "request_refused":
            outcome, end = f"refused: {entry.fact('reason') or entry.fact('code')}", entry
        elif entry.event in _FAILS and not is_whole:
            outcome, end, has_failed = f"failed: {entry.fact('code')}", entry, True
        elif entry.event == "request_ended" and not has_failed:  # a failure ends, too
            was_cancelled = outcome == _CANCELLED or _tells_cancelled(entry)
            ended = _CANCELLED if was_cancelled else "finished"
            outcome, end = (_UNENDED, None) if is_whole else (ended, entry)
    return outcome, end


_UNENDED = "running, or cut off"
_CANCELLED = "cancelled"


def _tells_cancelled(ended: LogEntry) -> bool:
    """Whether what ended had been cancelled, by the worker's word or the controller's."""
    was_stopping = str(ended.fact("phase")).startswith("cancelling")
    is_stopped = ended.fact("by") in ("CancelReceived", "GatewayGone")
    return bool(ended.fact("was_cancelled")) or was_stopping or is_stopped


def _told_outcome(end: LogEntry) -> str:
    """Say how a request ended by the gateway's line."""
    reasons = end.fact("finish_reasons")
    told = end.event.removeprefix("request_")
    if end.event == "request_finished" and isinstance(reasons, str):
        return f"{told}: {', '.join(str(reason) for reason in json.loads(reasons))}"
    code = end.fact("code")
    return f"{told}: {code}" if code else told


def _ledger(end: LogEntry) -> Iterator[PhaseRow]:
    """Yield the phases that the gateway has put down at the end."""
    text = end.fact("phases")
    if not isinstance(text, str):
        return
    for phase in json.loads(text):
        yield PhaseRow(**phase)


def _row(span: Span) -> PhaseRow:
    assert span.end is not None
    return PhaseRow(span.name, span.worker, round(span.end - span.start, 6))


_NOTHING = ((), "", "request_id", "")
_DECODING = ("decode_wait", "decode")
_COMES_TO = ("decode_wait", "migration")
"""Spans of the worker that the request comes to, which is known once it is there."""
_STEPS: Mapping[str, tuple[tuple[str, ...], str, str, str]] = {
    "request_received": ((), "place", "request_id", ""),
    "request_queued": (("place",), "queue", "request_id", ""),
    "request_placed": (("place",), "queue", "request_id", "prefill"),
    "prefill_started": (("queue",), "prefill", "request_id", ""),
    "prefill_finished": (("prefill", "resume"), "decode_wait", "request_id", ""),
    "handoff_begun": ((), "transfer", "transfer_id", ""),
    "handoff_ended": (("transfer",), "", "transfer_id", ""),
    # A prefill that no line ended went on as the decode that is handed over now.
    "handoff_accepted": (("prefill", *_DECODING, "migration"), "decode", "request_id", ""),
    "migration_started": ((), "migration", "request_id", "source"),
    "migration_failed": (("migration",), "", "request_id", ""),
    "request_resumed": ((), "resume", "resumed_request_id", ""),
}
"""Log event to the spans that it ends, the one that it begins, the facts that name it and where."""
_LAST = ("request_ended", "request_failed", "stream_failed", "request_cancelled")


class _Spans:
    """Lays the phases of a request on one axis, by the lines that begin and end them."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._open: dict[tuple[str, str], tuple[str, float]] = {}
        self._done: list[Span] = []

    def of(self, story: Sequence[LogEntry]) -> list[Span]:
        for entry in story:
            self._take(entry, str(entry.fact("request_id")), self._clock.at(entry))
        left = [Span(name, who, start, None) for (name, _), (who, start) in self._open.items()]
        return sorted([*self._done, *left], key=lambda span: (span.start, span.end or span.start))

    def _take(self, entry: LogEntry, request: str, at: float) -> None:
        if entry.event == "request_received" and entry.fact("decode_worker") is not None:
            return  # a worker's: it is placed already
        if entry.event == "handoff_accepted" and entry.fact("is_prefix"):
            return
        if entry.event == "prefix_loaded":  # it tells how long the reads took, at their end
            seconds = float(entry.fact("read_seconds") or 0.0)
            self._done.append(Span("load", entry.process, max(0.0, at - seconds), at))
        ends, begins, id_of, worker_of = _STEPS.get(entry.event, _NOTHING)
        for name in ends:
            is_there = entry.event == "handoff_accepted" and name in _COMES_TO
            came_to = entry.process if is_there else None
            self._end(name, str(entry.fact(id_of)), at, came_to)
        if begins:
            worker = str(entry.fact(worker_of) or entry.process)
            self._begin(begins, str(entry.fact(id_of)), worker, at)
        if entry.event in _LAST:
            self._end_all(request, at)
        if entry.event == "request_finished":
            for name, other in list(self._open):
                self._end(name, other, at)

    def _begin(self, name: str, request: str, worker: str, at: float) -> None:
        if name == "queue" and ("queue", request) in self._open:
            self._open[name, request] = (worker, self._open[name, request][1])
            return
        self._open[name, request] = (worker, at)

    def _end(self, name: str, request: str, at: float, came_to: str | None = None) -> None:
        begun = self._open.pop((name, request), None)
        if begun is not None:
            worker, start = begun
            self._done.append(Span(name, came_to or worker, start, at))

    def _end_all(self, request: str, at: float) -> None:
        if ("decode_wait", request) in self._open:  # it decoded where it was prefilled
            worker, start = self._open.pop(("decode_wait", request))
            self._done.append(Span("decode", worker, start, at))
        for name, other in list(self._open):
            if other == request:
                self._end(name, other, at)


def _with_decodes(spans: Sequence[Span], measured: Sequence[PhaseRow]) -> Iterator[Span]:
    """Cut the decode off prefills that no line ended: it ran on the same worker."""
    decoding = {span.worker for span in spans if span.name == "decode"}
    decodes = {row.worker: row.seconds for row in measured if row.name == "decode"}
    for span in spans:
        seconds = decodes.get(span.worker)
        is_whole = span.name == "prefill" and span.worker not in decoding
        if not is_whole or seconds is None or span.end is None:
            yield span
            continue
        begun = max(span.start, span.end - seconds)
        yield replace(span, end=begun)
        yield replace(span, name="decode", start=begun)


def _decisions(
    story: Sequence[LogEntry], log: Iterable[LogEntry], clock: _Clock
) -> Iterator[Decision]:
    situation = iter([entry for entry in log if entry.event in SITUATION])
    following = next(situation, None)
    now: dict[str, Fact] = {}
    for entry in story:
        while following is not None and following.ts <= entry.ts:
            _learn(now, following)
            following = next(situation, None)
        if entry.event not in DECISIONS:
            continue
        inputs = tuple((key, value) for key, value in entry.facts if key not in (*_HEAD, "reason"))
        if entry.event in ("request_placed", "request_queued", "migration_started"):
            inputs = (*inputs, *now.items())
        reason = entry.fact("reason") or entry.fact("message") or ""
        yield Decision(
            clock.at(entry),
            entry.process,
            DECISIONS[entry.event],
            entry.event,
            str(reason),
            inputs,
        )


def _learn(now: dict[str, Fact], entry: LogEntry) -> None:
    worker = entry.fact("worker")
    if entry.event == "scenario_changed":
        now["scenario"] = entry.fact("scenario")
    elif worker is not None and entry.event == "role_switched":
        now[f"role of {worker}"] = entry.fact("role")
    elif worker is not None and entry.event == "help_granted":
        now[f"{worker} helps"] = entry.fact("helps")
    elif worker is not None:
        now.pop(f"{worker} helps", None)
