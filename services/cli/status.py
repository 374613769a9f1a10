"""``flowpath status``: the cluster as the controller sees it."""

import asyncio
import json

from pydantic import TypeAdapter
from rich.table import Table

from common.config.settings import Settings
from common.errors import ConfigError
from common.messages.admin import StatusReport
from services.cli.admin import ask_status
from services.cli.terminal import out

DEADLINE_SECONDS = 3.0


def show_status(settings: Settings, *, as_json: bool) -> None:
    """Print the cluster's state. ConfigError when no controller answers in time."""
    report = asyncio.run(ask_status(settings, DEADLINE_SECONDS))
    if report is None:
        raise ConfigError(
            f"no controller answered at {settings.run_dir} within {DEADLINE_SECONDS:g} s; is "
            "`flowpath serve` running for this user, port and FLOWPATH_RUN_DIR?"
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
    state = "[green]ready[/]" if report.is_ready else f"[yellow]not ready[/]: {report.reason}"
    head = (
        f"{state}  model {report.model_name or '-'}  "
        f"{report.num_requests} requests  up {report.uptime_seconds:.0f} s"
    )
    workers = Table(
        "worker",
        "pid",
        "role",
        "state",
        "blocks",
        "free",
        "referenced",
        "cached",
        "in transfer",
        "waiting",
        "decoding",
        box=None,
        pad_edge=False,
    )
    for worker in report.workers:
        kv, load = worker.kv, worker.load
        counts = (kv.total, kv.free, kv.referenced, kv.cached, kv.in_transfer) if kv else ()
        loads = (load.num_waiting, load.num_decoding) if load else ()
        cells = [str(count) for count in counts] or ["-"] * 5
        cells += [str(count) for count in loads] or ["-"] * 2
        workers.add_row(worker.id, str(worker.pid), worker.role, worker.state, *cells)
    gateways = Table("gateway", "pid", "url", "streams", box=None, pad_edge=False)
    for gateway in report.gateways:
        gateways.add_row(gateway.id, str(gateway.pid), gateway.url, str(gateway.num_streams))
    return [head, workers, gateways]
