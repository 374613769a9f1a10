"""The ordered story of one request, rebuilt from the log files of all processes."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAX_LINE_CHARS = 1_000_000
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")
"""What an answer's ``id`` has before the request's."""


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

    ``request_id`` may be an answer's ``id``. Lines that are no log lines are passed over.
    """
    return RequestScope(request_id).select(read_log_folder(log_dir))


class RequestScope:
    """Which entries tell of one request.

    Those with its ``request_id``, that of one of its prompts (``prompt_request_id``) or of a
    request that went on where one of them was lost (``resumed_request_id``), and those with a
    ``transfer_id`` that one of them names. ``request_id`` may be an answer's ``id``, which is the
    request's behind a prefix.
    """

    def __init__(self, request_id: str) -> None:
        for prefix in _ANSWER_PREFIXES:
            request_id = request_id.removeprefix(prefix)
        self._requests: set[object] = {request_id}
        self._transfers: set[object] = set()

    def select(self, entries: Iterable[LogEntry]) -> tuple[LogEntry, ...]:
        """Return those of ``entries`` that belong; later calls know what these have named."""
        found = tuple(entries)
        # The clocks of several hosts may put what names an id behind what has it.
        for entry in found:
            self._learn(entry, "prompt_request_id", self._requests)
        for entry in found:  # it names the first one, however often it was resumed
            self._learn(entry, "resumed_request_id", self._requests)
        for entry in found:
            self._learn(entry, "transfer_id", self._transfers)
        return tuple(
            entry
            for entry in found
            if entry.fact("request_id") in self._requests
            or entry.fact("transfer_id") in self._transfers
        )

    def _learn(self, entry: LogEntry, name: str, known: set[object]) -> None:
        if entry.fact("request_id") in self._requests and entry.fact(name) is not None:
            known.add(entry.fact(name))


def read_log_folder(log_dir: Path) -> tuple[LogEntry, ...]:
    """Return all entries of a folder, rotated files included, oldest first."""
    with ExitStack() as stack:
        # All are opened before one is read: a rotation meanwhile renames them, no more.
        opened = [stack.enter_context(file) for file in open_log_files(log_dir)]
        entries = [
            entry
            for file in opened
            for entry in parse_lines(line.decode(errors="replace") for line in file)
        ]
    return tuple(sorted(entries, key=lambda entry: entry.ts))  # stable: a file's own order stays


def open_log_files(log_dir: Path) -> Iterator[BinaryIO]:
    """Open the log files of a folder, each once, of one process the oldest first.

    One that is rotated away in this moment may be left out.
    """
    seen: set[int] = set()
    for path in log_files(log_dir):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            continue
        inode = os.fstat(file.fileno()).st_ino
        if inode in seen:
            file.close()
            continue
        seen.add(inode)
        yield file


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


def _plain(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, ensure_ascii=False)
