"""Opens the store of KV blocks for a worker whose pool it fits."""

from common.config.settings import Settings
from common.errors import ConfigError
from common.kv.pool import KVPool
from common.storage.interface import BlockStore, NoStore, StoreIdentity
from common.storage.open_store import open_store
from common.worker.machine import Machine


def open_worker_store(settings: Settings, machine: Machine) -> BlockStore:
    """Return the store that the settings name, which knows the pool; ``NoStore`` for none.

    ConfigError when it cannot be used, or the pool is not in this process's host memory: blocks go
    from there to the store and back without a detour.
    """
    layout, pool = machine.layout, machine.pool
    identity = StoreIdentity(
        model_fingerprint=machine.model_fingerprint,
        layout_fingerprint=layout.fingerprint(),
        dtype=layout.element_dtype,
        block_bytes=layout.block_bytes,
    )
    if not settings.has_store:
        return NoStore(identity)
    if not isinstance(pool, KVPool):
        raise ConfigError(
            f"--store {settings.store}: a store is for workers on a CPU whose pool is in one piece,"
            f" and this one's is a {type(pool).__name__}; --store none serves without a store"
        )
    try:
        store = open_store(settings.store, identity)
    except ConfigError as error:
        raise ConfigError(f"{error}; --store none serves without a store") from error
    store.register([pool.buffer])
    return store
