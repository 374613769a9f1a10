"""From a worker's own values to its metrics."""

from typing import assert_never

from common.handoff.events import Aborted, Failed, HandedOver, Outcome, PeerGone, Refused
from common.messages.control import Heartbeat
from common.telemetry.metrics import WorkerMetrics
from common.worker.outbound import TransferTotals


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
