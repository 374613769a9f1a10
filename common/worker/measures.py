"""From a worker's own values to its metrics."""

from collections.abc import Sequence
from time import perf_counter
from typing import assert_never

from common.handoff.events import Aborted, Failed, HandedOver, Outcome, PeerGone, Refused
from common.messages.control import Heartbeat
from common.scheduler.steps import StepPlan
from common.telemetry.metrics import WorkerMetrics
from common.worker.outbound import TransferTotals
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
        self._host_since = perf_counter()

    def hand_over(self, plan: StepPlan | None) -> None:
        """The worker waits for the engine's thread now, which gets ``plan``."""
        now = perf_counter()
        self._host_seconds += now - self._host_since
        if plan is None:
            return
        self._metrics.step_tokens.observe(plan.num_tokens)
        if self._num_open == 0:
            self._busy_since = now
        self._num_open += 1

    def take_over(self, steps: Sequence[FinishedStep]) -> Sequence[FinishedStep]:
        """The engine's thread came back with these steps, which are returned."""
        now = perf_counter()
        self._host_since = now
        for step in steps:
            self._num_open -= 1
            self._metrics.step_seconds.observe(now - self._busy_since)
            self._metrics.step_host_seconds.observe(self._host_seconds + step.launch_seconds)
            self._busy_since, self._host_seconds = now, 0.0
        return steps
