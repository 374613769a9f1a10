"""structlog for one process: every line a JSON object with the same first keys.

``ts`` (ISO 8601, UTC, microseconds), ``process``, ``pid``, ``level``, ``event`` (a fact in
snake_case), then the facts: ``request_id``, ``transfer_id``, ``cause``, …. The standard library's
loggers (uvicorn, asyncio) end in the same file as ``library_log``.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from common.telemetry.log_file import LogFile
from common.telemetry.notices import Notices

_FIRST_KEYS = ("ts", "process", "pid", "level", "event")


def configure_logging(
    process: str, log_dir: Path, level: str, *, to_stderr: bool = False
) -> LogFile:
    """Send every ``structlog.get_logger()`` of this process to ``<log_dir>/<process>.jsonl``.

    Call it once, at the start. Lines under ``level`` (debug, info, warning, error) cost almost
    nothing. With ``to_stderr`` each line goes to standard error too, where containers keep their
    logs; without, it gets notices. Returns the file, which may be closed at the end. ConfigError
    when it cannot be opened.
    """
    file = LogFile(log_dir / f"{process}.jsonl")
    number = logging.getLevelNamesMapping()[level.upper()]
    # No locals: they would carry prompt texts.
    traces = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.ExceptionRenderer(traces),
        *([] if to_stderr else [Notices()]),
        _Stamp(process),
        _to_json,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=_Lines(file, to_stderr=to_stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [_ToStructlog()]
    root.setLevel(max(number, logging.WARNING))
    return file


class _Lines:
    """Makes the loggers at structlog's end; each writes whole lines to one file."""

    def __init__(self, file: LogFile, *, to_stderr: bool) -> None:
        self._file = file
        self._to_stderr = to_stderr

    def __call__(self, *_names: object) -> "_Lines":
        return self

    def msg(self, line: str) -> None:
        self._file.write(line)
        if self._to_stderr:
            sys.stderr.write(line.rstrip("\n") + "\n")

    debug = info = warning = error = critical = exception = msg


class _Stamp:
    """Puts the keys that every line has before the others."""

    def __init__(self, process: str) -> None:
        self._process = process

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        stamped: EventDict = {
            "ts": now,
            "process": self._process,
            "pid": os.getpid(),
            "level": event.get("level", "info"),
            "event": event.get("event", ""),
        }
        stamped.update((key, event[key]) for key in event if key not in _FIRST_KEYS)
        return stamped


class _ToStructlog(logging.Handler):
    """Takes the records of libraries over into our file."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno,
            "library_log",
            library=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info,
        )


def _to_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    return json.dumps(event, default=str, ensure_ascii=False, separators=(", ", ": "))
