"""Which part of a model one rank of a tensor-parallel engine holds and computes.

Rank r of N has the r-th N-th of the heads and of the MLP's inner width. Queries, keys, values, gate
and up are split by outputs; the attention's output and down by inputs, so that their products are
partial sums which all ranks add up. Embedding, norms and the vocabulary's product are whole.
"""

from dataclasses import dataclass, replace
from math import gcd

from common.errors import ConfigError
from common.models.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``num_ranks``; ValueError for a rank that is none of them."""

    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no rank."""
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"there is no rank {self.rank} of {self.num_ranks}")

    @property
    def is_root(self) -> bool:
        """Whether this rank draws tokens: it alone has the vocabulary's product."""
        return self.rank == 0

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the rank's own shape of the model; ConfigError where it cannot be split so.

        Each rank needs as many KV heads, each with its group of query heads, and as much of the
        MLP as the others.
        """
        count = self.num_ranks
        heads, inner = whole.num_kv_heads, whole.intermediate_size
        if heads % count or inner % count:
            possible = [n for n in range(1, heads + 1) if gcd(heads, inner) % n == 0]
            raise ConfigError(
                f"tensor_parallel {count}: {whole.folder} has {heads} KV heads and an MLP of"
                f" {inner}, which {count} does not divide; {', '.join(map(str, possible))} would"
            )
        return replace(
            whole,
            num_heads=whole.num_heads // count,
            num_kv_heads=heads // count,
            intermediate_size=inner // count,
        )

    def slices(self, whole: Shape, own: Shape) -> tuple[slice, ...]:
        """Return where a tensor of shape ``own`` lies in the model's, of shape ``whole``.

        Every dimension in which they differ is cut in ``num_ranks`` equal parts.
        """
        return tuple(
            slice(None) if size == full else slice(self.rank * size, (self.rank + 1) * size)
            for full, size in zip(whole, own, strict=True)
        )


WHOLE = Shard()
"""The only rank of an engine that is not parallel."""
