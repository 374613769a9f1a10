"""Model folders without weights, for engines that make random ones (``load_format dummy``)."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

SHAPES: dict[str, dict[str, object]] = {
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
"""By name: the sizes of a Llama."""


def write_dummy_model(folder: Path, shape: str) -> None:
    """Write ``config.json`` and a tokenizer of one word a token into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    size = sizes["vocab_size"]
    assert isinstance(size, int), "the vocabulary is counted"
    vocabulary = {f"w{token_id}": token_id for token_id in range(size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1"}))
