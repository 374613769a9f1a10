"""Files of one JSON value a line, read within bounds; a bad line is told and passed over."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

MAX_LINE_BYTES = 64 * 2**20
MAX_LINES = 1_000_000
MAX_BAD_LINES_TOLD = 5
MAX_TOKENS = 2**24
"""Of one request, whatever it is."""


class BadLineError(ValueError):
    """What is wrong with a line, by field; the reader adds the file and the line's number."""


@dataclass(slots=True)
class BadLines:
    """Lines that could not be used: how many, and the first of them in words."""

    count: int = 0
    examples: tuple[str, ...] = ()

    def add(self, path: Path, number: int, reason: str) -> None:
        """Note one."""
        self.count += 1
        if len(self.examples) < MAX_BAD_LINES_TOLD:
            self.examples = (*self.examples, f"{path.name}:{number}: {reason}")

    def told(self) -> str:
        """Return the first of them, one a line."""
        return "\n".join(self.examples)


def json_lines(path: Path, bad: BadLines) -> Iterator[tuple[int, object]]:
    """Yield (line number from 1, value) of every line that is JSON; empty lines are passed over.

    Lines past ``MAX_LINES`` and longer ones than ``MAX_LINE_BYTES`` are bad. ConfigError when the
    file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number in range(1, MAX_LINES + 2):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if number > MAX_LINES:
                    bad.add(path, number, f"the file has more than {MAX_LINES} lines")
                    return
                if len(line) > MAX_LINE_BYTES:
                    bad.add(path, number, f"longer than {MAX_LINE_BYTES} bytes")
                    _skip_rest(file.readline, line)
                elif line.strip():
                    try:
                        yield number, json.loads(line)
                    except RecursionError:
                        bad.add(path, number, "nested too deeply")
                    except ValueError as error:
                        bad.add(path, number, f"no JSON: {error}")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _skip_rest(read_line: Callable[[int], bytes], line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = read_line(MAX_LINE_BYTES)


def as_object(value: object, field: str) -> dict[str, object]:
    """Return a JSON object. BadLineError when it is none."""
    if not isinstance(value, dict):
        raise BadLineError(f"{field} is no object")
    return value


def as_list(value: object, field: str, max_items: int) -> list[object]:
    """Return a JSON list. BadLineError when it is none, or longer."""
    if not isinstance(value, list):
        raise BadLineError(f"{field} is no list")
    if len(value) > max_items:
        raise BadLineError(f"{field} has {len(value)} items, more than {max_items}")
    return value


def as_count(value: object, field: str, minimum: int, maximum: int = MAX_TOKENS) -> int:
    """Return a whole number. BadLineError when it is none, or out of range."""
    if type(value) is not int:
        raise BadLineError(f"{field} is no whole number")
    if not minimum <= value <= maximum:
        raise BadLineError(f"{field} is not from {minimum} to {maximum}")
    return value


def as_number(value: object, field: str) -> float:
    """Return a finite number of at least 0. BadLineError when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLineError(f"{field} is no number")
    if not math.isfinite(value) or value < 0:
        raise BadLineError(f"{field} is not a finite number of at least 0")
    return float(value)
