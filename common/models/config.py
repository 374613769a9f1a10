"""What a Hugging Face model folder says about its model; read without torch or transformers."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from common.errors import ModelError
from common.models.fingerprint import model_fingerprint
from common.models.json_fields import JsonFields, load_object
from common.models.rope import Rope, RopeType, parse_rope


class Family(StrEnum):
    """The supported model families, by ``model_type``."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and token ids of one dense decoder model.

    ``layer_windows`` has one entry a layer: None for full attention, else how many positions a
    token sees, itself included. ``max_model_len`` bounds prompt plus output in tokens. With
    ``dynamic`` rotary scaling it is the trained context: beyond it the rotation of every key
    would depend on the sequence's final length, and no cached block could be shared.
    """

    folder: Path
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    layer_windows: tuple[int | None, ...]
    max_model_len: int
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        """Read and check ``config.json`` and, where there is one, ``generation_config.json``.

        ModelError names the file and the reason when the folder cannot be served.
        """
        if not folder.is_dir():
            raise ModelError(
                f"{folder}: no such folder; a model is a folder on this machine, and nothing is "
                "downloaded"
            )
        fields = load_object(folder / "config.json")
        family = _family(fields)
        _refuse_variants(fields)
        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        max_positions = fields.integer("max_position_embeddings")
        eos, bos = _special_token_ids(folder, fields)
        attention_bias = family in (Family.LLAMA, Family.QWEN3) and fields.flag(
            "attention_bias", default=False
        )
        config = cls(
            folder=folder,
            family=family,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, family, num_heads),
            head_dim=_head_dim(fields, family, hidden_size, num_heads),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=parse_rope(fields, max_positions),
            layer_windows=_layer_windows(fields, family, num_layers),
            max_model_len=max_positions,
            has_tied_embeddings=fields.flag("tie_word_embeddings", default=False),
            has_qkv_bias=family is Family.QWEN2 or attention_bias,
            has_output_bias=attention_bias,
            has_mlp_bias=family is Family.LLAMA and fields.flag("mlp_bias", default=False),
            has_qk_norm=family is Family.QWEN3,
            eos_token_ids=eos,
            bos_token_id=bos,
        )
        config._check(fields)
        return config

    def _check(self, fields: JsonFields) -> None:
        if self.num_heads % self.num_kv_heads:
            raise fields.error(
                "num_key_value_heads",
                f"{self.num_kv_heads} does not divide num_attention_heads {self.num_heads}",
            )
        if self.head_dim % 8:
            raise fields.error("head_dim", f"{self.head_dim} is no multiple of 8")
        for token_id in (*self.eos_token_ids, self.bos_token_id or 0):
            if token_id >= self.vocab_size:
                raise fields.error(
                    "vocab_size", f"{self.vocab_size} does not hold special token id {token_id}"
                )

    @property
    def q_size(self) -> int:
        """Numbers of one token's queries, all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of one token's keys (or values), all heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def is_rope_dynamic(self) -> bool:
        """Tell whether the folder asks for dynamic scaling, which ends at the trained context."""
        return self.rope.rope_type is RopeType.DYNAMIC

    def fingerprint(self, *, has_weights: bool = True) -> str:
        """Return 16 hex digits that differ between folders whose models or tokenizers differ.

        ``has_weights`` says that the folder's weights are the ones that are served.
        """
        return model_fingerprint(self.folder, has_weights=has_weights)


def _family(fields: JsonFields) -> Family:
    name = fields.text("model_type")
    try:
        return Family(name)
    except ValueError:
        known = ", ".join(Family)
        raise fields.error("model_type", f"{name!r} is not supported ({known} are)") from None


def _refuse_variants(fields: JsonFields) -> None:
    """Refuse what would load but compute something else."""
    if fields.has("quantization_config"):
        raise fields.error("quantization_config", "is set: quantised weights are not supported")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", f"{activation!r} is not supported (silu is)")
    if fields.has("num_local_experts") or fields.has("num_experts"):
        raise fields.error("num_experts", "is set: mixtures of experts are not supported")


def _num_kv_heads(fields: JsonFields, family: Family, num_heads: int) -> int:
    # Mistral's own configuration class has 8 where the file says nothing; null means all heads.
    is_unsaid = not fields.is_null("num_key_value_heads")
    default = 8 if family is Family.MISTRAL and is_unsaid else num_heads
    return fields.integer("num_key_value_heads", default)


def _head_dim(fields: JsonFields, family: Family, hidden_size: int, num_heads: int) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim", minimum=2)
    if family is Family.QWEN3:
        return 128
    if hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is no multiple of {num_heads} heads")
    return hidden_size // num_heads


def _layer_windows(fields: JsonFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family is Family.LLAMA:
        return (None,) * num_layers
    if family is Family.MISTRAL:
        has_window = not fields.is_null("sliding_window")
        return ((fields.integer("sliding_window", 4096) if has_window else None),) * num_layers
    if not fields.flag("use_sliding_window", default=False) or fields.is_null("sliding_window"):
        return (None,) * num_layers
    window = fields.integer("sliding_window", 4096)
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = fields.texts("layer_types")
    if len(kinds) != num_layers:
        raise fields.error("layer_types", f"has {len(kinds)} entries for {num_layers} layers")
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise fields.error("layer_types", f"names {kind!r}, which is not supported")
    return tuple(known[kind] for kind in kinds)


def _special_token_ids(folder: Path, fields: JsonFields) -> tuple[tuple[int, ...], int | None]:
    """Return (eos ids, bos id); generation_config.json, the newer place, goes first."""
    sources = [fields]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources.insert(0, load_object(generation))
    eos = next((ids for source in sources if (ids := source.token_ids("eos_token_id"))), ())
    bos = next((ids for source in sources if (ids := source.token_ids("bos_token_id"))), ())
    return eos, bos[0] if bos else None
