"""Opens the store of KV blocks for a worker whose pool it fits."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from common.config.settings import Settings
from common.errors import ConfigError
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.storage.codec_fp8 import FP8, Fp8Codec
from common.storage.codec_stage import CodecStage
from common.storage.host_tier import HostTier
from common.storage.interface import NO_CODEC, StoreIdentity
from common.storage.open_store import open_store
from common.transfer.ranks import RankedPool
from common.worker.host_memory import HostedPool, HostMemory, host_block_bytes
from common.worker.machine import Machine
from common.worker.store_buffer import StoreBuffer
from common.worker.store_paths import PlacedTier
from common.worker.worker_store import WorkerStore


@contextmanager
def worker_store(settings: Settings, machine: Machine) -> Iterator[WorkerStore | None]:
    """Have the store that the settings name as long as the block; None for none.

    ConfigError when it or its host memory cannot be had, or the pool is of no kind that blocks
    can be kept of.
    """
    if not settings.has_store:
        yield None
        return
    with closing(open_worker_store(settings, machine)) as store:
        yield store


def open_worker_store(settings: Settings, machine: Machine) -> WorkerStore:
    """Return the store, which knows the pool (see ``worker_store``)."""
    layout, pool = machine.layout, machine.pool
    if not isinstance(pool, KVPool | DevicePool | RankedPool):
        raise ConfigError(
            f"--store {settings.store}: there is no way from a store to a"
            f" {type(pool).__name__}, which this worker's pool is; --store none serves without one"
        )
    stage = _open_stage(settings.store_codec, layout)
    identity = StoreIdentity(
        model_fingerprint=machine.model_fingerprint,
        layout_fingerprint=layout.fingerprint(),
        dtype=layout.element_dtype,
        block_bytes=layout.block_bytes if stage is None else stage.codec.encoded_bytes,
        codec=settings.store_codec,
    )
    with ExitStack() as undo:
        tier = _open_tier(settings.host_tier_bytes, pool)
        if tier is not None:
            undo.callback(tier.memory.close)
        buffer = _open_buffer(settings, pool)
        if buffer is not None:
            undo.callback(buffer.memory.close)
        try:
            store = open_store(settings.store, identity)
        except ConfigError as error:
            raise ConfigError(f"{error}; --store none serves without a store") from error
        undo.pop_all()
    opened = WorkerStore(store, pool, tier, buffer, stage)
    store.register([opened.read_memory])
    return opened


def _open_stage(codec: str, layout: KVLayout) -> CodecStage | None:
    """Return what encodes and decodes; None where blocks are stored as they are."""
    if codec == NO_CODEC:
        return None
    assert codec == FP8, f"there is no codec {codec}"
    if layout.is_quantised:
        raise ConfigError(
            f"store_codec {codec}: the pool's KV is {layout.element_dtype} already (kv_cache_dtype)"
            " and is stored as it is; leave store_codec at none"
        )
    return CodecStage(Fp8Codec(layout))


def _open_tier(num_bytes: int, pool: HostedPool) -> PlacedTier | None:
    if not num_bytes:
        return None
    memory = HostMemory(pool, num_bytes, "host_tier_bytes")
    return PlacedTier(HostTier(memory.buffer, host_block_bytes(pool)), memory)


def _open_buffer(settings: Settings, pool: HostedPool) -> StoreBuffer | None:
    """Return the buffer that blocks pass; None where storage reads into the pool itself."""
    if settings.store_path == "direct" and isinstance(pool, KVPool):
        return None
    return StoreBuffer(HostMemory(pool, settings.store_buffer_bytes, "store_buffer_bytes"))
