"""``flowpath bench serve``: loads a running OpenAI-compatible server and measures it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.telemetry.story import read_log_folder
from services.cli.bench_serve_client import RequestRecord, Target
from services.cli.bench_serve_load import Arrival, Workload
from services.cli.bench_serve_report import Slo, Summary, summarize
from services.cli.result_file import result_file
from services.cli.terminal import out

EXIT_INCOMPLETE = 1
WARMUP_CONCURRENCY = 4


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Where a run goes and how it is told.

    ``model`` empty asks the server. ``log_dir`` is the folder of the server's log files where it
    is at hand: the time of each handoff stands there.
    """

    url: str
    workload: Workload
    slo: Slo
    num_warmup: int
    timeout_seconds: float
    model: str = ""
    api_key: str | None = None
    log_dir: Path | None = None
    json_file: Path | None = None


def main(options: BenchOptions) -> int:
    """Run, print the table, write the file; return the exit code: 1 when a completion is missing.

    ConfigError when the server does not answer at all, or the file cannot be written.
    """
    with result_file(options.json_file) as keep:
        summary, model = asyncio.run(_run(options))
        out().print(_table(options, model, summary))
        for kind, texts in summary.failure_examples.items():
            for text in filter(None, texts):
                out().print(escape(f"  {kind}: {text}"))
        document = {"options": _told(options, model), **summary.document()}
        keep(json.dumps(document, indent=2) + "\n")
    return 0 if summary.is_whole else EXIT_INCOMPLETE


async def _run(options: BenchOptions) -> tuple[Summary, str]:
    target = Target(options.url, options.api_key)
    model = options.model or await target.model()
    workload = options.workload

    async def ask(index: int) -> RequestRecord:
        body = workload.body(model, index)
        return await target.complete(index, workload.path, body, options.timeout_seconds)

    async with progress("warm-up", options.num_warmup) as step:
        await _closed(
            _told_to(step, ask), [-1 - n for n in range(options.num_warmup)], WARMUP_CONCURRENCY
        )
    async with progress(str(workload.arrival), workload.num_requests) as step:
        asking = _told_to(step, ask)
        if workload.arrival is Arrival.CLOSED:
            indices = list(range(workload.num_requests))
            records = await _closed(asking, indices, workload.concurrency)
        else:
            records = await _open(asking, workload)
    handoffs = _handoff_seconds(options.log_dir, records)
    return summarize(records, workload.num_requests, options.slo, handoffs), model


Ask = Callable[[int], Awaitable[RequestRecord]]


def _told_to(step: Callable[[], None], ask: Ask) -> Ask:
    async def ask_and_tell(index: int) -> RequestRecord:
        record = await ask(index)
        step()
        return record

    return ask_and_tell


async def _closed(ask: Ask, indices: Sequence[int], concurrency: int) -> list[RequestRecord]:
    """Keep ``concurrency`` requests open until all are done."""
    waiting = list(reversed(indices))
    records: list[RequestRecord] = []

    async def client() -> None:
        while waiting:
            records.append(await ask(waiting.pop()))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(indices))):
            tasks.create_task(client())
    return records


async def _open(ask: Ask, workload: Workload) -> list[RequestRecord]:
    """Send each request at its time, whatever became of the others."""
    started = perf_counter()
    async with asyncio.TaskGroup() as tasks:
        asked = []
        for index, start in enumerate(workload.start_seconds()):
            await asyncio.sleep(max(0.0, started + start - perf_counter()))
            asked.append(tasks.create_task(_awaited(ask(index))))
    return [task.result() for task in asked]


async def _awaited(record: Awaitable[RequestRecord]) -> RequestRecord:
    return await record


@asynccontextmanager
async def progress(name: str, total: int) -> AsyncIterator[Callable[[], None]]:
    """Show how far the run is, on standard error where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, emoji=False)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def _handoff_seconds(log_dir: Path | None, records: Sequence[RequestRecord]) -> list[float]:
    """Return the time from the prefill's end to the decode side's start, of each that had one."""
    if log_dir is None or not log_dir.is_dir():
        return []
    ids = {record.request_id for record in records if record.request_id}
    return [
        float(str(entry.fact("seconds_since_prefill")))
        for entry in read_log_folder(log_dir)
        if entry.event == "handoff_accepted" and entry.fact("request_id") in ids
    ]


def _told(options: BenchOptions, model: str) -> dict[str, object]:
    workload = options.workload
    told: dict[str, object] = {
        "url": options.url,
        "model": model,
        "path": workload.path,
        "arrival": str(workload.arrival),
        "num_requests": workload.num_requests,
        "num_warmup": options.num_warmup,
        "input_tokens": workload.input_tokens,
        "output_tokens": workload.output_tokens,
        "prompt_kind": str(workload.prompt_kind),
        "ignore_eos": workload.is_ignoring_eos,
        "temperature": workload.temperature,
        "seed": workload.seed,
        "slo_ttft_ms": options.slo.ttft_ms,
        "slo_tpot_ms": options.slo.tpot_ms,
    }
    match workload.arrival:
        case Arrival.POISSON:
            told["rate"] = workload.rate
        case Arrival.BURST:
            told.update(burst=workload.burst, burst_seconds=workload.burst_seconds)
        case Arrival.CLOSED:
            told["concurrency"] = workload.concurrency
    return told


def _table(options: BenchOptions, model: str, summary: Summary) -> Table:
    workload = options.workload
    title = (
        f"{escape(model)} at {escape(options.url)}: {workload.num_requests} requests, "
        f"{workload.arrival}, {workload.input_tokens} in, {workload.output_tokens} out"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "p50", "p90", "p99", "mean"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in summary.latencies_ms.items():
        cells = (
            [f"{values[share]:.2f}" for share in ("p50", "p90", "p99", "mean")] if values else []
        )
        table.add_row(f"{name} (ms)", *(cells or ["-"] * 4))
    table.add_section()
    table.add_row("complete", f"{summary.num_complete} of {summary.num_requests}")
    table.add_row("seconds", f"{summary.seconds:.2f}")
    prompts = max(1, summary.num_prompt_tokens)
    table.add_row("cached prompt tokens", f"{100 * summary.num_cached_tokens / prompts:.1f} %")
    for name, rate in summary.throughput().items():
        table.add_row(name.replace("_per_second", "/s").replace("_", " "), f"{rate:.2f}")
    for kind, count in summary.failures.items():
        table.add_row(f"failed: {kind}", str(count))
    return table
