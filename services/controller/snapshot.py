"""From a status report to the controller's gauges."""

from common.messages.admin import StatusReport
from common.telemetry.metrics import ControllerMetrics


def take_snapshot(metrics: ControllerMetrics, report: StatusReport) -> None:
    """Set the gauges to what a report tells; a worker that left is in none any more."""
    metrics.begin_snapshot()
    metrics.requests.set(report.num_requests)
    metrics.is_ready.set(report.is_ready)
    metrics.gateways.set(len(report.gateways))
    for worker in report.workers:
        metrics.workers.labels(worker.role, worker.state).inc()
        if worker.kv is not None:
            blocks = metrics.worker_kv_blocks
            blocks.labels(worker.id, "free").set(worker.kv.free)
            blocks.labels(worker.id, "referenced").set(worker.kv.referenced)
            blocks.labels(worker.id, "cached").set(worker.kv.cached)
            blocks.labels(worker.id, "in_transfer").set(worker.kv.in_transfer)
        if worker.load is not None:
            requests = metrics.worker_requests
            requests.labels(worker.id, "waiting").set(worker.load.num_waiting)
            requests.labels(worker.id, "prefilling").set(worker.load.num_prefilling)
            requests.labels(worker.id, "sending").set(worker.load.num_sending)
            requests.labels(worker.id, "receiving").set(worker.load.num_receiving)
            requests.labels(worker.id, "decoding").set(worker.load.num_decoding)
