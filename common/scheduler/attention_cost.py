"""What attention over a chunk of a prompt costs, learnt from chunks that ran. Pure.

    T(cached, b) = a0 + a1 x b x (cached + b / 2) + a2 x b          (papers 2.8)

``b`` tokens attend to ``cached`` earlier ones and, on average, to half of their own: ``a1`` is the
time of one such pair, ``a2`` what a token costs whatever it attends to, ``a0`` what a chunk costs
whatever its length.

Theory of operation. The fit is a least-squares fit of errors in proportion to what the first model
expected, so that steps of 5 ms count as much as those of 300 ms. It keeps sums only (3 x 3
numbers), in which a step counts half after ``HALF_LIFE`` later ones. Few chunks, or chunks all
alike, do not tell three coefficients apart: a pull towards the model it began with, scaled to the
times seen, decides then, and soon weighs nothing where the data speak. No coefficient is negative
or beyond ``MAX_FACTOR`` times that model, so the cost grows with ``b`` whatever was observed, and
one that took much longer for a reason of its own counts as ``MAX_SURPRISE`` times what was
expected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log

import numpy as np
from numpy.typing import NDArray

HALF_LIFE = 256
"""Observations after which one counts half."""
PULL = 1e-4
"""Weight of the first model against that of one observation."""
MAX_FACTOR = 100.0
MAX_SURPRISE = 2.0
NUM_TRUSTED = 16
"""Observations after which a surprise is bounded."""
MAX_SWEEPS = 400

_KEEP = 0.5 ** (1 / HALF_LIFE)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one prompt that are computed together.

    ``num_tokens`` (bsz in the paper) follow ``num_cached`` earlier ones whose K and V are there.
    """

    num_cached: int
    num_tokens: int

    @property
    def num_pairs(self) -> float:
        """Pairs of a query and a key, by the paper's count."""
        return self.num_tokens * (self.num_cached + self.num_tokens / 2)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Seconds of attention: a0, a1 and a2 of the module's head, none negative."""

    chunk_seconds: float
    pair_seconds: float
    token_seconds: float

    def __post_init__(self) -> None:
        """Raise ValueError where the cost would not grow with the number of tokens."""
        parts = (self.chunk_seconds, self.pair_seconds, self.token_seconds)
        if not all(isfinite(part) and part >= 0 for part in parts):
            raise ValueError(f"coefficients are finite and not negative, got {parts}")
        if self.pair_seconds + self.token_seconds <= 0:
            raise ValueError("tokens must cost time")

    def seconds(self, chunk: Chunk) -> float:
        """Return the time of one chunk; no tokens take none."""
        if chunk.num_tokens <= 0:
            return 0.0
        return (
            self.chunk_seconds
            + self.pair_seconds * chunk.num_pairs
            + self.token_seconds * chunk.num_tokens
        )


DEFAULT_COST = AttentionCost(chunk_seconds=2e-4, pair_seconds=1e-9, token_seconds=1e-6)
"""Begins a fit where nothing was profiled: its proportions are a large GPU's, its scale is lost
with the first observation."""


class AttentionCostFit:
    """Learns ``cost`` from the chunks of each step and the time that their attention took."""

    def __init__(self, first: AttentionCost = DEFAULT_COST) -> None:
        self.cost = first
        self.num_observed = 0
        parts = (first.chunk_seconds, first.pair_seconds, first.token_seconds)
        # A coefficient that began as 0 can still be learnt: it is pulled to next to nothing.
        self._unit = np.array([max(part, 1e-15) for part in parts])
        self._factors = np.ones(3)
        self._products = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._weight = 0.0
        self._log_scale = 0.0

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Learn from chunks computed together. Ignores what took no time or had no tokens."""
        held = [chunk for chunk in chunks if chunk.num_tokens > 0]
        if not held or not isfinite(seconds) or seconds <= 0:
            return
        if self.num_observed >= NUM_TRUSTED:
            expected = sum(self.cost.seconds(chunk) for chunk in held)
            seconds = min(max(seconds, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        counts = (
            len(held),
            sum(chunk.num_pairs for chunk in held),
            sum(chunk.num_tokens for chunk in held),
        )
        parts = self._unit * np.array(counts, dtype=np.float64)
        expected_first = float(parts.sum())
        shares, ratio = parts / expected_first, seconds / expected_first
        self.num_observed += 1
        self._products = self._products * _KEEP + np.outer(shares, shares)
        self._sums = self._sums * _KEEP + shares * ratio
        self._weight = self._weight * _KEEP + 1.0
        self._log_scale = self._log_scale * _KEEP + log(ratio)
        self._solve()

    def _solve(self) -> None:
        """Minimise the weighted squared errors and the pull, within the bounds."""
        scale = exp(self._log_scale / self._weight)
        self._factors = _bounded_minimum(
            self._products + PULL * np.eye(3),
            self._sums + PULL * scale,
            np.clip(self._factors, 0.0, MAX_FACTOR * scale),
            MAX_FACTOR * scale,
        )
        a0, a1, a2 = (float(part) for part in self._unit * self._factors)
        if a1 + a2 > 0:
            self.cost = AttentionCost(a0, a1, a2)


def _bounded_minimum(
    products: NDArray[np.float64],
    sums: NDArray[np.float64],
    start: NDArray[np.float64],
    most: float,
) -> NDArray[np.float64]:
    """Return the x in [0, most]^3 that minimises x'Ax/2 - b'x, with A positive definite.

    The free minimum where it lies within the bounds, which is nearly always; else by coordinate
    descent, which converges for a convex function on a box.
    """
    free = np.linalg.solve(products, sums).astype(np.float64)
    if (free >= 0).all() and (free <= most).all():
        return free
    a, b, x = products.tolist(), sums.tolist(), start.tolist()
    for _ in range(MAX_SWEEPS):
        change = 0.0
        for i in range(3):
            rest = b[i] - sum(a[i][j] * x[j] for j in range(3) if j != i)
            value = min(max(rest / a[i][i], 0.0), most)
            change = max(change, abs(value - x[i]))
            x[i] = value
        if change <= 1e-9 * max(*x):
            break
    return np.array(x)
