"""How much is queued on one engine and one node before others are preferred: alpha and beta.

    alpha = tokens that a node reads from the store in 3 s
    beta  = tokens that an engine computes in 5 s            (papers 2.7)

Both are amounts of tokens, from rates as measured. Values like "alpha = 8 KB", which circulate, are
a product of 400 Gb/s and 50 us that was computed wrong and means nothing (papers 3C).

``Adaptive`` moves them with use, within bounds: a link or an engine that idles gets more ahead, one
that is full less, so that requests stay where others can still take them.
"""

from dataclasses import dataclass
from math import inf

LOW_USE = 0.5
HIGH_USE = 0.8
LESS = 0.9
MORE = 1.1
LEAST_FACTOR = 0.5
MOST_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Horizons:
    """Seconds of work that make thresholds, and what goes with them.

    A group larger than ``max_cell_engines`` is scheduled as several cells.
    """

    read_seconds: float = 3.0
    compute_seconds: float = 5.0
    max_cell_engines: int = 64


PRESETS = {
    "small": Horizons(read_seconds=1.5, compute_seconds=2.5),
    "medium": Horizons(),
    "large": Horizons(read_seconds=6.0, compute_seconds=10.0),
}
"""By size of the cluster; medium is the paper's. Fewer engines are asked more often, so that less
has to be given ahead."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Alpha and beta of one engine, in tokens; infinite where the rate is not known."""

    read_tokens: float
    compute_tokens: float

    @classmethod
    def of(
        cls, read_rate: float, compute_rate: float, horizons: Horizons = PRESETS["medium"]
    ) -> "Thresholds":
        """Derive them from a node's rate of reads and an engine's of prompts, tokens per second."""
        return cls(
            horizons.read_seconds * read_rate if read_rate > 0 else inf,
            horizons.compute_seconds * compute_rate if compute_rate > 0 else inf,
        )


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Factors on alpha and beta that follow use, between a half and twice the profiled value."""

    read_factor: float = 1.0
    compute_factor: float = 1.0

    def after(self, link_use: float, compute_use: float) -> "Adaptive":
        """Return the factors after a period in which link and engines were so used, 0 to 1."""
        return Adaptive(
            _moved(self.read_factor, link_use), _moved(self.compute_factor, compute_use)
        )

    def applied_to(self, profiled: Thresholds) -> Thresholds:
        """Return the thresholds that hold now."""
        return Thresholds(
            profiled.read_tokens * self.read_factor, profiled.compute_tokens * self.compute_factor
        )


def _moved(factor: float, use: float) -> float:
    if use > HIGH_USE:
        return max(LEAST_FACTOR, factor * LESS)
    if use < LOW_USE:
        return min(MOST_FACTOR, factor * MORE)
    return factor
