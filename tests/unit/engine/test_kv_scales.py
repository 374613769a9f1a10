"""What a model folder says of a quantised KV cache."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.weights import kv_scale_names, load_weights, read_kv_scales
from common.errors import ModelError
from common.models.config import ModelConfig
from tests.support.tiny_models import save_tiny_model

FILE = "model.safetensors"
PREFIX = "model.layers"


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    save_tiny_model("llama", tmp_path)
    return ModelConfig.load(tmp_path)


def add(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> None:
    save_file(load_file(config.folder / FILE) | tensors, config.folder / FILE)


def some_scales(config: ModelConfig) -> dict[str, torch.Tensor]:
    names = kv_scale_names(config)
    return {name: torch.tensor(2.0**-at) for at, name in enumerate(names)}


def test_a_folder_without_scales_says_nothing(config: ModelConfig) -> None:
    assert read_kv_scales(config) == ()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_are_read_in_the_order_of_layers_and_planes(
    config: ModelConfig, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    scales = {name: scale.reshape(shape).to(dtype) for name, scale in some_scales(config).items()}
    add(config, scales)
    assert list(scales)[:3] == [
        f"{PREFIX}.0.self_attn.k_scale",
        f"{PREFIX}.0.self_attn.v_scale",
        f"{PREFIX}.1.self_attn.k_scale",
    ]
    assert read_kv_scales(config) == tuple(2.0**-at for at in range(2 * config.num_layers))


def test_engines_that_do_not_use_scales_load_the_weights_beside_them(config: ModelConfig) -> None:
    before = load_weights(config, torch.float32)
    add(config, some_scales(config))
    after = load_weights(config, torch.float32)
    assert torch.equal(before.final_norm, after.final_norm)


def test_scales_of_layers_that_are_not_there_are_unknown(config: ModelConfig) -> None:
    name = f"{PREFIX}.{config.num_layers}.self_attn.k_scale"
    add(config, {name: torch.tensor(1.0)})
    with pytest.raises(ModelError, match=f"unknown: {name}"):
        load_weights(config, torch.float32)


def test_scales_of_some_layers_alone_are_refused(config: ModelConfig) -> None:
    scales = some_scales(config)
    del scales[f"{PREFIX}.1.self_attn.v_scale"]
    add(config, scales)
    with pytest.raises(ModelError, match=r"KV scales are missing: model\.layers\.1\.self_attn\.v"):
        read_kv_scales(config)


@pytest.mark.parametrize(
    "scale",
    [
        torch.tensor(0.0),
        torch.tensor(-1.0),
        torch.tensor(float("inf")),
        torch.tensor(float("nan")),
        torch.tensor(1),
        torch.ones(2),
    ],
    ids=str,
)
def test_what_is_no_scale_is_named(config: ModelConfig, scale: torch.Tensor) -> None:
    name = f"{PREFIX}.0.self_attn.v_scale"
    add(config, some_scales(config) | {name: scale})
    with pytest.raises(ModelError, match=f"no single positive number: {name}$"):
        read_kv_scales(config)
