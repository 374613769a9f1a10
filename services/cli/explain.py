"""``flowpath explain``: where the time of one request went, and why it went there."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from common.errors import ConfigError
from common.telemetry.story import RequestScope, log_files, read_log_folder
from services.cli.explanation import Decision, Explanation, PhaseRow, Span, explain_request
from services.cli.terminal import grid, out

BAR_CELLS = 48
_PARTS = "▏▎▍▌▋▊▉█"
_COLOURS = {
    "place": "magenta",
    "queue": "yellow",
    "prefix": "blue",
    "load": "blue",
    "prefill": "cyan",
    "transfer": "blue",
    "decode_wait": "yellow",
    "decode": "green",
    "migration": "magenta",
    "resume": "red",
}


def show_explanation(log_dir: Path, request_id: str, *, as_json: bool) -> None:
    """Print what the log files say of a request. ConfigError when none of them names it."""
    found = explain(log_dir, request_id)
    if as_json:
        out().print(json.dumps(asdict(found), indent=2), markup=False)
        return
    for part in explanation_parts(found):
        out().print(part)


def explain(log_dir: Path, request_id: str) -> Explanation:
    """Explain a request; ``request_id`` may be an answer's ``id``."""
    files = log_files(log_dir)
    if not files:
        raise ConfigError(f"no log files in {log_dir}; set FLOWPATH_LOG_DIR or --log-dir")
    log = read_log_folder(log_dir)
    story = RequestScope(request_id).select(log) if request_id.strip() else ()
    if not story:
        names = ", ".join(file.name for file in files[:20])
        raise ConfigError(
            f"no line of {len(files)} log files in {log_dir} names request {request_id!r} (an "
            f"answer's id, or its x-request-id header); searched: {names}"
        )
    return explain_request(story, log)


def explanation_parts(found: Explanation) -> Iterator[Table | str]:
    """Yield what is printed for people: a head, the phases, the timeline, the decisions."""
    took = "" if found.seconds is None else f" in {_seconds(found.seconds)}"
    head = f"[bold]{escape(found.request_id)}[/]  {escape(found.outcome)}{took}"
    yield f"{head}  [dim]{found.began}[/]"
    yield ""
    yield _phases(found.phases)
    yield "[dim]as the programs measured; below, from line to line of the logs, waits included[/]"
    yield ""
    yield _timeline(found)
    yield ""
    yield _decided(found.decisions)


def _phases(rows: tuple[PhaseRow, ...]) -> Table:
    table = grid("phase", "worker")
    for name in ("time", "tokens", "bytes", "calls", "GB/s"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = (row.num_tokens, row.num_bytes, row.num_calls)
        cells = [f"{count:,}".replace(",", " ") if count else "" for count in counts]
        rate = "" if row.gigabytes_per_second is None else f"{row.gigabytes_per_second:.2f}"
        table.add_row(_name(row.name), escape(row.worker), _seconds(row.seconds), *cells, rate)
    return table


def _timeline(found: Explanation) -> Table:
    table = grid("", "", "", "start", "time")
    last = max([found.seconds or 0.0, *(span.end or span.start for span in found.spans)])
    for span in found.spans:
        length = "…" if span.end is None else _seconds(span.end - span.start)
        colour = _COLOURS.get(span.name, "default")
        mark = f"[{colour}]{bar(span, last)}[/]"
        table.add_row(_name(span.name), escape(span.worker), mark, _seconds(span.start), length)
    return table


def bar(span: Span, last: float) -> str:
    """Return a span as a bar on an axis of ``BAR_CELLS`` from 0 to ``last`` seconds."""
    scale = BAR_CELLS / last if last > 0 else 0.0
    start = min(int(span.start * scale), BAR_CELLS - 1)
    end = BAR_CELLS if span.end is None else min(span.end * scale, BAR_CELLS)
    eighths = max(1, round((end - start) * len(_PARTS)))
    whole, part = divmod(eighths, len(_PARTS))
    drawn = "█" * whole + (_PARTS[part - 1] if part else "")
    return f"{' ' * start}{drawn}".ljust(BAR_CELLS)


def _decided(decisions: tuple[Decision, ...]) -> Table:
    table = grid("at", "by", "decision", "why, and from what")
    for decision in decisions:
        inputs = " ".join(
            f"[dim]{escape(key)}=[/]{escape('-' if value is None else str(value))}"
            for key, value in decision.inputs
        )
        why = f"{escape(decision.reason)}  {inputs}" if decision.reason else inputs
        table.add_row(_seconds(decision.at), escape(decision.process), decision.event, why)
    return table


def _name(phase: str) -> str:
    return phase.replace("_", " ")


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms"
