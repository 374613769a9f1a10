"""A model's weights, streamed from its safetensors files into the engine's own arrangement."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from common.engine.head import LogitsHead
from common.engine.linear import Linear
from common.engine.shard import WHOLE, Shard
from common.errors import ModelError
from common.models.checkpoint import checkpoint_files, read_header
from common.models.config import ModelConfig

MAX_NAMES_IN_ERROR = 5

ProductT = TypeVar("ProductT")
HeadT = TypeVar("HeadT")

TensorSource = Callable[[str], torch.Tensor]
"""Gives the tensor of a name of ``expected_tensors``, in the running type and on its device."""


@dataclass(frozen=True, slots=True)
class Makers(Generic[ProductT, HeadT]):
    """What makes a matrix product of its weight, (out, in), and bias, and the last one.

    The last is that of the vocabulary's weights, (vocabulary, hidden).
    """

    product: Callable[[torch.Tensor, torch.Tensor | None], ProductT]
    head: Callable[[torch.Tensor], HeadT]


CPU_MAKERS = Makers(Linear, LogitsHead)


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[ProductT]):
    """One decoder layer: queries, keys and values in one product, gate and up in another."""

    input_norm: torch.Tensor
    qkv: ProductT
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: ProductT
    post_attention_norm: torch.Tensor
    gate_up: ProductT
    down: ProductT


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[ProductT, HeadT]):
    """All weights of a decoder's shard, in the running type; only the root has a head."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights[ProductT], ...]
    final_norm: torch.Tensor
    head: HeadT | None


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that the model's files must hold."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.has_tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    products = {
        "self_attn.q_proj": (config.q_size, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.has_output_bias),
        "mlp.gate_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.up_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, inner, config.has_mlp_bias),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if config.has_qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (rows, columns, has_bias) in products.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def shard_parts(config: ModelConfig, shard: Shard) -> dict[str, tuple[slice, ...]]:
    """Return what a shard has of each tensor that it does not have whole, by name."""
    own = expected_tensors(shard.config(config))
    return {
        name: shard.slices(shape, own[name])
        for name, shape in expected_tensors(config).items()
        if own[name] != shape
    }


def read_kv_scales(config: ModelConfig) -> tuple[float, ...]:
    """Return what the folder's files say of a quantised KV cache, (layers, K and V) row by row.

    Empty where they say nothing. ModelError where they say it of some layers alone, and for scales
    that are no single positive number.
    """
    names = kv_scale_names(config)
    found: dict[str, float] = {}
    for path in checkpoint_files(config.folder):
        read_header(path)
        try:
            with safe_open(path, framework="pt") as file:
                for name in set(names).intersection(file.keys()):
                    scale: torch.Tensor = file.get_tensor(name)
                    is_number = scale.numel() == 1 and scale.is_floating_point()
                    found[name] = float(scale.float()) if is_number else math.nan
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: reading the KV scales failed: {error}") from error
    if not found:
        return ()
    missing = [name for name in names if name not in found]
    if missing:
        raise ModelError(f"{config.folder}: KV scales are missing: {_some(missing)}")
    bad = [name for name, scale in found.items() if not (math.isfinite(scale) and scale > 0)]
    if bad:
        raise ModelError(
            f"{config.folder}: KV scales are no single positive number: {_some(sorted(bad))}"
        )
    return tuple(found[name] for name in names)


def kv_scale_names(config: ModelConfig) -> list[str]:
    """Return the tensors that a model's files may hold for a quantised KV cache.

    A number is what the cache holds times the scale.
    """
    return [
        f"model.layers.{layer}.self_attn.{plane}_scale"
        for layer in range(config.num_layers)
        for plane in "kv"
    ]


def load_weights(
    config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE
) -> DecoderWeights[Linear, LogitsHead]:
    """Return a shard of the folder's weights for the CPU (see ``read_weights``)."""
    return read_weights(config, dtype, torch.device("cpu"), CPU_MAKERS, shard)


def read_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    makers: Makers[ProductT, HeadT],
    shard: Shard = WHOLE,
) -> DecoderWeights[ProductT, HeadT]:
    """Stream a shard of the folder's weights to a device, one fused product at a time.

    ``config`` is the whole model's; of the files only the shard's bytes are read.

    ModelError names files that are missing or damaged, and tensors that are missing, unknown, of
    another shape, or not of floating point.
    """
    try:
        with ExitStack() as stack:
            source = _Files(config, dtype, device, stack, shard).tensor
            return assemble_weights(config, source, makers, shard)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{config.folder}: reading the weights failed: {error}") from error


