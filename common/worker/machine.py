"""What a worker is made of and keeps for its whole life: model, KV pool, engine."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import structlog
import torch

from common.config.settings import Settings
from common.engine.cpu_engine import CpuEngine
from common.engine.dtype import load_model_layout, resolve_dtype
from common.engine.interface import Engine
from common.engine.layerwise.cpu import LayerwiseCpuEngine
from common.engine.layerwise.stream import ring_layout
from common.engine.parallel.cpu import build_on_cpu
from common.engine.parallel.engine import ParallelEngine, PreparedT
from common.engine.parallel.meeting import layout_of
from common.engine.parallel.messages import EngineSettings
from common.engine.weights import read_kv_scales
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.kv.pool import BlockPool, KVPool
from common.messages.fields import Role
from common.models.config import ModelConfig
from common.models.default_model import ensure_default_model
from common.telemetry.progress import Progress
from common.transfer.ranks import RankedPool
from common.transfer.ranks_transport import join_ranks
from common.worker.devices import GpuPlace, gpu_pool_bytes, place_worker
from common.worker.host_blocks import HostBlocks, open_host_blocks

if TYPE_CHECKING:
    from common.engine.cuda.model import CudaModel
    from common.kv.device_pool import DevicePool

log = structlog.get_logger()

CPU_KV_BYTES = 2**30
CPU_BATCHED_TOKENS = 512
CPU_SEQS = 64
GPU_BATCHED_TOKENS = 8192
GPU_CHUNK_TOKENS = 4096
"""Steps of separate prefill workers: a chunk's blocks leave while the next one computes."""
GPU_SEQS = 256


@runtime_checkable
class ClosableEngine(Protocol):
    """An engine with processes, threads or memory beside the pool."""

    def close(self) -> None:
        """End and let go of them; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Machine:
    """What outlives an incarnation.

    ``devices`` are the UUIDs of the GPUs that it computes on, none for the CPU.
    ``max_num_batched_tokens`` and ``max_num_seqs`` bound a step.
    """

    config: ModelConfig
    model_fingerprint: str
    layout: KVLayout
    pool: BlockPool
    engine: Engine
    host_blocks: HostBlocks
    max_num_batched_tokens: int
    max_num_seqs: int
    devices: tuple[str, ...] = ()

    def why_broken(self) -> str | None:
        """Return why the engine computes nothing any more; None while it does."""
        return self.engine.broken if isinstance(self.engine, ParallelEngine) else None

    def give_up_step(self, reason: str) -> None:
        """Let whoever waits for a step go on, where the engine can be broken off."""
        if isinstance(self.engine, ParallelEngine):
            self.engine.give_up(reason)

    def close(self) -> None:
        """End the engine's other processes and threads, where there are any."""
        if isinstance(self.engine, ClosableEngine):
            self.engine.close()


def build_machine(settings: Settings, worker_id: str, role: Role) -> Machine:
    """Load the model and make pool and engine on the worker's device.

    ``role`` is the one that it begins with. ConfigError when settings, model or memory do not allow
    it.
    """
    started = monotonic()
    config = ModelConfig.load(Path(settings.model) if settings.model else _default_model(settings))
    place = place_worker(settings, worker_id, _num_gpus(settings))
    if place is None:
        machine = _build_on_cpu(settings, config, role)
    else:
        machine = replace(
            _build_on_gpu(settings, config, place, role), devices=_device_uuids(place)
        )
    log.info(
        "worker_built",
        model=str(config.folder),
        devices=["cpu"] if place is None else [f"cuda:{n}" for n in place.device_indices],
        num_ranks=settings.tensor_parallel,
        dtype=machine.layout.dtype,
        kv_cache_dtype=machine.layout.element_dtype,
        num_blocks=machine.pool.num_blocks,
        num_host_blocks=machine.host_blocks.num_slots,
        num_ring_blocks=getattr(machine.engine, "num_places", 0),
        block_bytes=machine.layout.block_bytes,
        threads=settings.num_threads,
        seconds=round(monotonic() - started, 3),
        worker=worker_id,
    )
    return machine


def _device_uuids(place: GpuPlace) -> tuple[str, ...]:
    # What needs CUDA is not imported on a machine without it.
    from common.cuda.cupy_driver import cuda_driver  # noqa: PLC0415

    return tuple(cuda_driver().device_uuid(index) for index in place.device_indices)


