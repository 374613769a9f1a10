"""``flowpath logs``: the log files of all processes, merged by time."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.markup import escape

from common.errors import ConfigError
from common.telemetry.story import (
    LogEntry,
    RequestScope,
    log_files,
    open_log_files,
    parse_lines,
    read_log_folder,
)
from services.cli.terminal import out

POLL_SECONDS = 0.2
_COLOURS = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "red"}


def show_logs(log_dir: Path, request_id: str | None, *, follow: bool) -> None:
    """Print entries, oldest first; with ``follow`` also those that come, until interrupted.

    ``request_id`` may be an answer's ``id``. ConfigError when the folder has no log files, or none
    of them tells of the request.
    """
    if request_id is not None and not request_id.strip():
        raise ConfigError("--request is empty; it takes a request's id")
    if not follow and not log_files(log_dir):
        raise ConfigError(f"no log files in {log_dir}; set FLOWPATH_LOG_DIR or --log-dir")
    scope = None if request_id is None else RequestScope(request_id)
    tail = LogTail(log_dir, scope) if follow else None
    entries = read_log_folder(log_dir)
    if scope is not None:
        entries = scope.select(entries)
    if scope is not None and not entries and not follow:
        raise ConfigError(f"no log file in {log_dir} tells of request {request_id}")
    for entry in entries:
        out().print(format_entry(entry))
    if tail is not None:
        _follow(tail)


def format_entry(entry: LogEntry) -> str:
    """Return one entry as a line with rich's marks."""
    colour = _COLOURS.get(entry.level, "default")
    facts = " ".join(f"[dim]{escape(key)}=[/]{escape(_short(value))}" for key, value in entry.facts)
    time = entry.ts[11:26]
    return f"[dim]{time}[/] {escape(entry.process):<12} [{colour}]{escape(entry.event)}[/] {facts}"


class LogTail:
    """Reads what is appended to the log files of a folder from now on, rotated or not.

    With ``scope`` only what tells of its request.
    """

    def __init__(self, log_dir: Path, scope: RequestScope | None = None) -> None:
        self._log_dir = log_dir
        self._scope = scope
        self._places: dict[int, _Place] = {}
        for file in open_log_files(log_dir):
            with file:
                found = os.fstat(file.fileno())
                self._places[found.st_ino] = _Place(_age(file), found.st_size)

    def read_new(self) -> list[LogEntry]:
        """Return the entries that were appended since the last call, oldest first."""
        entries: list[LogEntry] = []
        for file in open_log_files(self._log_dir):
            with file:
                entries += parse_lines(self._new_lines(file))
        entries.sort(key=lambda entry: entry.ts)
        return entries if self._scope is None else list(self._scope.select(entries))

    def _new_lines(self, file: BinaryIO) -> Iterator[str]:
        """Yield whole lines; files are known by inode, for rotation renames them."""
        found, age = os.fstat(file.fileno()), _age(file)
        place = self._places.get(found.st_ino)
        if place is None or age < place.age or found.st_size < place.offset:
            place = _Place(age, 0)  # a new file, perhaps with the inode of one that was removed
        offset = place.offset
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            yield line.decode(errors="replace")
        self._places[found.st_ino] = _Place(age, offset)


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a file is read, and how old its name said that it is."""

    age: int
    offset: int


def _age(file: BinaryIO) -> int:
    return int(Path(file.name).suffix.removeprefix(".").removeprefix("jsonl") or 0)


def _follow(tail: LogTail) -> None:
    never = threading.Event()
    try:
        while not never.wait(POLL_SECONDS):
            for entry in tail.read_new():
                out().print(format_entry(entry))
    except KeyboardInterrupt:
        return


def _short(value: object, limit: int = 200) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