def assemble_weights(
    config: ModelConfig,
    source: TensorSource,
    makers: Makers[ProductT, HeadT],
    shard: Shard = WHOLE,
) -> DecoderWeights[ProductT, HeadT]:
    """Ask ``source`` for every tensor of the shard, once, and arrange them."""
    known = expected_tensors(config)

    def fused(names: Iterable[str]) -> ProductT:
        weights, biases = [], []
        for name in names:
            weights.append(source(f"{name}.weight"))
            if f"{name}.bias" in known:
                biases.append(source(f"{name}.bias"))
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return makers.product(weight, torch.cat(biases) if biases else None)

    def summed(name: str) -> ProductT:
        # The ranks' products are added up, and the bias is to be in the sum once.
        bias = f"{name}.bias"
        has_bias = bias in known and shard.is_root
        return makers.product(source(f"{name}.weight"), source(bias) if has_bias else None)

    def layer(index: int) -> LayerWeights[ProductT]:
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        has_norm = config.has_qk_norm
        return LayerWeights(
            input_norm=source(f"{prefix}input_layernorm.weight"),
            qkv=fused(f"{attention}{part}_proj" for part in "qkv"),
            q_norm=source(f"{attention}q_norm.weight") if has_norm else None,
            k_norm=source(f"{attention}k_norm.weight") if has_norm else None,
            output=summed(f"{attention}o_proj"),
            post_attention_norm=source(f"{prefix}post_attention_layernorm.weight"),
            gate_up=fused(f"{mlp}{part}_proj" for part in ("gate", "up")),
            down=summed(f"{mlp}down_proj"),
        )

    embedding = source("model.embed_tokens.weight")
    layers = tuple(layer(index) for index in range(config.num_layers))
    final_norm = source("model.norm.weight")
    head: HeadT | None = None
    if shard.is_root:
        weight = embedding if config.has_tied_embeddings else source("lm_head.weight")
        head = makers.head(weight)
    return DecoderWeights(embedding, layers, final_norm, head)


class _Files:
    """Reads tensors by name from however many files there are (memory-mapped)."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        stack: ExitStack,
        shard: Shard,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._parts = shard_parts(config, shard)
        self._files: dict[str, safe_open] = {}
        found: dict[str, tuple[int, ...]] = {}
        for path in checkpoint_files(config.folder):
            read_header(path)
            file = stack.enter_context(safe_open(path, framework="pt", device=str(device)))
            for name in file.keys():  # noqa: SIM118 - not a mapping
                found[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file
        _compare(config, found)

    def tensor(self, name: str) -> torch.Tensor:
        file, part = self._files[name], self._parts.get(name)
        # A slice is a view of the mapped file, of which nothing else is read. safetensors' own stub
        # leaves these methods without types.
        tensor: torch.Tensor = (
            file.get_tensor(name)  # type: ignore[no-untyped-call]
            if part is None
            else file.get_slice(name)[part]  # type: ignore[no-untyped-call]
        )
        if not tensor.is_floating_point():
            raise ModelError(
                f"{self._config.folder}: {name} holds {tensor.dtype}, not floating-point numbers"
            )
        return tensor.to(self._dtype).contiguous()


def _compare(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in found]
    known = {*expected, *kv_scale_names(config)}
    unknown = [name for name in found if name not in known and not _is_ignored(config, name)]
    misshaped = [
        f"{name} {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    faults = {"missing": missing, "unknown": unknown, "of another shape": misshaped}
    texts = [f"{kind}: {_some(names)}" for kind, names in faults.items() if names]
    if texts:
        files = checkpoint_files(config.folder)
        where = files[0] if len(files) == 1 else f"{config.folder} ({len(files)} files)"
        raise ModelError(f"{where}: tensors are wrong; {'; '.join(texts)}")


def _is_ignored(config: ModelConfig, name: str) -> bool:
    """Frequencies are computed, not read; a tied head may be written beside the embedding."""
    is_tied_head = config.has_tied_embeddings and name == "lm_head.weight"
    return is_tied_head or name.endswith("rotary_emb.inv_freq")


def _some(names: list[str]) -> str:
    rest = len(names) - MAX_NAMES_IN_ERROR
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    return f"{shown} and {rest} more" if rest > 0 else shown
