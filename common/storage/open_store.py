"""Which store a URL names.

``none``
    No store.
``file:DIR?capacity=10GiB&queue=256MiB&depth=32&io=auto``
    A folder, of which all processes together use at most ``capacity``. ``queue`` bounds the memory
    of blocks that wait to be written; ``depth`` is how many files are read at a time; ``io`` is
    ``auto``, ``io_uring`` or ``threads``.
``redis://HOST:PORT/DB?queue=256MiB``
    A Redis server, whose own ``maxmemory`` is the bound; also ``rediss://`` and ``unix://``.
"""

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from common.config.sizes import parse_size
from common.errors import ConfigError
from common.kv.layout import PAGE_BYTES
from common.storage.file_store import FileOptions, FileStore
from common.storage.interface import BlockStore, NoStore, StoreIdentity
from common.storage.redis_store import RedisStore

DEFAULT_CAPACITY = "10GiB"
DEFAULT_QUEUE = "256MiB"
DEFAULT_DEPTH = "32"
_REDIS = ("redis", "rediss", "unix")


def open_store(url: str, identity: StoreIdentity) -> BlockStore:
    """Open the store; ConfigError where the URL or what it names is unusable."""
    if identity.block_bytes < 1 or identity.block_bytes % PAGE_BYTES:
        raise ConfigError(
            f"a store's blocks are multiples of {PAGE_BYTES} bytes: {identity.block_bytes}"
        )
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if url == "none":
        return NoStore(identity)
    if parts.scheme == "file" and parts.path and not parts.netloc:
        return FileStore(Path(unquote(parts.path)), identity, _file_options(url, options))
    if parts.scheme in _REDIS:
        queue_bytes = _size(url, "queue", options.pop("queue", DEFAULT_QUEUE))
        _refuse_unknown(url, options)
        return RedisStore(url.split("?", maxsplit=1)[0], identity, queue_bytes)
    raise ConfigError(f"--store {url}: say none, file:DIR or redis://HOST:PORT")


def _file_options(url: str, options: dict[str, str]) -> FileOptions:
    made = FileOptions(
        capacity_bytes=_size(url, "capacity", options.pop("capacity", DEFAULT_CAPACITY)),
        queue_bytes=_size(url, "queue", options.pop("queue", DEFAULT_QUEUE)),
        queue_depth=_size(url, "depth", options.pop("depth", DEFAULT_DEPTH)),
        io=options.pop("io", "auto"),
    )
    _refuse_unknown(url, options)
    return made


def _size(url: str, name: str, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"--store {url}: {name} {error}") from None


def _refuse_unknown(url: str, options: dict[str, str]) -> None:
    if options:
        raise ConfigError(f"--store {url}: there is no option {', '.join(sorted(options))}")
