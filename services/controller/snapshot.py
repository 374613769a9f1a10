"""From status reports to the controller's gauges."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from prometheus_client import Gauge

from common.messages.admin import StatusReport, WorkerStatus
from common.telemetry.metrics import ControllerMetrics
from services.controller.policy.scenario import Scenario
from services.controller.request_machine import NOT_STARTED, RequestPhase

Labels = tuple[str, ...]


class Snapshots:
    """Keeps the gauges at what the last report tells.

    A scrape comes at any moment, so a gauge is changed in place: a worker that stays is never
    missing, and one that left is in no gauge any more.
    """

    def __init__(self, metrics: ControllerMetrics) -> None:
        self._metrics = metrics
        self._told: defaultdict[Gauge, set[Labels]] = defaultdict(set)

    def take(self, report: StatusReport, phases: Mapping[RequestPhase, int]) -> None:
        """Take a report, and how many of its requests are in each phase."""
        metrics = self._metrics
        num_queued = sum(phases[phase] for phase in NOT_STARTED)
        self._set(metrics.phases, {(str(phase),): count for phase, count in phases.items()})
        self._set(metrics.scenario, {(str(one),): one == report.scenario for one in Scenario})
        metrics.requests.set(report.num_requests)
        metrics.queued.set(num_queued)
        metrics.running.set(report.num_requests - num_queued)
        metrics.is_ready.set(report.is_ready)
        metrics.gateways.set(len(report.gateways))
        workers = report.workers
        self._set(metrics.workers, Counter((str(w.role), str(w.state)) for w in workers))
        self._set(metrics.heartbeat_age, {(w.id,): w.heartbeat_age_seconds for w in workers})
        self._set(metrics.worker_kv_usage, {(w.id,): _usage(w) for w in workers if w.kv})
        self._set(metrics.worker_kv_blocks, {k: v for w in workers for k, v in _blocks(w).items()})
        self._set(metrics.worker_requests, {k: v for w in workers for k, v in _requests(w).items()})

    def _set(self, gauge: Gauge, values: Mapping[Labels, float]) -> None:
        for labels in self._told[gauge] - set(values):
            gauge.remove(*labels)
        for labels, value in values.items():
            gauge.labels(*labels).set(value)
        self._told[gauge] = set(values)


def _usage(worker: WorkerStatus) -> float:
    kv = worker.kv
    return (kv.referenced + kv.in_transfer) / kv.total if kv and kv.total else 0.0


def _blocks(worker: WorkerStatus) -> dict[Labels, float]:
    kv = worker.kv
    if kv is None:
        return {}
    return {
        (worker.id, "free"): kv.free,
        (worker.id, "referenced"): kv.referenced,
        (worker.id, "cached"): kv.cached,
        (worker.id, "in_transfer"): kv.in_transfer,
    }


def _requests(worker: WorkerStatus) -> dict[Labels, float]:
    load = worker.load
    if load is None:
        return {}
    return {
        (worker.id, "waiting"): load.num_waiting,
        (worker.id, "prefilling"): load.num_prefilling,
        (worker.id, "sending"): load.num_sending,
        (worker.id, "receiving"): load.num_receiving,
        (worker.id, "decoding"): load.num_decoding,
    }