def _build_on_cpu(settings: Settings, config: ModelConfig, role: Role) -> Machine:
    if settings.kv_cache_dtype != "auto":
        raise ConfigError(f"kv_cache_dtype {settings.kv_cache_dtype} needs a GPU; a CPU takes auto")
    has_weights = settings.has_weights
    layout = load_model_layout(config, resolve_dtype(settings.dtype), settings.block_size)
    num_blocks = _num_blocks(settings.kv_bytes or CPU_KV_BYTES, layout)
    if settings.tensor_parallel > 1:
        return _build_ranks_on_cpu(settings, config, layout, num_blocks)
    pool = KVPool(num_blocks, layout.block_bytes)
    return Machine(
        config=config,
        model_fingerprint=config.fingerprint(has_weights=has_weights),
        layout=layout,
        pool=pool,
        engine=_cpu_engine(settings, config, layout, pool, role),
        host_blocks=open_host_blocks(pool, settings.swap_bytes),
        max_num_batched_tokens=settings.max_num_batched_tokens or CPU_BATCHED_TOKENS,
        max_num_seqs=settings.max_num_seqs or CPU_SEQS,
    )


def _cpu_engine(
    settings: Settings, config: ModelConfig, layout: KVLayout, pool: KVPool, role: Role
) -> Engine:
    has_weights = settings.has_weights
    if not settings.layer_ring or role is not Role.PREFILL:
        return CpuEngine(
            config.folder, layout, pool.buffer, settings.num_threads, has_weights=has_weights
        )
    return LayerwiseCpuEngine(
        *(config.folder, layout, pool.buffer, settings.num_threads),
        num_places=_num_places(settings, config, layout),
        has_weights=has_weights,
    )


def _num_places(settings: Settings, config: ModelConfig, layout: KVLayout) -> int:
    """Return how many blocks the ring of two layers holds; ConfigError where that is too few."""
    num_places = settings.layer_ring // ring_layout(layout).block_bytes
    num_tokens = num_places * layout.block_size
    longest = min(settings.max_model_len or config.max_model_len, config.max_model_len)
    if num_tokens < longest:
        needed = layout.num_blocks_for(longest) * ring_layout(layout).block_bytes
        raise ConfigError(
            f"layer_ring {settings.layer_ring} holds {num_tokens} tokens, but requests may have"
            f" {longest} (max_model_len): that takes {needed} bytes"
        )
    return num_places


def _build_ranks_on_cpu(
    settings: Settings, config: ModelConfig, layout: KVLayout, num_blocks: int
) -> Machine:
    ranks = EngineSettings(
        folder=str(config.folder),
        num_ranks=settings.tensor_parallel,
        engine="cpu",
        dtype=layout.dtype,
        block_size=settings.block_size,
        has_weights=settings.has_weights,
        num_threads=settings.num_threads,
    )
    own = KVPool(num_blocks, layout_of(ranks).block_bytes)
    engine = build_on_cpu(ranks, own)
    pool, host_blocks = _join_ranks(settings, layout, own, engine)
    return Machine(
        config=config,
        model_fingerprint=config.fingerprint(has_weights=settings.has_weights),
        layout=layout,
        pool=pool,
        engine=engine,
        host_blocks=host_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens or CPU_BATCHED_TOKENS,
        max_num_seqs=settings.max_num_seqs or CPU_SEQS,
    )


def _build_on_gpu(settings: Settings, config: ModelConfig, place: GpuPlace, role: Role) -> Machine:
    # What needs CUDA is not imported on a machine without it.
    from common.engine.cuda.engine import CudaEngine  # noqa: PLC0415
    from common.engine.cuda.memory import activation_bytes  # noqa: PLC0415
    from common.engine.cuda.model import CudaModel  # noqa: PLC0415
    from common.kv.device_pool import DevicePool  # noqa: PLC0415

    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    kv_cache_dtype = settings.kv_cache_dtype
    has_scales = kv_cache_dtype != "auto" and settings.has_weights
    layout = load_model_layout(
        config,
        dtype,
        settings.block_size,
        kv_cache_dtype,
        read_kv_scales(config) if has_scales else (),
    )
    usual_tokens = GPU_BATCHED_TOKENS if settings.combined else GPU_CHUNK_TOKENS
    max_num_batched_tokens = settings.max_num_batched_tokens or usual_tokens
    max_num_seqs = settings.max_num_seqs or GPU_SEQS
    if settings.tensor_parallel > 1:
        return _build_ranks_on_gpus(
            settings,
            config,
            layout,
            place,
            EngineSettings(
                folder=str(config.folder),
                num_ranks=settings.tensor_parallel,
                engine="cuda",
                devices=tuple(f"cuda:{index}" for index in place.device_indices),
                dtype=dtype,
                block_size=settings.block_size,
                kv_cache_dtype=kv_cache_dtype,
                scales=layout.scales,
                has_weights=settings.has_weights,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                use_graphs=settings.cuda_graphs,
            ),
        )
    device = torch.device("cuda", place.device_index)
    torch.cuda.set_device(device)
    model = CudaModel.load(config, dtype, device, load_format=settings.load_format)
    if settings.layer_ring and role is Role.PREFILL:
        return _build_layerwise(settings, model, layout, max_num_batched_tokens, max_num_seqs)
    pool_bytes = gpu_pool_bytes(
        settings,
        place,
        total_bytes=torch.cuda.get_device_properties(device).total_memory,
        used_bytes=torch.cuda.memory_reserved(device),
        step_bytes=activation_bytes(
            config, max_num_batched_tokens, max_num_seqs, dtype, kv_cache_dtype
        ),
    )
    # One block more than is given out: padding rows of a step write there.
    pool = DevicePool(_num_blocks(pool_bytes, layout) - 1, layout.block_bytes, place.device_index)
    engine = CudaEngine(
        model,
        layout,
        pool.tensor,
        pool.scratch_block,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        use_graphs=settings.cuda_graphs,
        tell=Progress(),
    )
    return Machine(
        config=config,
        model_fingerprint=config.fingerprint(has_weights=settings.has_weights),
        layout=layout,
        pool=pool,
        engine=engine,
        host_blocks=open_host_blocks(pool, settings.swap_bytes),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )


