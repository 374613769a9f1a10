"""Opens the store that a URL names (``store_url`` says how)."""

from common.errors import ConfigError
from common.kv.layout import PAGE_BYTES
from common.storage.file_store import FileStore
from common.storage.interface import BlockStore, NoStore, StoreIdentity
from common.storage.redis_store import RedisStore
from common.storage.store_url import FileStoreUrl, RedisStoreUrl, parse_store_url


def open_store(url: str, identity: StoreIdentity) -> BlockStore:
    """Open the store; ConfigError where the URL or what it names is unusable."""
    if identity.block_bytes < 1 or identity.block_bytes % PAGE_BYTES:
        raise ConfigError(
            f"a store's blocks are multiples of {PAGE_BYTES} bytes: {identity.block_bytes}"
        )
    match parse_store_url(url):
        case FileStoreUrl(root, options):
            return FileStore(root, identity, options)
        case RedisStoreUrl(server, queue_bytes):
            return RedisStore(server, identity, queue_bytes)
        case None:
            return NoStore(identity)
