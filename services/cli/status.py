"""``flowpath status``: the cluster as the controller sees it."""

import asyncio
import json
from collections.abc import Iterator

from pydantic import TypeAdapter
from rich.markup import escape
from rich.table import Table

from common.config.host import host_name
from common.config.settings import Settings
from common.errors import ConfigError
from common.messages.admin import StatusReport, WorkerStatus
from common.messages.fields import WorkerState
from services.cli.admin import ask_status
from services.cli.terminal import out

DEADLINE_SECONDS = 3.0


def show_status(settings: Settings, *, as_json: bool) -> None:
    """Print the cluster's state. ConfigError when no controller answers in time."""
    report = asyncio.run(ask_status(settings, DEADLINE_SECONDS))
    if report is None:
        raise ConfigError(
            f"no controller answered at {settings.run_dir} within {DEADLINE_SECONDS:g} s; is "
            "`flowpath serve` or `flowpath controller` running for this user, port and "
            "FLOWPATH_RUN_DIR? Of several hosts, run this on the controller's"
        )
    if as_json:
        out().print(status_json(report), markup=False)
        return
    for table in status_tables(report):
        out().print(table)


def status_json(report: StatusReport) -> str:
    """Return the report as JSON text."""
    return json.dumps(TypeAdapter(StatusReport).dump_python(report, mode="json"), indent=2)


def status_tables(report: StatusReport) -> list[Table | str]:
    """Return what is printed for people."""
    state = (
        "[green]ready[/]" if report.is_ready else f"[yellow]not ready[/]: {escape(report.reason)}"
    )
    if report.gateways and all(gateway.is_draining for gateway in report.gateways):
        state = "[yellow]draining[/]"
    head = (
        f"{state}  model {report.model_name or '-'}  "
        f"{report.num_requests} requests  up {report.uptime_seconds:.0f} s"
    )
    return [head, _workers(report), _gateways(report)]


def _workers(report: StatusReport) -> Table:
    names = ("worker", "host", "pid", "role", "state", "blocks", "free", "referenced", "cached")
    workers = Table(*names, "in transfer", "waiting", "decoding", "peers", box=None, pad_edge=False)
    for worker in report.workers:
        kv, load = worker.kv, worker.load
        counts = (kv.total, kv.free, kv.referenced, kv.cached, kv.in_transfer) if kv else ()
        loads = (load.num_waiting, load.num_decoding) if load else ()
        cells = [str(count) for count in counts] or ["-"] * 5
        cells += [str(count) for count in loads] or ["-"] * 2
        peers = "\n".join(_peers(worker, report)) or "-"
        who = (worker.id, escape(host_name(worker.host)), str(worker.pid), worker.role)
        workers.add_row(*who, worker.state, *cells, peers)
    return workers


def _peers(worker: WorkerStatus, report: StatusReport) -> Iterator[str]:
    """Tell, line by line, with whom a worker is paired and why not."""
    known = {(other.id, other.epoch): other for other in report.workers}
    for prefill in report.workers:
        for pair in prefill.pairs:
            decode = known.get((pair.worker_id, pair.epoch))
            if decode is None or worker not in (prefill, decode):
                continue
            other = prefill if worker is decode else decode
            if pair.reason:
                yield f"{other.id} [red]unpaired[/]: {escape(pair.reason)}"
            else:
                yield f"{other.id} {pair.transport or 'pairing'}"


def _gateways(report: StatusReport) -> Table:
    gateways = Table("gateway", "host", "pid", "state", "url", "streams", box=None, pad_edge=False)
    for gateway in report.gateways:
        who = (gateway.id, escape(host_name(gateway.host)), str(gateway.pid))
        state = WorkerState.DRAINING if gateway.is_draining else WorkerState.READY
        gateways.add_row(*who, state, gateway.url, str(gateway.num_streams))
    return gateways
