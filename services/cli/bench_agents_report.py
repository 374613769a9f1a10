"""What came of a replay of agents: numbers, a document, and when to stop one. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.cli.bench_serve_client import RequestRecord
from services.cli.bench_serve_report import Slo, quantiles, tpot_ms, ttft_ms

MAX_EXAMPLES = 3
MIN_WINDOW_REQUESTS = 8
JUDGE_SECONDS = 1.0
"""Between two looks at the windows."""


@dataclass(slots=True)
class AgentRun:
    """What became of one agent; ``records`` are its rounds so far, a failed one the last.

    ``is_stopped``: the run ended before its next round. Times are those of the records' clock.
    """

    index: int
    name: str
    num_rounds: int
    started_at: float
    ended_at: float = 0.0
    is_stopped: bool = False
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether every round is complete."""
        return len(self.complete) == self.num_rounds

    @property
    def complete(self) -> list[RequestRecord]:
        """Its complete rounds."""
        return [record for record in self.records if record.failure is None]


class Verdict(StrEnum):
    """Why a run with arrivals was ended early."""

    OVERLOADED = "overloaded"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a run with arrivals has told enough (2.10).

    Overloaded: the mean TTFT of the last window is beyond ``max_ttft_seconds``. Steady: it differs
    by less than ``max_change`` from that of the window ``lookback_seconds`` earlier.
    """

    max_ttft_seconds: float = 4.0
    window_seconds: float = 150.0
    lookback_seconds: float = 1800.0
    max_change: float = 0.05


class StopWatch:
    """Applies a rule to first tokens as they come; ``started_at`` is the run's begin."""

    def __init__(self, rule: StopRule, started_at: float) -> None:
        self._rule = rule
        self._started_at = self._judged_at = started_at
        self._seen: deque[tuple[float, float]] = deque()

    def take(self, now: float, ttft_seconds: float) -> Verdict | None:
        """Note a request's TTFT at ``now``, which never goes back, and judge the run."""
        rule = self._rule
        self._seen.append((now, ttft_seconds))
        if now - self._judged_at < JUDGE_SECONDS:
            return None
        self._judged_at = now
        while self._seen[0][0] < now - rule.lookback_seconds - rule.window_seconds:
            self._seen.popleft()
        late = self._mean(now)
        if late is not None and late > rule.max_ttft_seconds:
            return Verdict.OVERLOADED
        if now - self._started_at < rule.lookback_seconds + rule.window_seconds:
            return None
        early = self._mean(now - rule.lookback_seconds)
        if early is None or late is None:
            return None
        return Verdict.STEADY if abs(late - early) < rule.max_change * early else None

    def _mean(self, end: float) -> float | None:
        """Return the mean of the window before ``end``; None of a few."""
        start = end - self._rule.window_seconds
        values = [ttft for at, ttft in self._seen if start < at <= end]
        return sum(values) / len(values) if len(values) >= MIN_WINDOW_REQUESTS else None


@dataclass(frozen=True, slots=True)
class LoadedKv:
    """KV that one worker read from storage."""

    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AgentsSummary:
    """A replay in numbers. Latencies by name, in milliseconds; of complete rounds alone.

    ``jct_seconds`` is the time from the start until all agents finished; None when one did not.
    ``slo_shares`` are shares of complete rounds that kept each bound and both. ``loaded`` is told
    only by servers that were asked for their phases.
    """

    num_agents: int
    num_finished: int
    num_stopped: int
    num_rounds: int
    num_complete: int
    seconds: float
    jct_seconds: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    latencies_ms: Mapping[str, Mapping[str, float] | None]
    slo_shares: Mapping[str, float]
    loaded: Mapping[str, LoadedKv]
    failures: Mapping[str, int]
    failure_examples: Sequence[str]

    @property
    def is_whole(self) -> bool:
        """Whether every agent finished, or was stopped by the rule, without a failure."""
        return self.num_finished + self.num_stopped == self.num_agents and not self.failures

    def document(self) -> dict[str, object]:
        """Return all numbers for a JSON file."""
        return {
            "num_agents": self.num_agents,
            "num_finished": self.num_finished,
            "num_stopped": self.num_stopped,
            "num_rounds": self.num_rounds,
            "num_complete": self.num_complete,
            "seconds": self.seconds,
            "jct_seconds": self.jct_seconds,
            "agents_per_second": self.num_finished / self.seconds,
            "output_tokens_per_second": self.num_output_tokens / self.seconds,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "latencies_ms": dict(self.latencies_ms),
            "slo_shares": dict(self.slo_shares),
            "loaded": {
                worker: {"num_tokens": loaded.num_tokens, "num_bytes": loaded.num_bytes}
                for worker, loaded in self.loaded.items()
            },
            "failures": dict(self.failures),
            "failure_examples": list(self.failure_examples),
        }


