"""Random models of every supported family, small enough to compute in milliseconds."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
THETA = 10_000.0
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": THETA,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

# Any: fields of configuration classes that have no types.
VARIANTS: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama-linear": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": THETA, "factor": 2.5}},
    ),
    "llama-dynamic": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": THETA, "factor": 2.0}},
    ),
    "llama-llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "llama-yarn-variant": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": YARN
            | {
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 1.2,
                "mscale_all_dim": 0.8,
            }
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}


def save_tiny_model(
    name: str,
    folder: Path,
    *,
    max_shard_size: str = "1GB",
    spread: float = 0.25,
    **shape: Any,  # Any: fields of configuration classes that have no types
) -> PreTrainedModel:
    """Write the named variant, randomised in every tensor, and return it for reference.

    ``spread`` is the standard deviation of what is added to every matrix.

    Norm weights and biases start as ones and zeros, which would hide that one is left out.
    """
    config_class, model_class, changes = VARIANTS[name]
    torch.manual_seed(sorted(VARIANTS).index(name))
    config = config_class(**(SHAPE | changes | shape))
    config._attn_implementation = "eager"
    model: PreTrainedModel = model_class(config)
    model.train(mode=False)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            tensor.add_(torch.randn_like(tensor) * (0.3 if tensor.dim() == 1 else spread))
            if tensor_name.endswith("norm.weight"):
                tensor.abs_()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
