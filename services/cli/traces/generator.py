"""Agents of the papers' statistics (DualPath 2.10), made from a seed. Pure.

The paper prints means over 500 agents: turns, tokens appended and generated a round, total tokens
at the end, context of a round. They are not multiplicative: turns x (append + gen) is 1.6 to 1.7
times the total. So agents that take many rounds add little in each. The construction:

1. The total ``T`` of an agent lies just below the longest context: ``max_len * U^(1/a)``, with the
   mean that the table has.
2. What an agent adds a round, ``s``, is lognormal with the mean append + gen, and it takes
   ``n = T / s`` rounds. Then ``mean(n) * mean(s) = mean(T) * exp(sigma^2)``, which gives
   ``sigma^2 = ln(turns * (append + gen) / total)``, and all three means come out.
3. Rounds of even size would give a mean context of ``T / 2``; the table has 0.58 to 0.60. So the
   first prompt is longer (instructions and the task): ``F = T * (2c - 1 + 2/n) - g1`` with
   ``c = context / total`` makes the mean over the rounds exactly ``c * T``.
4. The rest is spread over the other rounds with lognormal (appended) and gamma (generated) weights.

Draws are stratified: agent k of N takes its quantile from the k-th part of N, in shuffled order, so
a set of a few dozen agents already has the table's means. Agents therefore depend on N.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from math import exp, log, sqrt
from statistics import NormalDist

from common.errors import ConfigError
from services.cli.traces.trajectory import Part, Round, Trajectory

MIN_TURNS = 3
MAX_FIRST_SHARE = 0.9
APPEND_SIGMA = 1.0
"""Of the lognormal weights of appended tokens: outputs of tools have a long tail."""
GEN_SHAPE = 2.0
"""Of the gamma weights of generated tokens."""


@dataclass(frozen=True, slots=True)
class TrajectoryShape:
    """Means of a set of agents; lengths in tokens. ``max_len`` bounds every agent's total."""

    max_len: int
    turns: float
    append: float
    gen: float
    total: float
    context: float

    @property
    def log_variance(self) -> float:
        """Of what agents add a round (see the module's second step)."""
        return log(self.turns * (self.append + self.gen) / self.total)

    def scaled_to(self, max_len: int, turns: float | None = None) -> "TrajectoryShape":
        """Return the shape for another context length, and with another number of turns.

        Lengths keep their share of the context; with fewer turns each adds more, so that totals
        and the mean context stay where they are.
        """
        factor = max_len / self.max_len
        turns = self.turns if turns is None else turns
        of_round = factor * self.turns / turns
        return replace(
            self,
            max_len=max_len,
            turns=turns,
            append=self.append * of_round,
            gen=self.gen * of_round,
            total=self.total * factor,
            context=self.context * factor,
        )


class ShapeName(StrEnum):
    """The paper's three sets, by their longest context."""

    K32 = "32K"
    K48 = "48K"
    K64 = "64K"


SHAPES = {
    ShapeName.K32: TrajectoryShape(32 * 1024, 60, 608, 148, 28_639, 17_183),
    ShapeName.K48: TrajectoryShape(48 * 1024, 106, 474, 172, 42_607, 25_120),
    ShapeName.K64: TrajectoryShape(64 * 1024, 157, 429, 176, 55_958, 32_721),
}
"""What the paper prints of each."""


def generate(shape: TrajectoryShape, count: int, seed: int) -> list[Trajectory]:
    """Return ``count`` agents of this shape; the same for the same arguments.

    ConfigError for a shape that leaves a round less than two tokens.
    """
    if shape.append < 1 or shape.gen < 1:
        raise ConfigError(
            f"{shape.turns:g} turns in a context of {shape.max_len} tokens leave "
            f"{shape.append:.1f} tokens to append and {shape.gen:.1f} to generate in each"
        )
    source = random.Random(f"{seed} trajectories")  # noqa: S311 - a workload, no secret
    lengths, sizes = _strata(source, count), _strata(source, count)
    return [
        _trajectory(shape, source, f"{seed} agent {number}", length, size)
        for number, (length, size) in enumerate(zip(lengths, sizes, strict=True))
    ]


def _strata(source: random.Random, count: int) -> list[float]:
    """Return one quantile of each of ``count`` equal parts, in random order."""
    drawn = [(place + source.random()) / count for place in range(count)]
    source.shuffle(drawn)
    return [min(max(quantile, 1e-9), 1 - 1e-9) for quantile in drawn]


def _trajectory(
    shape: TrajectoryShape, source: random.Random, name: str, length: float, size: float
) -> Trajectory:
    share = shape.total / shape.max_len
    total = max(2 * MIN_TURNS, round(shape.max_len * length ** ((1 - share) / share)))
    variance = max(0.0, shape.log_variance)
    mean = log(shape.append + shape.gen) - variance / 2
    step = exp(mean + sqrt(variance) * NormalDist().inv_cdf(size))
    turns = min(max(MIN_TURNS, round(total / step)), total // 2)
    num_generated = max(turns, round(total * shape.gen / (shape.append + shape.gen)))
    num_generated = min(num_generated, total - turns)
    generated = _split(num_generated, [source.gammavariate(GEN_SHAPE, 1.0) for _ in range(turns)])
    share_of_first = min(2 * shape.context / shape.total - 1 + 2 / turns, MAX_FIRST_SHARE)
    num_appended = total - num_generated
    first = round(total * share_of_first) - generated[0]
    first = min(max(1, first), num_appended - (turns - 1))
    weights = [source.lognormvariate(0.0, APPEND_SIGMA) for _ in range(turns - 1)]
    appended = [first, *_split(num_appended - first, weights)]
    return Trajectory(
        name,
        tuple(
            Round((Part(f"{name} round {number}", num_tokens),), generated[number])
            for number, num_tokens in enumerate(appended)
        ),
    )


def _split(total: int, weights: Sequence[float]) -> list[int]:
    """Share out ``total`` by weight in whole numbers of at least 1."""
    spare = total - len(weights)
    factor = spare / sum(weights)
    ends = [0, *(round(factor * end) for end in accumulate(weights))]
    return [1 + after - before for before, after in pairwise(ends)]
