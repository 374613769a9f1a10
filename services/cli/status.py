"""``flowpath status``: the cluster as the controller sees it."""

import asyncio
import json
from collections.abc import Iterator

from pydantic import TypeAdapter
from rich.markup import escape
from rich.table import Table

from common.config.host import host_name
from common.config.settings import Settings
from common.messages.admin import StatusReport, WorkerStatus
from common.messages.fields import WorkerState
from services.cli.admin import need_status
from services.cli.terminal import grid, out


def show_status(settings: Settings, *, as_json: bool) -> None:
    """Print the cluster's state. ConfigError when no controller answers in time."""
    report = asyncio.run(need_status(settings))
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
    scheduling = (
        f"policy {report.policy}  roles {report.role_control}  load {escape(report.scenario)}"
    )
    return [head, scheduling, _workers(report), _loads(report), _gateways(report)]


def _workers(report: StatusReport) -> Table:
    names = ("worker", "host", "pid", "role", "state", "blocks", "free", "referenced", "cached")
    workers = grid(*names, "in transfer", "peers")
    for worker in report.workers:
        kv = worker.kv
        counts = (kv.total, kv.free, kv.referenced, kv.cached, kv.in_transfer) if kv else ()
        cells = [str(count) for count in counts] or ["-"] * 5
        peers = "\n".join(dict.fromkeys(_peers(worker, report))) or "-"
        role = f"{worker.role} (switching)" if worker.is_switching else worker.role
        who = (worker.id, escape(host_name(worker.host)), str(worker.pid), role)
        workers.add_row(*who, worker.state, *cells, peers)
    return workers


def _loads(report: StatusReport) -> Table:
    queues = ("waiting", "prefill", "sending", "receiving", "decoding", "swapped")
    rates = ("prefill tok/s", "decode tok/s", "ms/token")
    loads = grid("worker", "mode", *queues, "uncomputed", *rates)
    for worker in report.workers:
        cells = (*_load_cells(worker), *_rate_cells(worker))
        loads.add_row(worker.id, worker.mode.replace("_", "-"), *cells)
    return loads


def _load_cells(worker: WorkerStatus) -> list[str]:
    load = worker.load
    if load is None:
        return ["-"] * 7
    counts = (
        *(load.num_waiting, load.num_prefilling, load.num_sending, load.num_receiving),
        *(load.num_decoding, load.num_swapped, load.uncomputed_tokens),
    )
    return [str(count) for count in counts]


def _rate_cells(worker: WorkerStatus) -> list[str]:
    """Return the measured rates; a dash where nothing was measured yet."""
    rates = worker.rates
    if rates is None:
        return ["-"] * 3
    measured = (
        (rates.prefill_tokens_per_second, 0),
        (rates.decode_tokens_per_second, 0),
        (rates.decode_step_seconds * 1000, 1),
    )
    return [f"{value:.{digits}f}" if value else "-" for value, digits in measured]


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
    gateways = grid("gateway", "host", "pid", "state", "url", "streams")
    for gateway in report.gateways:
        who = (gateway.id, escape(host_name(gateway.host)), str(gateway.pid))
        state = WorkerState.DRAINING if gateway.is_draining else WorkerState.READY
        gateways.add_row(*who, state, gateway.url, str(gateway.num_streams))
    return gateways
