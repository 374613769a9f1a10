"""What a worker is made of and keeps for its whole life: model, KV pool, engine."""

from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import structlog
import torch

from common.config.settings import Settings
from common.engine.cpu_engine import CpuEngine
from common.engine.dtype import load_model_layout, resolve_dtype
from common.engine.interface import Engine
from common.engine.weights import read_kv_scales
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.kv.pool import BlockPool, KVPool
from common.models.config import ModelConfig
from common.models.default_model import ensure_default_model
from common.telemetry.progress import Progress
from common.worker.devices import GpuPlace, gpu_pool_bytes, place_worker
from common.worker.host_blocks import HostBlocks, open_host_blocks

log = structlog.get_logger()

CPU_KV_BYTES = 2**30
CPU_BATCHED_TOKENS = 512
CPU_SEQS = 64
GPU_BATCHED_TOKENS = 8192
GPU_CHUNK_TOKENS = 4096
"""Steps of separate prefill workers: a chunk's blocks leave while the next one computes."""
GPU_SEQS = 256


@dataclass(frozen=True, slots=True)
class Machine:
    """What outlives an incarnation.

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


def build_machine(settings: Settings, worker_id: str) -> Machine:
    """Load the model and make pool and engine on the worker's device.

    ConfigError when settings, model or memory do not allow it.
    """
    started = monotonic()
    config = ModelConfig.load(Path(settings.model) if settings.model else _default_model(settings))
    place = place_worker(settings, worker_id, _num_gpus(settings))
    machine = (
        _build_on_cpu(settings, config) if place is None else _build_on_gpu(settings, config, place)
    )
    log.info(
        "worker_built",
        model=str(config.folder),
        device="cpu" if place is None else f"cuda:{place.device_index}",
        dtype=machine.layout.dtype,
        kv_cache_dtype=machine.layout.element_dtype,
        num_blocks=machine.pool.num_blocks,
        num_host_blocks=machine.host_blocks.num_slots,
        block_bytes=machine.layout.block_bytes,
        threads=settings.num_threads,
        seconds=round(monotonic() - started, 3),
        worker=worker_id,
    )
    return machine


def _build_on_cpu(settings: Settings, config: ModelConfig) -> Machine:
    if settings.kv_cache_dtype != "auto":
        raise ConfigError(f"kv_cache_dtype {settings.kv_cache_dtype} needs a GPU; a CPU takes auto")
    has_weights = settings.has_weights
    layout = load_model_layout(config, resolve_dtype(settings.dtype), settings.block_size)
    num_blocks = _num_blocks(settings.kv_bytes or CPU_KV_BYTES, layout)
    pool = KVPool(num_blocks, layout.block_bytes)
    return Machine(
        config=config,
        model_fingerprint=config.fingerprint(has_weights=has_weights),
        layout=layout,
        pool=pool,
        engine=CpuEngine(
            config.folder, layout, pool.buffer, settings.num_threads, has_weights=has_weights
        ),
        host_blocks=open_host_blocks(pool, settings.swap_bytes),
        max_num_batched_tokens=settings.max_num_batched_tokens or CPU_BATCHED_TOKENS,
        max_num_seqs=settings.max_num_seqs or CPU_SEQS,
    )


def _build_on_gpu(settings: Settings, config: ModelConfig, place: GpuPlace) -> Machine:
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
    device = torch.device("cuda", place.device_index)
    torch.cuda.set_device(device)
    usual_tokens = GPU_BATCHED_TOKENS if settings.combined else GPU_CHUNK_TOKENS
    max_num_batched_tokens = settings.max_num_batched_tokens or usual_tokens
    max_num_seqs = settings.max_num_seqs or GPU_SEQS
    model = CudaModel.load(config, dtype, device, load_format=settings.load_format)
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
