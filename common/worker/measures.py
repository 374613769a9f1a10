"""From a worker's own values to its metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import assert_never

from common.handoff.events import Aborted, Failed, HandedOver, Outcome, PeerGone, Refused
from common.messages.control import Heartbeat
from common.messages.fields import WorkerTotals
from common.scheduler.steps import StepPlan
from common.telemetry.metrics import WorkerMetrics, sum_of, value_of
from common.worker.outgoing import TransferTotals
from common.worker.stepping import FinishedStep


def take_heartbeat(metrics: WorkerMetrics, beat: Heartbeat) -> None:
    """Set the gauges to what a heartbeat tells."""
    kv, load = beat.kv, beat.load
    metrics.set_load(
        num_running=load.num_prefilling + load.num_decoding,
        num_waiting=load.num_waiting,
        num_sending=load.num_sending,
        num_receiving=load.num_receiving,
    )
    owners = {
        "free": kv.free,
        "referenced": kv.referenced,
        "cached": kv.cached,
        "in_transfer": kv.in_transfer,
    }
    metrics.set_kv(owners, kv.largest_free_run)
    metrics.store.read_queue.set(load.read_queue_tokens)


def take_totals(metrics: WorkerMetrics, clock: "StepClock") -> WorkerTotals:
    """Return what was counted until now, the step that is under way too."""
    now = monotonic()
    return WorkerTotals(
        at_seconds=now,
        step_seconds=sum_of(metrics.step_seconds) + clock.seconds_under_way(now),
        prefix_query_tokens=int(value_of(metrics.prefix_queries)),
        prefix_hit_tokens=int(value_of(metrics.prefix_hits)),
        read_seconds=value_of(metrics.store.read_seconds),
        attention_seconds=value_of(metrics.compute.attention_seconds),
        model_flops=value_of(metrics.compute.flops),
        prefetch_used_blocks=int(value_of(metrics.store.prefetch_used)),
        prefetch_wasted_blocks=int(value_of(metrics.store.prefetch_wasted)),
    )


def note_handoff_end(metrics: WorkerMetrics, outcome: Outcome, totals: TransferTotals) -> None:
    """Count a handoff that ended on the prefill side."""
    metrics.note_transfer(
        _failure(outcome),
        num_bytes=totals.num_bytes,
        num_calls=totals.num_calls,
        seconds=totals.seconds,
    )


def _failure(outcome: Outcome) -> str | None:
    """Name why a handoff failed; None for one that did not."""
    match outcome:
        case HandedOver():
            return None
        case Refused(code, _):
            return f"refused_{code}"
        case Aborted(reason, _):
            return str(reason)
        case PeerGone():
            return "peer_gone"
        case Failed():
            return "write_failed"
        case _:
            assert_never(outcome)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A finished step, when it began on the monotonic clock, and how long it took, in seconds.

    It began when the worker handed it over, or when the one before it was over. ``seconds`` are the
    device's where it could tell them.
    """

    step: FinishedStep
    started_at: float
    seconds: float


class StepClock:
    """Times a worker's steps: the engine's, and what the worker itself does between them."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._num_open = 0
        self._busy_since = 0.0
        self._host_seconds = 0.0
        self.start()

    def start(self) -> None:
        """The worker has something to do, again."""
        self._host_since = monotonic()

    def seconds_under_way(self, now: float) -> float:
        """How long the step has taken that is under way, until ``now``; 0 where none is."""
        return now - self._busy_since if self._num_open else 0.0

    def hand_over(self, plan: StepPlan | None) -> None:
        """The worker waits for the engine's thread now, which gets ``plan``."""
        now = monotonic()
        self._host_seconds += now - self._host_since
        if plan is None:
            return
        self._metrics.step_tokens.observe(plan.num_tokens)
        if self._num_open == 0:
            self._busy_since = now
        self._num_open += 1

    def take_over(self, steps: Sequence[FinishedStep]) -> list[TimedStep]:
        """The engine's thread came back with these steps, which are returned."""
        now = monotonic()
        self._host_since = now
        timed: list[TimedStep] = []
        for step in steps:
            self._num_open -= 1
            seconds = now - self._busy_since
            known = seconds if step.device_seconds is None else step.device_seconds
            timed.append(TimedStep(step, self._busy_since, known))
            self._metrics.step_seconds.observe(seconds)
            self._metrics.step_host_seconds.observe(self._host_seconds + step.launch_seconds)
            self._busy_since, self._host_seconds = now, 0.0
        return timed
