"""The ordered story of one request, rebuilt from the log files of all processes."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_CHARS = 1_000_000


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One log line. ``ts`` is ISO 8601 in UTC, so that entries order as their texts do.

    ``facts`` are the line's other keys in its own order; a value that is no string, number,
    boolean or null is JSON text.
    """

    ts: str
    process: str
    pid: int
    level: str
    event: str
    facts: tuple[tuple[str, str | int | float | bool | None], ...]

    def fact(self, name: str) -> str | int | float | bool | None:
        """Return one fact, or None when the line does not have it."""
        return next((value for key, value in self.facts if key == name), None)


def request_story(log_dir: Path, request_id: str) -> tuple[LogEntry, ...]:
    """Return what all processes logged about one request, oldest first.

    That is every line with its ``request_id``, and every line with a ``transfer_id`` that some
    line names together with it. Lines that are no log lines are passed over.
    """
    entries = read_log_folder(log_dir)
    transfers = {
        transfer
        for entry in entries
        if entry.fact("request_id") == request_id
        and (transfer := entry.fact("transfer_id")) is not None
    }
    return tuple(
        entry
        for entry in entries
        if entry.fact("request_id") == request_id or entry.fact("transfer_id") in transfers
    )


def read_log_folder(log_dir: Path) -> tuple[LogEntry, ...]:
    """Return all entries of a folder, rotated files included, oldest first."""
    entries = [entry for file in log_files(log_dir) for entry in _read_file(file)]
    return tuple(sorted(entries, key=lambda entry: entry.ts))  # stable: a file's own order stays


def log_files(log_dir: Path) -> tuple[Path, ...]:
    """Return the log files of a folder; of one process the oldest first."""

    def age(file: Path) -> tuple[str, int]:
        stem, _, number = file.name.partition(".jsonl")
        return stem, -int(number.removeprefix(".") or 0)

    found = [*log_dir.glob("*.jsonl"), *log_dir.glob("*.jsonl.[0-9]")]
    return tuple(sorted(found, key=age))


def parse_lines(lines: Iterable[str]) -> Iterator[LogEntry]:
    """Yield the entries of lines; one that is no log line is passed over."""
    for line in lines:
        if (entry := parse_line(line)) is not None:
            yield entry


def parse_line(line: str) -> LogEntry | None:
    """Return one line's entry, or None when it is no log line (cut by a crash, say)."""
    if len(line) > MAX_LINE_CHARS:
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("ts"), str):
        return None
    head = ("ts", "process", "pid", "level", "event")
    facts = tuple((str(key), _plain(value)) for key, value in found.items() if key not in head)
    pid = found.get("pid")
    return LogEntry(
        ts=found["ts"],
        process=str(found.get("process", "")),
        pid=pid if isinstance(pid, int) else 0,
        level=str(found.get("level", "")),
        event=str(found.get("event", "")),
        facts=facts,
    )


def _read_file(file: Path) -> Iterator[LogEntry]:
    with file.open(errors="replace") as lines:
        yield from parse_lines(lines)


def _plain(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, ensure_ascii=False)
