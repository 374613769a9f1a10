"""The metrics that ``flowpath monitor`` streams, from what workers tell with every heartbeat. Pure.

Names are those of the papers' field (storage, compute and memory groups). Only what is measured is
here: a metric without a number of its own has no place in the table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType

from common.errors import ConfigError
from common.ids import Epoch, WorkerId
from common.messages.admin import StatusReport, WorkerStatus
from common.messages.fields import KVCounts, WorkerLoad, WorkerTotals

BY_LAYER_NOTE = "a block holds all layers: a hit is a hit of every layer, a miss of none"

_State = Callable[[KVCounts, WorkerLoad], float]
_Span = Callable[[WorkerTotals, WorkerTotals], float | None]
_Pairs = Sequence[tuple[WorkerTotals, WorkerTotals]]
_Across = Callable[[_Pairs], float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: of a moment (``state``), of the time between two heartbeats (``span``), or of
    such times of all workers of a role together (``across``).
    """

    name: str
    meaning: str
    state: _State | None = None
    span: _Span | None = None
    across: _Across | None = None
    unit: str = ""
    has_layers: bool = False

    @property
    def has_beginning(self) -> bool:
        """Whether it takes two reports to tell a value."""
        return self.state is None


@dataclass(frozen=True, slots=True)
class Reading:
    """A value, None where there is nothing to tell: a worker's, or with no id its role's."""

    worker_id: WorkerId | None
    role: str
    value: float | None


def _usage(kv: KVCounts, _: WorkerLoad) -> float:
    return (kv.referenced + kv.in_transfer) / kv.total if kv.total else 0.0


def _fragmentation(kv: KVCounts, _: WorkerLoad) -> float:
    return 1 - kv.largest_free_run / kv.free if kv.free else 0.0


def _read_queue(_: KVCounts, load: WorkerLoad) -> float:
    return float(load.read_queue_tokens)


def _seconds(before: WorkerTotals, now: WorkerTotals) -> float:
    return now.at_seconds - before.at_seconds


def _snic(before: WorkerTotals, now: WorkerTotals) -> float:
    return (now.read_seconds - before.read_seconds) / _seconds(before, now)


def _steps(before: WorkerTotals, now: WorkerTotals) -> float:
    return (now.step_seconds - before.step_seconds) / _seconds(before, now)


def _hits(before: WorkerTotals, now: WorkerTotals) -> float | None:
    asked = now.prefix_query_tokens - before.prefix_query_tokens
    return (now.prefix_hit_tokens - before.prefix_hit_tokens) / asked if asked else None


def _prefetches(before: WorkerTotals, now: WorkerTotals) -> float | None:
    used = now.prefetch_used_blocks - before.prefetch_used_blocks
    ended = used + now.prefetch_wasted_blocks - before.prefetch_wasted_blocks
    return used / ended if ended else None


def _flops(before: WorkerTotals, now: WorkerTotals) -> float:
    return (now.model_flops - before.model_flops) / _seconds(before, now)


def _busy_flops(before: WorkerTotals, now: WorkerTotals) -> float | None:
    busy = now.step_seconds - before.step_seconds
    return (now.model_flops - before.model_flops) / busy if busy > 0 else None


def _bubble(pairs: _Pairs) -> float | None:
    """Return max - mean of the attention time; spans that differ a little count as their mean."""
    spans = [_seconds(before, now) for before, now in pairs]
    shares = [
        (now.attention_seconds - before.attention_seconds) / span
        for (before, now), span in zip(pairs, spans, strict=True)
    ]
    if not any(shares):
        return None
    return (max(shares) - fmean(shares)) * fmean(spans)


_METRICS = (
    Metric("snic_utilization", "share of time in which the store is read", span=_snic),
    Metric("read_queue_length", "tokens to be read from the store", state=_read_queue, unit="tok"),
    Metric(
        "cache_hit_ratio",
        "share of prompt tokens whose KV was there when their prefill began",
        span=_hits,
        has_layers=True,
    ),
    Metric(
        "attention_bubble_time",
        "max - mean of the seconds of attention over prompts, of a role's workers, as estimated",
        across=_bubble,
    ),
    Metric(
        "flops_achieved", "the model's operations, by all of the time", span=_flops, unit="FLOP/s"
    ),
    Metric(
        "flops_achieved_busy",
        "the model's operations, by the time in engine steps",
        span=_busy_flops,
        unit="FLOP/s",
    ),
    Metric("gpu_utilization", "share of time in engine steps, on a CPU too", span=_steps),
    Metric("hbm_usage", "share of the KV pool that requests and transfers hold", state=_usage),
    Metric(
        "prefetch_accuracy",
        "of prefetched blocks whose wait ended: share that a read found in the host tier",
        span=_prefetches,
    ),
    Metric("fragmentation_score", "1 - longest free run / free blocks", state=_fragmentation),
)
METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _METRICS})
_SHORT_NAMES = {"cache_hit": "cache_hit_ratio", "hbm_frag": "fragmentation_score"}
"""What the sources' examples call them."""


def find_metric(name: str, *, by_layer: bool) -> Metric:
    """Return the metric of this name; ConfigError names those that exist."""
    metric = METRICS.get(_SHORT_NAMES.get(name, name))
    if metric is None:
        raise ConfigError(f"--metric {name}: there is none such; there are {', '.join(METRICS)}")
    if by_layer and not metric.has_layers:
        layered = [metric.name for metric in _METRICS if metric.has_layers]
        raise ConfigError(f"--by-layer is for {', '.join(layered)}: {name} is of whole workers")
    return metric


class Meter:
    """Turns reports, taken one after the other, into readings of one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._before: dict[tuple[WorkerId, Epoch], WorkerTotals] = {}

    def take(self, report: StatusReport) -> list[Reading]:
        """Return a reading of every worker of the report.

        A span's begins with the report before; a worker that was not in that one has no value, nor
        has one that has told nothing since. Of a metric across workers there is one reading of
        every role, of those that have told.
        """
        if self._metric.across is not None:
            readings = self._across(report, self._metric.across)
        else:
            readings = [
                Reading(worker.id, worker.role, self._value(worker)) for worker in report.workers
            ]
        self._before = {
            (worker.id, worker.epoch): worker.totals
            for worker in report.workers
            if worker.totals is not None
        }
        return readings

    def _value(self, worker: WorkerStatus) -> float | None:
        if self._metric.state is not None:
            if worker.kv is None or worker.load is None:
                return None
            return self._metric.state(worker.kv, worker.load)
        assert self._metric.span is not None, "a metric is of a moment or of a span"
        pair = self._pair(worker)
        return None if pair is None else self._metric.span(*pair)

    def _across(self, report: StatusReport, across: _Across) -> list[Reading]:
        told: dict[str, list[tuple[WorkerTotals, WorkerTotals]]] = {}
        for worker in report.workers:
            pairs = told.setdefault(worker.role, [])
            if (pair := self._pair(worker)) is not None:
                pairs.append(pair)
        return [Reading(None, role, across(pairs)) for role, pairs in told.items()]

    def _pair(self, worker: WorkerStatus) -> tuple[WorkerTotals, WorkerTotals] | None:
        before, now = self._before.get((worker.id, worker.epoch)), worker.totals
        if before is None or now is None or now.at_seconds <= before.at_seconds:
            return None
        return before, now
