"""Which store a URL names. Nothing is opened.

``none``
    No store.
``file:DIR?capacity=10GiB&queue=256MiB&depth=32&io=auto``
    A folder, of which all processes together use at most ``capacity``. ``queue`` bounds the memory
    of blocks that wait to be written; ``depth`` is how many files are read at a time; ``io`` is
    ``auto``, ``io_uring`` or ``threads``.
``redis://HOST:PORT/DB?queue=256MiB``
    A Redis server, whose own ``maxmemory`` is the bound; also ``rediss://`` and ``unix://``.
"""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from common.config.sizes import parse_size
from common.errors import ConfigError

DEFAULT_CAPACITY = "10GiB"
DEFAULT_QUEUE = "256MiB"
DEFAULT_DEPTH = "32"
MAX_QUEUE_DEPTH = 1024
IOS = ("auto", "io_uring", "threads")
_REDIS = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How a ``file:`` store works. ``io`` is one of ``IOS``."""

    capacity_bytes: int
    queue_bytes: int
    queue_depth: int
    io: str = "auto"


@dataclass(frozen=True, slots=True)
class FileStoreUrl:
    """A folder."""

    root: Path
    options: FileOptions


@dataclass(frozen=True, slots=True)
class RedisStoreUrl:
    """A server; ``url`` is without FlowPath's own options."""

    url: str
    queue_bytes: int


def parse_store_url(url: str) -> FileStoreUrl | RedisStoreUrl | None:
    """Return what a URL names, None for ``none``; ConfigError where it says nothing of use."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if url == "none":
        return None
    if parts.scheme == "file" and parts.path and not parts.netloc:
        return FileStoreUrl(Path(unquote(parts.path)), _file_options(url, options))
    if parts.scheme in _REDIS:
        queue_bytes = _size(url, "queue", options.pop("queue", DEFAULT_QUEUE))
        _refuse_unknown(url, options)
        return RedisStoreUrl(url.split("?", maxsplit=1)[0], queue_bytes)
    raise ConfigError(f"--store {url}: say none, file:DIR or redis://HOST:PORT")


def _file_options(url: str, options: dict[str, str]) -> FileOptions:
    made = FileOptions(
        capacity_bytes=_size(url, "capacity", options.pop("capacity", DEFAULT_CAPACITY)),
        queue_bytes=_size(url, "queue", options.pop("queue", DEFAULT_QUEUE)),
        queue_depth=_size(url, "depth", options.pop("depth", DEFAULT_DEPTH)),
        io=options.pop("io", "auto"),
    )
    _refuse_unknown(url, options)
    if made.io not in IOS:
        raise ConfigError(f"--store {url}: io is neither io_uring nor threads nor auto")
    if not 1 <= made.queue_depth <= MAX_QUEUE_DEPTH:
        raise ConfigError(f"--store {url}: depth is 1 to {MAX_QUEUE_DEPTH}")
    return made


def _size(url: str, name: str, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"--store {url}: {name} {error}") from None


def _refuse_unknown(url: str, options: dict[str, str]) -> None:
    if options:
        raise ConfigError(f"--store {url}: there is no option {', '.join(sorted(options))}")
