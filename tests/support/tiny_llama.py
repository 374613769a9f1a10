"""A random Llama of a few megabytes with a real tokenizer: it starts fast and talks noise."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensors = dict[str, NDArray[np.float32]]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
WEIGHTS = "model.safetensors"
HIDDEN = 32
HEAD_DIM = 16
NUM_HEADS = 2
NUM_LAYERS = 2
INTERMEDIATE = 32


def write_tiny_llama(folder: Path, real: Path) -> None:
    """Write the model into ``folder`` with the tokenizer of the model in ``real``."""
    folder.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (real / name).exists():
            shutil.copy(real / name, folder)
    vocab_size = json.loads((real / "config.json").read_text())["vocab_size"]
    (folder / "config.json").write_text(json.dumps(tiny_config(vocab_size)))
    save_file(tiny_tensors(vocab_size), folder / WEIGHTS)


def tiny_config(vocab_size: int) -> dict[str, Any]:  # Any: a JSON document
    """Return its config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def tiny_tensors(vocab_size: int) -> Tensors:
    """Return its weights by name."""
    random = np.random.default_rng(5)

    def drawn(*shape: int) -> NDArray[np.float32]:
        return random.normal(0, 0.3, shape).astype(np.float32)

    tensors: Tensors = {
        "model.embed_tokens.weight": drawn(vocab_size, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.self_attn.q_proj.weight": drawn(NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": drawn(NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": drawn(NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": drawn(HIDDEN, NUM_HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": drawn(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": drawn(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": drawn(HIDDEN, INTERMEDIATE),
        }
    return tensors
