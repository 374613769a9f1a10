"""``flowpath logs``: the log files of all processes, merged by time."""

import threading
from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape

from common.errors import ConfigError
from common.telemetry.story import (
    LogEntry,
    log_files,
    parse_line,
    read_log_folder,
    request_story,
)
from services.cli.terminal import out

POLL_SECONDS = 0.2
_COLOURS = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "red"}


def show_logs(log_dir: Path, request_id: str | None, *, follow: bool) -> None:
    """Print entries, oldest first; with ``follow`` also those that come, until interrupted.

    ConfigError when the folder has no log files, or none of them tells of the request.
    """
    if not follow and not log_files(log_dir):
        raise ConfigError(f"no log files in {log_dir}; set FLOWPATH_LOG_DIR or --log-dir")
    tail = LogTail(log_dir, request_id) if follow else None
    entries = request_story(log_dir, request_id) if request_id else read_log_folder(log_dir)
    if request_id and not entries and not follow:
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
    """Reads what is appended to the log files of a folder from now on."""

    def __init__(self, log_dir: Path, request_id: str | None = None) -> None:
        self._log_dir = log_dir
        self._request_id = request_id
        self._transfers: set[object] = set()
        self._places = {
            file: (file.stat().st_ino, file.stat().st_size) for file in log_dir.glob("*.jsonl")
        }

    def read_new(self) -> list[LogEntry]:
        """Return the entries that were appended since the last call, oldest first."""
        entries = [
            entry
            for file in sorted(self._log_dir.glob("*.jsonl"))
            for line in self._new_lines(file)
            if (entry := parse_line(line)) is not None
        ]
        return [entry for entry in sorted(entries, key=lambda e: e.ts) if self._belongs(entry)]

    def _belongs(self, entry: LogEntry) -> bool:
        transfer = entry.fact("transfer_id")
        if self._request_id is None:
            return True
        if entry.fact("request_id") == self._request_id:
            if transfer is not None:
                self._transfers.add(transfer)
            return True
        return transfer is not None and transfer in self._transfers

    def _new_lines(self, file: Path) -> Iterator[str]:
        found = file.stat()
        inode, offset = self._places.get(file, (found.st_ino, 0))
        if inode != found.st_ino:  # rotated: the new file is read from its start
            offset = 0
        with file.open("rb") as opened:
            opened.seek(offset)
            for line in opened:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                yield line.decode(errors="replace")
        self._places[file] = (found.st_ino, offset)


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
