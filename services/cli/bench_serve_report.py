"""What came of a benchmark run: numbers, a table and a document. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.cli.bench_serve_client import RequestRecord

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MAX_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; None asks for nothing. In milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether anything is asked for."""
        return self.ttft_ms is not None or self.tpot_ms is not None

    def is_kept_by(self, record: RequestRecord) -> bool:
        """Whether a complete request kept it."""
        ttft, tpot = ttft_ms(record), tpot_ms(record)
        is_first_late = self.ttft_ms is not None and (ttft is None or ttft > self.ttft_ms)
        is_slow = self.tpot_ms is not None and tpot is not None and tpot > self.tpot_ms
        return not is_first_late and not is_slow


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to the first token, from the moment before the connection was opened."""
    return 1e3 * (record.token_at[0] - record.sent_at) if record.token_at else None


def tpot_ms(record: RequestRecord) -> float | None:
    """Mean time of each output token after the first; None where there is no second."""
    if record.num_tokens < 2 or len(record.token_at) < 2:
        return None
    return 1e3 * (record.token_at[-1] - record.token_at[0]) / (record.num_tokens - 1)


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p90, p99, mean and the number of values; None of none.

    A quantile is interpolated between the two nearest values.
    """
    if not values:
        return None
    ordered = sorted(values)
    found = {name: _quantile(ordered, share) for name, share in SHARES.items()}
    return {**found, "mean": sum(ordered) / len(ordered), "count": len(ordered)}


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Latencies by name, in milliseconds.

    ``first ITL`` is the time from the first token to the second: with separate prefill and decode
    it holds what is left of the handoff.
    """

    num_requests: int
    num_complete: int
    seconds: float
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    latencies_ms: Mapping[str, Mapping[str, float] | None]
    num_good: int | None
    failures: Mapping[str, int]
    failure_examples: Mapping[str, Sequence[str]]

    @property
    def is_whole(self) -> bool:
        """Whether every completion came."""
        return self.num_complete == self.num_requests

    def throughput(self) -> dict[str, float]:
        """Return rates over the run, of complete requests alone."""
        rates = {
            "requests_per_second": self.num_complete / self.seconds,
            "output_tokens_per_second": self.num_output_tokens / self.seconds,
            "total_tokens_per_second": (self.num_output_tokens + self.num_prompt_tokens)
            / self.seconds,
        }
        if self.num_good is not None:
            rates["goodput_requests_per_second"] = self.num_good / self.seconds
        return rates

    def document(self) -> dict[str, object]:
        """Return all numbers for a JSON file."""
        return {
            "num_requests": self.num_requests,
            "num_complete": self.num_complete,
            "seconds": self.seconds,
            "num_output_tokens": self.num_output_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            **self.throughput(),
            "num_good": self.num_good,
            "latencies_ms": dict(self.latencies_ms),
            "failures": dict(self.failures),
            "failure_examples": {
                kind: list(texts) for kind, texts in self.failure_examples.items()
            },
        }


def summarize(
    records: Sequence[RequestRecord],
    num_requests: int,
    slo: Slo,
    handoff_seconds: Sequence[float] = (),
) -> Summary:
    """Sum a run up; ``num_requests`` counts also those that were never sent."""
    complete = [record for record in records if record.failure is None]
    started = min((record.sent_at for record in records), default=0.0)
    ended = max((record.ended_at for record in records), default=0.0)
    gaps = [
        1e3 * (after - before)
        for record in complete
        for before, after in zip(record.token_at, record.token_at[1:], strict=False)
    ]
    latencies = {
        "TTFT": _values(ttft_ms(record) for record in complete),
        "TPOT": _values(tpot_ms(record) for record in complete),
        "ITL": gaps,
        "first ITL": [
            1e3 * (record.token_at[1] - record.token_at[0])
            for record in complete
            if len(record.token_at) > 1
        ],
        "E2E": [1e3 * (record.ended_at - record.sent_at) for record in complete],
    }
    if handoff_seconds:
        latencies["handoff"] = [1e3 * seconds for seconds in handoff_seconds]
    failed = [record for record in records if record.failure is not None]
    failures = Counter(str(record.failure) for record in failed)
    if (num_unsent := num_requests - len(records)) > 0:
        failures["not_sent"] = num_unsent
    examples = {
        kind: sorted({record.detail for record in failed if record.failure == kind})[:MAX_EXAMPLES]
        for kind in failures
    }
    return Summary(
        num_requests=num_requests,
        num_complete=len(complete),
        seconds=max(ended - started, 1e-9),
        num_output_tokens=sum(record.num_tokens for record in complete),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in complete),
        num_cached_tokens=sum(record.num_cached_tokens for record in complete),
        latencies_ms={name: quantiles(values) for name, values in latencies.items()},
        num_good=sum(slo.is_kept_by(record) for record in complete) if slo.is_set else None,
        failures=dict(failures),
        failure_examples=examples,
    )


def _values(found: Iterable[float | None]) -> list[float]:
    return [value for value in found if value is not None]
