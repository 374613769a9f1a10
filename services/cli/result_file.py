"""A file for results that take a while to come."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

from common.errors import ConfigError


@contextmanager
def result_file(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Open ``path`` before the work begins; what is yielded replaces its text at the end.

    What is in the file stays until then; a new one goes again when nothing was written. Without a
    path nothing is kept. ConfigError when the file cannot be written.
    """
    if path is None:
        yield lambda _: None
        return
    was_there = path.exists()
    is_written = False

    def write(text: str) -> None:
        nonlocal is_written
        with _writable(path, "w") as file:
            file.write(text)
        is_written = True

    _writable(path, "a").close()
    try:
        yield write
    finally:
        if not was_there and not is_written:
            path.unlink(missing_ok=True)


def _writable(path: Path, mode: Literal["a", "w"]) -> TextIO:
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