def summarize_agents(runs: Sequence[AgentRun], slo: Slo) -> AgentsSummary:
    """Sum a replay up."""
    complete = [record for run in runs for record in run.complete]
    failed = [
        (run, place, record)
        for run in runs
        for place, record in enumerate(run.records)
        if record.failure is not None
    ]
    started = min((run.started_at for run in runs), default=0.0)
    ended = max((run.ended_at for run in runs), default=0.0)
    is_done = all(run.is_finished for run in runs)
    latencies = {
        "TTFT": _values(ttft_ms(record) for record in complete),
        "TTST": _values(ttst_ms(record) for record in complete),
        "TPOT": _values(tpot_ms(record) for record in complete),
        "E2E": [1e3 * (record.ended_at - record.sent_at) for record in complete],
        "agent": [1e3 * (run.ended_at - run.started_at) for run in runs if run.is_finished],
    }
    return AgentsSummary(
        num_agents=len(runs),
        num_finished=sum(run.is_finished for run in runs),
        num_stopped=sum(run.is_stopped for run in runs),
        num_rounds=sum(run.num_rounds for run in runs),
        num_complete=len(complete),
        seconds=max(ended - started, 1e-9),
        jct_seconds=ended - started if is_done else None,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in complete),
        num_cached_tokens=sum(record.num_cached_tokens for record in complete),
        num_output_tokens=sum(record.num_tokens for record in complete),
        latencies_ms={name: quantiles(values) for name, values in latencies.items()},
        slo_shares=_slo_shares(complete, slo),
        loaded=_loaded(complete),
        failures=dict(Counter(str(record.failure) for *_, record in failed)),
        failure_examples=tuple(
            f"agent {run.index} ({run.name}), round {place + 1} of {run.num_rounds}: "
            f"{record.failure}{': ' if record.detail else ''}{record.detail}"
            for run, place, record in failed[:MAX_EXAMPLES]
        ),
    )


def ttst_ms(record: RequestRecord) -> float | None:
    """Time to the second token, from the moment before the connection was opened."""
    return 1e3 * (record.token_at[1] - record.sent_at) if len(record.token_at) > 1 else None


def _slo_shares(complete: Sequence[RequestRecord], slo: Slo) -> dict[str, float]:
    wanted = {
        "TTFT": Slo(ttft_ms=slo.ttft_ms),
        "TPOT": Slo(tpot_ms=slo.tpot_ms),
        "both": slo,
    }
    return {
        name: sum(map(bound.is_kept_by, complete)) / len(complete)
        for name, bound in wanted.items()
        if complete and bound.is_set
    }


def _loaded(complete: Iterable[RequestRecord]) -> dict[str, LoadedKv]:
    tokens: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for record in complete:
        for phase in record.phases:
            if phase.name == "load":
                tokens[phase.worker] += phase.num_tokens
                num_bytes[phase.worker] += phase.num_bytes
    return {worker: LoadedKv(tokens[worker], num_bytes[worker]) for worker in sorted(tokens)}


def _values(found: Iterable[float | None]) -> list[float]:
    return [value for value in found if value is not None]