def _build_layerwise(
    settings: Settings,
    model: "CudaModel",
    layout: KVLayout,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> Machine:
    """Make a worker whose pool is in host memory, and of two layers at a time on the GPU."""
    # What needs CUDA is not imported on a machine without it.
    from common.engine.layerwise.cuda import LayerwiseCudaEngine  # noqa: PLC0415

    if not settings.kv_bytes:
        raise ConfigError(
            "layer_ring on a GPU keeps the KV pool in host memory: say how large with kv_bytes"
        )
    if layout.is_quantised:
        raise ConfigError(
            f"layer_ring: blocks of {layout.element_dtype} do not go layer by layer; set"
            " kv_cache_dtype to auto"
        )
    config = model.config
    pool = KVPool(_num_blocks(settings.kv_bytes, layout), layout.block_bytes)
    engine = LayerwiseCudaEngine(
        *(model, layout, pool.buffer),
        num_places=_num_places(settings, config, layout),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        tell=Progress(),
    )
    return Machine(
        config=config,
        model_fingerprint=config.fingerprint(has_weights=settings.has_weights),
        layout=layout,
        pool=pool,
        engine=engine,
        host_blocks=open_host_blocks(pool, settings.swap_bytes),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )


def _build_ranks_on_gpus(
    settings: Settings,
    config: ModelConfig,
    layout: KVLayout,
    place: GpuPlace,
    ranks: EngineSettings,
) -> Machine:
    # What needs CUDA is not imported on a machine without it.
    from common.engine.cuda.memory import activation_bytes  # noqa: PLC0415
    from common.engine.cuda.model import CudaModel  # noqa: PLC0415
    from common.engine.parallel.cuda import build_on_cuda  # noqa: PLC0415

    def count_blocks(model: CudaModel, own: KVLayout) -> int:
        if settings.kv_bytes:
            return _num_blocks(settings.kv_bytes, layout) - 1
        device = model.device
        pool_bytes = gpu_pool_bytes(
            settings,
            place,
            total_bytes=torch.cuda.get_device_properties(device).total_memory,
            used_bytes=torch.cuda.memory_reserved(device),
            step_bytes=activation_bytes(
                config,
                ranks.max_num_batched_tokens,
                ranks.max_num_seqs,
                ranks.dtype,
                ranks.kv_cache_dtype,
            ),
        )
        return _num_blocks(pool_bytes, own) - 1

    built = build_on_cuda(ranks, count_blocks, Progress())
    pool, host_blocks = _join_ranks(settings, layout, built.own.pool, built.engine)
    return Machine(
        config=config,
        model_fingerprint=config.fingerprint(has_weights=settings.has_weights),
        layout=layout,
        pool=pool,
        engine=built.engine,
        host_blocks=host_blocks,
        max_num_batched_tokens=ranks.max_num_batched_tokens,
        max_num_seqs=ranks.max_num_seqs,
    )


def _join_ranks(
    settings: Settings,
    layout: KVLayout,
    own: "KVPool | DevicePool",
    engine: ParallelEngine[PreparedT],
) -> tuple[RankedPool, HostBlocks]:
    """Return the pool of all ranks and what is beside it; the ranks end where that cannot be."""
    with ExitStack() as undo:
        undo.callback(engine.close)
        pool = join_ranks(layout, own, engine.handles[1:])
        host_blocks = open_host_blocks(pool, settings.swap_bytes)
        undo.pop_all()
    return pool, host_blocks


def _num_gpus(settings: Settings) -> int:
    return 0 if settings.device == "cpu" else torch.cuda.device_count()


def _num_blocks(pool_bytes: int, layout: KVLayout) -> int:
    num_blocks = pool_bytes // layout.block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"kv_bytes {pool_bytes} holds {num_blocks} blocks of {layout.block_bytes} bytes; at"
            " least 2 are needed"
        )
    return num_blocks


def _default_model(settings: Settings) -> Path:
    return ensure_default_model(settings.cache_dir / "models", Progress())
