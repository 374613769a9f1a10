"""What a step that only decodes costs: a base, each sequence, and each token that they attend to.

Theory of operation
-------------------
Weighted least squares over the steps of late, whose weights halve with every half-life of busy
time. Sequences and their tokens mostly grow together, and then the steps do not tell what of both
costs; a small ridge shares it out, and predictions along that line are right all the same. Batches
of other contexts tell it. Costs are never below 0, and neither is the base: the plane goes through
the mean of late, whatever its slopes were.
"""

from typing import NamedTuple

HALF_LIFE_SECONDS = 5.0
"""Busy time after which a step counts half."""
MIN_SPREAD = 0.1
"""How far sequences or tokens of steps must lie apart, as a share of their mean, to tell slopes."""
RIDGE = 0.02
"""Share of its mean to which a slope is doubted."""
MAX_TIMES = 4.0
"""A step counts as at most so many times as long as it would have been expected: one that a host
which stood still made long says nothing about its sequences."""


class DecodeCost(NamedTuple):
    """Seconds of a step: ``base``, ``each`` sequence, and each token of their contexts.

    Where both slopes are 0 it is not known what they cost, and ``base`` is what steps took.
    """

    base: float = 0.0
    each: float = 0.0
    token: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it is known what one sequence more costs."""
        return self.each > 0 or self.token > 0

    def at(self, num_sequences: int, num_tokens: int) -> float:
        """Seconds of a step with so many, which attend to so many tokens in all."""
        return self.base + self.each * num_sequences + self.token * num_tokens


class CostMeter:
    """Learns a ``DecodeCost`` from steps that only decode."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean = [0.0, 0.0, 0.0]
        """Of sequences, tokens and seconds."""
        self._moments = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        """Of sequences and of tokens: with sequences, tokens and seconds, about the means."""
        self._slopes = (0.0, 0.0)

    def add(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        if self._weight:
            count, tokens, mean = self._mean
            larger = max(1.0, num_sequences / count, num_tokens / tokens)
            seconds = min(seconds, MAX_TIMES * mean * larger)
        keep: float = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        before = self._weight * keep
        self._weight = before + 1.0
        values = (float(num_sequences), float(num_tokens), seconds)
        away = [value - mean for value, mean in zip(values, self._mean, strict=True)]
        for row, moments in enumerate(self._moments):
            for column in range(3):
                gained = away[row] * away[column] * before / self._weight
                moments[column] = keep * moments[column] + gained
        self._mean = [mean + d / self._weight for mean, d in zip(self._mean, away, strict=True)]

    def cost(self) -> DecodeCost:
        """Return what is known by now; the slopes of before where the steps of late tell none."""
        if not self._weight:
            return DecodeCost()
        count, tokens, seconds = self._mean
        self._slopes = self._solved() or self._slopes
        each, token = self._slopes
        sloped = each * count + token * tokens
        if sloped > seconds:
            each, token = each * seconds / sloped, token * seconds / sloped
        return DecodeCost(max(0.0, seconds - each * count - token * tokens), each, token)

    def _solved(self) -> tuple[float, float] | None:
        (nn, nt, ny), (_, tt, ty) = (
            [value / self._weight for value in moments] for moments in self._moments
        )
        count, tokens, _ = self._mean
        if nn < (MIN_SPREAD * count) ** 2 and tt < (MIN_SPREAD * tokens) ** 2:
            return None
        nn, tt = nn + (RIDGE * count) ** 2, tt + (RIDGE * tokens) ** 2
        divisor = nn * tt - nt * nt
        each, token = (ny * tt - ty * nt) / divisor, (ty * nn - ny * nt) / divisor
        if each < 0:
            each, token = 0.0, max(0.0, ty / tt)
        elif token < 0:
            each, token = max(0.0, ny / nn), 0.0
        return each, token
