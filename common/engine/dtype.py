"""Which element type a model runs in, and the KV layout that follows."""

from pathlib import Path

import torch

from common.config.processor import CPU_INFO, has_native_bfloat16
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.models.config import ModelConfig

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(name: str, cpu_info: Path = CPU_INFO) -> str:
    """Return ``float32`` or ``bfloat16``; ``auto`` is the fastest the processor does natively.

    ConfigError for any other name.
    """
    if name in TORCH_DTYPES:
        return name
    if name != "auto":
        known = ", ".join(TORCH_DTYPES)
        raise ConfigError(f"dtype {name!r} is not supported on a CPU: auto, {known} are")
    return "bfloat16" if has_native_bfloat16(cpu_info) else "float32"


def load_model_layout(
    config: ModelConfig,
    dtype: str,
    block_size: int,
    kv_cache_dtype: str = "auto",
    scales: tuple[float, ...] = (),
) -> KVLayout:
    """Return the KV layout of a model that runs in ``dtype`` with blocks of ``block_size`` tokens.

    An ``auto`` dtype must be resolved before. ``scales`` are those of a quantised cache (see
    ``KVLayout``).
    """
    return KVLayout(
        num_layers=config.num_layers,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        scales=scales,
    )
