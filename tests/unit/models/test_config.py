"""What ModelConfig reads from a folder, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.models.config import ModelConfig
from common.models.rope import Rope, RopeType

BASE: dict[str, Any] = {  # Any: JSON
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def write(folder: Path, *, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    fields = {name: value for name, value in (BASE | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_plain_llama_folder_is_read(tmp_path: Path) -> None:
    config = ModelConfig.load(write(tmp_path))
    assert (config.head_dim, config.q_size, config.kv_size) == (16, 64, 32)
    assert config.layer_windows == (None,) * 4
    assert config.rope == Rope(RopeType.DEFAULT, 10_000.0)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    assert config.max_model_len == 256
    assert not (config.has_qkv_bias)
    assert not (config.has_output_bias)
    assert not (config.has_mlp_bias)
    assert not (config.has_qk_norm)
    assert not (config.has_tied_embeddings)


def test_generation_config_names_the_end_tokens_first(tmp_path: Path) -> None:
    config = ModelConfig.load(write(tmp_path, generation={"eos_token_id": [7, 8]}))
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 8), 1)


@pytest.mark.parametrize(
    ("changes", "qkv", "output", "mlp", "norm"),
    [
        ({"attention_bias": True}, True, True, False, False),
        ({"mlp_bias": True}, False, False, True, False),
        ({"model_type": "mistral", "attention_bias": True}, False, False, False, False),
        ({"model_type": "qwen2"}, True, False, False, False),
        ({"model_type": "qwen3"}, False, False, False, True),
    ],
)
def test_families_differ_in_biases_and_norms(
    tmp_path: Path, changes: dict[str, Any], qkv: bool, output: bool, mlp: bool, norm: bool
) -> None:
    config = ModelConfig.load(write(tmp_path, **changes))
    assert (config.has_qkv_bias, config.has_output_bias) == (qkv, output)
    assert (config.has_mlp_bias, config.has_qk_norm) == (mlp, norm)


QWEN_WINDOW = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, (32,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "llama", "sliding_window": 32}, (None,) * 4),
        (QWEN_WINDOW | {"use_sliding_window": False}, (None,) * 4),
        (QWEN_WINDOW | {"max_window_layers": 3}, (None, None, None, 32)),
        (
            QWEN_WINDOW | {"layer_types": ["sliding_attention"] + 3 * ["full_attention"]},
            (32, None, None, None),
        ),
    ],
)
def test_sliding_windows_are_per_layer(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert ModelConfig.load(write(tmp_path, **changes)).layer_windows == windows


LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, Rope(RopeType.DEFAULT, 5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(RopeType.DEFAULT, 5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            Rope(RopeType.LINEAR, 5e5, 2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            Rope(RopeType.DYNAMIC, 1e4, 2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2}},
            Rope(RopeType.LINEAR, 7.0, 2.0),
        ),
        (
            {
                "rope_scaling": LLAMA3
                | {"rope_type": "llama3", "original_max_position_embeddings": 64}
            },
            Rope(RopeType.LLAMA3, 1e4, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            Rope(RopeType.LLAMA3, 1e4, 8.0, 256, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 1.0, "attention_factor": 0.5}},
            Rope(RopeType.YARN, 1e4, 1.0, 256, attention_factor=0.5),
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 256}},
            Rope(RopeType.YARN, 1e4, 1.0, 256),
        ),
    ],
)
def test_rotary_parameters_are_read_in_both_spellings(
    tmp_path: Path, changes: dict[str, Any], expected: Rope
) -> None:
    assert ModelConfig.load(write(tmp_path, **changes)).rope == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"model_type": "absent"}, "model_type is missing"),
        ({"model_type": 3}, "model_type must be a string"),
        ({"vocab_size": "many"}, "vocab_size must be an integer"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers is missing"),
        ({"max_position_embeddings": "absent"}, "max_position_embeddings is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"head_dim": 12}, "head_dim 12 is no multiple of 8"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple of 4 heads"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not supported"),
        ({"num_local_experts": 8}, "mixtures of experts are not supported"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": 100}, "vocab_size 100 does not hold special token id 100"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be finite and above 0"),
        ({"rope_theta": 1e999}, "not readable as JSON"),
        ({"rope_scaling": {"type": "longrope"}}, "type 'longrope'; supported are"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        (
            {"rope_scaling": LLAMA3 | {"type": "llama3", "high_freq_factor": 1}},
            "high_freq_factor must be above",
        ),
        (QWEN_WINDOW | {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (QWEN_WINDOW | {"layer_types": ["linear"] * 4}, "layer_types names 'linear'"),
        (QWEN_WINDOW | {"layer_types": "full"}, "layer_types must be a list"),
    ],
)
def test_what_cannot_be_served_is_refused_by_file_and_field(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        ModelConfig.load(write(tmp_path, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not readable as JSON"), ("[]", "a JSON object is expected"), ("\xff", "not readable")],
)
def test_a_broken_config_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=message):
        ModelConfig.load(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: the file is missing"):
        ModelConfig.load(tmp_path)
    with pytest.raises(ModelError, match=r"nowhere: no such folder.*nothing is downloaded"):
        ModelConfig.load(tmp_path / "nowhere")


def test_a_broken_generation_config_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{]")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        ModelConfig.load(tmp_path)


def test_reading_a_config_loads_no_heavy_library() -> None:
    script = (
        "import sys, common.models.config, common.models.default_model;"
        "assert not {'torch', 'transformers', 'flowpath_native'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
