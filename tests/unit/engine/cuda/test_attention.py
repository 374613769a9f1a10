"""What FlashInfer's wrappers are planned and run with; the wrappers themselves are stand-ins."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from common.engine.cuda.attention import (
    ChunkAttention,
    DecodeAttention,
    FreshAttention,
    Planes,
    Shape,
    Workspace,
)
from common.engine.cuda.device_batch import Group, to_device
from common.engine.cuda.kernels import pool_view
from common.engine.cuda.step_batch import StepPacker
from common.engine.interface import StepRow
from common.kv.layout import KVLayout
from common.models.config import ModelConfig
from tests.support.tiny_models import save_tiny_model

SCALES = (1.0, 2.0, 0.5, 0.25, 1.0, 1.0)
KINDS = {"auto": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}


@dataclass
class Wrapper:
    """Notes what it is told."""

    plans: list[dict[str, Any]] = field(default_factory=list)  # Any: FlashInfer has no types
    runs: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def plan(self, *_arrays: object, **options: Any) -> None:
        self.plans.append(options)

    def run(self, *arrays: Any, **options: Any) -> None:
        self.runs.append((arrays, options))


def fast_decode_plan(wrapper: Wrapper, *_arrays: object, **options: Any) -> None:
    wrapper.plans.append(options)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    names = ("BatchPrefillWithRaggedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    found = {name: lambda *_arguments, **_options: Wrapper() for name in names}
    decode.__dict__.update(
        BatchDecodeWithPagedKVCacheWrapper=found[names[1]], fast_decode_plan=fast_decode_plan
    )
    module.__dict__.update(found, decode=decode)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    save_tiny_model("llama", tmp_path)
    return ModelConfig.load(tmp_path)


def layout_of(config: ModelConfig, kv_cache_dtype: str) -> KVLayout:
    scales = SCALES if kv_cache_dtype != "auto" else ()
    heads = (config.num_kv_heads, config.head_dim)
    return KVLayout(config.num_layers, 16, *heads, "bfloat16", 2, kv_cache_dtype, scales)


def group() -> Group:
    batch = StepPacker(16, 97).pack([StepRow([1, 2, 3], 5, (0,))])
    made = to_device(batch, np.empty(0, np.int64), torch.device("cpu"))
    assert made.chunks is not None
    return made.chunks


def workspace() -> Workspace:
    none = torch.empty(0, dtype=torch.uint8)
    return Workspace(none, none, none)


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("kv_cache_dtype", list(KINDS))
@pytest.mark.parametrize("kind", [DecodeAttention, ChunkAttention])
def test_paged_attention_reads_the_pools_type_with_the_layers_scales(
    config: ModelConfig, kind: type[DecodeAttention | ChunkAttention], kv_cache_dtype: str
) -> None:
    layout = layout_of(config, kv_cache_dtype)
    view = pool_view(torch.zeros(2 * layout.block_bytes, dtype=torch.uint8), layout)
    attention = kind(Shape.of(config, layout), None, workspace())
    attention.plan(group())
    out = torch.empty(3, config.num_heads, config.head_dim)
    attention.run(out, Planes.of(view, layout, 1), out)
    wrapper: Wrapper = attention._wrapper
    assert {plan["q_data_type"] for plan in wrapper.plans} == {torch.bfloat16}
    assert {plan["kv_data_type"] for plan in wrapper.plans} == {KINDS[kv_cache_dtype]}
    (((_, (keys, values)), options),) = wrapper.runs
    assert keys.dtype == values.dtype == KINDS[kv_cache_dtype]
    assert keys.data_ptr() == view[:, 1, 0].data_ptr()
    assert values.data_ptr() == view[:, 1, 1].data_ptr()
    expected = (None, None) if kv_cache_dtype == "auto" else (0.5, 0.25)
    assert (options["k_scale"], options["v_scale"]) == expected


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("kv_cache_dtype", list(KINDS))
def test_fresh_prompts_read_numbers_of_the_models_type(
    config: ModelConfig, kv_cache_dtype: str
) -> None:
    attention = FreshAttention(
        Shape.of(config, layout_of(config, kv_cache_dtype)), None, workspace()
    )
    attention.plan(group())
    (plan,) = attention._wrapper.plans
    assert plan["q_data_type"] == plan["kv_data_type"] == torch.bfloat16
