"""Rotary position embedding: its parameters as a model folder states them, and its frequencies."""

import math
from dataclasses import dataclass
from enum import StrEnum

from common.models.json_fields import JsonFields

DEFAULT_THETA = 10_000.0


class RopeType(StrEnum):
    """How the frequencies are stretched to reach longer contexts than in training."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of the rotary embedding; those that ``rope_type`` does not use are neutral.

    ``attention_factor`` scales cos and sin (YaRN's temperature), 1 for all other types.
    """

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


def parse_rope(config: JsonFields, max_positions: int) -> Rope:
    """Read the rotary parameters of a config.json, in the old or the new spelling.

    Old: ``rope_theta`` beside ``rope_scaling`` with ``type`` or ``rope_type``. New (transformers
    5): all of it in ``rope_parameters``. ModelError for types and variants not supported.
    """
    spelling = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    fields = config.nested(spelling)
    theta = fields.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    name = fields.text("rope_type", fields.text("type", RopeType.DEFAULT))
    partial = fields.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise config.error("partial_rotary_factor", "other than 1 is not supported")
    try:
        rope_type = RopeType(name)
    except ValueError:
        known = ", ".join(RopeType)
        raise config.error(spelling, f"has type {name!r}; supported are {known}") from None
    if rope_type is RopeType.DEFAULT:
        return Rope(rope_type, theta)
    factor = fields.number("factor", _implied_factor(fields, rope_type, max_positions))
    if rope_type in (RopeType.LINEAR, RopeType.DYNAMIC):
        return Rope(rope_type, theta, factor)
    original = _original_max_positions(config, fields, max_positions)
    if rope_type is RopeType.LLAMA3:
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise fields.error("high_freq_factor", f"must be above low_freq_factor, {low}")
        return Rope(rope_type, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    return Rope(
        rope_type,
        theta,
        factor,
        original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(fields, factor),
        truncate=fields.flag("truncate", default=True),
    )


def _original_max_positions(config: JsonFields, fields: JsonFields, max_positions: int) -> int:
    inside = fields.integer("original_max_position_embeddings", max_positions)
    return config.integer("original_max_position_embeddings", inside)


def _implied_factor(fields: JsonFields, rope_type: RopeType, max_positions: int) -> float | None:
    if rope_type is RopeType.YARN and fields.has("original_max_position_embeddings"):
        return max_positions / fields.integer("original_max_position_embeddings")
    return None


def _yarn_attention_factor(fields: JsonFields, factor: float) -> float:
    if fields.has("attention_factor"):
        return fields.number("attention_factor")

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.has("mscale") and fields.has("mscale_all_dim"):
        return temperature(fields.number("mscale")) / temperature(fields.number("mscale_all_dim"))
    return temperature(1.0)
