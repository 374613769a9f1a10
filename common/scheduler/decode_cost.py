"""What a step that only decodes costs: a base, each sequence, and each token that they attend to.

Theory of operation
-------------------
Weighted least squares over the steps of late, whose weights halve with every half-life of busy
time. Sequences and their tokens mostly grow together, and then the steps do not tell what of both
costs; a small ridge shares it out, and predictions along that line are right all the same. Batches
of other contexts tell it. What the steps of late do not tell stays as it was known: what a sequence
costs while a batch of one size goes on, whose contexts grow. Costs are never below 0, and neither
is the base: the plane goes through the mean of late, whatever its slopes were.
"""

from typing import NamedTuple

HALF_LIFE_SECONDS = 5.0
"""Busy time after which a step counts half."""
MIN_SPREAD = 0.1
"""How far sequences or tokens of steps must lie apart, as a share of their mean, to tell slopes."""
RIDGE_SEQUENCES, RIDGE_TOKENS = 0.08, 0.02
"""Shares of their means to which slopes are doubted. Where steps do not tell whether sequences or
their tokens cost, it is rather taken to be tokens: then a worker that saw short contexts alone
expects long ones to cost more than they do, and not a fraction."""
MAX_TIMES = 4.0
"""A step counts as at most so many times as long as it would have been expected: one that a host
which stood still made long says nothing about its sequences. Where steps turn out to be so many
times shorter, those before were such."""


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

    _weight: float
    _mean: list[float]
    """Of sequences, tokens and seconds."""
    _moments: list[list[float]]
    """Of sequences and of tokens: with sequences, tokens and seconds, about the means."""
    _slopes: tuple[float, float]

    def __init__(self) -> None:
        self._forget()

    def add(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        if self._weight:
            count, tokens, mean = self._mean
            shares = (1.0, num_sequences / count, num_tokens / tokens)
            if seconds * MAX_TIMES < mean * min(shares):
                self._forget()
            seconds = min(seconds, MAX_TIMES * mean * max(shares))
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
        self._slopes = self._next_slopes()

    def cost(self) -> DecodeCost:
        """Return what is known by now."""
        if not self._weight:
            return DecodeCost()
        count, tokens, seconds = self._mean
        each, token = self._slopes
        sloped = each * count + token * tokens
        if sloped > seconds:
            each, token = each * seconds / sloped, token * seconds / sloped
        return DecodeCost(max(0.0, seconds - each * count - token * tokens), each, token)

    def _forget(self) -> None:
        """Know nothing."""
        self._weight = 0.0
        self._mean = [0.0, 0.0, 0.0]
        self._moments = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        self._slopes = (0.0, 0.0)

    def _next_slopes(self) -> tuple[float, float]:
        """Return what the steps of late say; where they do not, what was known before."""
        (nn, nt, ny), (_, tt, ty) = (
            [value / self._weight for value in moments] for moments in self._moments
        )
        count, tokens, _ = self._mean
        each, token = self._slopes
        if nn < (MIN_SPREAD * count) ** 2 and tt < (MIN_SPREAD * tokens) ** 2:
            return each, token
        ridge_n, ridge_t = (RIDGE_SEQUENCES * count) ** 2, (RIDGE_TOKENS * tokens) ** 2
        # The ridge is about the slopes of before: only what the steps tell moves them.
        ny, ty = ny + ridge_n * each, ty + ridge_t * token
        nn, tt = nn + ridge_n, tt + ridge_t
        divisor = nn * tt - nt * nt
        each, token = (ny * tt - ty * nt) / divisor, (ty * nn - ny * nt) / divisor
        if each < 0:
            return 0.0, max(0.0, ty / tt)
        if token < 0:
            return max(0.0, ny / nn), 0.0
        return each, token
