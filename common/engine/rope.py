"""Rotary tables: cosine and sine of every position, for each type of frequency scaling."""

import math

import torch

from common.models.rope import Rope, RopeType


def rotary_tables(
    rope: Rope, head_dim: int, max_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cosine, sine), each float32 (max_positions, head_dim / 2), scaled by YaRN's factor.

    Angles are products in float32, as models are trained and published with: at high positions
    their rounding is visible in the logits.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the float32 angles per position in radians, (head_dim / 2), fastest first.

    ``dynamic`` gives the unscaled ones: they hold up to the trained context, where the model's
    ``max_model_len`` ends.
    """
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / periods
    match rope.rope_type:
        case RopeType.DEFAULT | RopeType.DYNAMIC:
            return plain
        case RopeType.LINEAR:
            return plain / rope.factor
        case RopeType.LLAMA3:
            return _llama3(rope, plain)
        case RopeType.YARN:
            return _yarn(rope, head_dim, periods)


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Keep fast waves, stretch slow ones by ``factor``, blend those between."""
    turns = rope.original_max_positions * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: Rope, head_dim: int, periods: torch.Tensor) -> torch.Tensor:
    """Blend stretched and plain by a ramp over the dimensions (arXiv 2309.00071, section 3.2)."""

    def dimension_of(turns: float) -> float:
        wavelength = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return 1.0 / (rope.factor * periods) * ramp + 1.0 / periods * (1 - ramp)
