"""What rank 0 and the other ranks of one engine say to each other, over one socket for each.

Rank 0 leads: ``LoadShard``, ``MakePool`` (answered by ``PoolMade``), ``Join`` (answered by
``Joined``), then ``ComputeStep`` for every step, each answered by ``StepDone`` when it is computed.
A rank that cannot go on says ``RankFailed`` and ends. No message is ever repeated.
"""

from typing import Annotated

from pydantic import ConfigDict, Field, StrictBool
from pydantic.dataclasses import dataclass

from common.messages.fields import Count, CudaPoolHandle, PoolHandle

STRUCT = ConfigDict(extra="forbid")
MAX_TEXT = 4096

Text = Annotated[str, Field(strict=True, max_length=MAX_TEXT)]
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class EngineSettings:
    """What all ranks of an engine have in common.

    Layout fields are those of ``KVLayout``. ``engine`` is which of the engines it is, that of
    ``common.engine.cpu_engine`` or that of ``common.engine.cuda``; the latter's rank r computes on
    ``devices[r]``, a name of torch.
    """

    folder: Text
    num_ranks: Positive
    engine: Annotated[str, Field(pattern="^(cpu|cuda)$")]
    devices: tuple[Text, ...] = ()
    dtype: Text
    block_size: Positive
    kv_cache_dtype: Text = "auto"
    scales: tuple[float, ...] = ()
    has_weights: StrictBool = True
    num_threads: Positive = 1
    max_num_batched_tokens: Positive = 512
    max_num_seqs: Positive = 64
    use_graphs: StrictBool = True


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class LoadShard:
    """Rank 0 → rank, first: become rank ``rank``, and load what needs no pool.

    ``rendezvous`` is a file in which the ranks find each other.
    """

    rank: Positive
    settings: EngineSettings
    rendezvous: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class MakePool:
    """Rank 0 → rank: make a KV pool of as many blocks as rank 0 has, and answer ``PoolMade``."""

    num_blocks: Positive


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Join:
    """Rank 0 → rank, when all have pools: meet the others, make the engine, answer ``Joined``."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class ArraySpec:
    """Type and shape of an array in the payload, where the arrays lie behind each other.

    Each begins at a multiple of 8 bytes. An array that a step does not have has no ``dtype``.
    """

    dtype: Annotated[str, Field(pattern="^(|int32|int64)$")]
    shape: Annotated[tuple[Count, ...], Field(max_length=4)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class ComputeStep:
    """Rank 0 → rank: compute the batch in the payload, and answer ``StepDone`` afterwards."""

    number: Count
    arrays: Annotated[tuple[ArraySpec, ...], Field(max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PoolMade:
    """Rank → rank 0: the pool is there; peers of this host open it by ``handle``."""

    handle: Annotated[PoolHandle | CudaPoolHandle, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Joined:
    """Rank → rank 0: ready for steps."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class StepDone:
    """Rank → rank 0: the step is computed, and its K and V are in this rank's pool."""

    number: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RankFailed:
    """Rank → rank 0, its last words: why it ends."""

    reason: Text


Order = LoadShard | MakePool | Join | ComputeStep
Report = PoolMade | Joined | StepDone | RankFailed
