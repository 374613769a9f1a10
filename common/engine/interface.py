"""What a scheduler asks of an engine in one step, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.sampling import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One draw after a row's last token.

    ``output_token_ids`` are the choice's tokens so far (penalties read them); the draw is for
    generated position ``len(output_token_ids)`` and is a pure function of (seed, choice,
    position) and of the logits.
    """

    params: SamplingParams
    choice: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepRow:
    """Tokens of one sequence to compute in one step: a prefill chunk, or one decoded token.

    ``token_ids`` go to positions ``start .. start + len(token_ids) - 1``; K and V of all earlier
    positions are in the pool already. ``block_table`` lists the pool blocks of positions
    0 .. start + len(token_ids) - 1 in order. ``samples`` is empty for a chunk that is not the
    prompt's last, and has n entries after the last chunk of a request with n choices.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: tuple[SampleSpec, ...] = ()


class Engine(Protocol):
    """Executes steps over one KV pool. Called from one thread at a time."""

    def execute(self, rows: Sequence[StepRow]) -> list[tuple[SampledToken, ...]]:
        """Compute all rows in one pass and write their K and V into the pool.

        Returns the drawn tokens of each row, in the order of ``rows`` and of their ``samples``.

        Raises ``common.engine.failure.RowsFailed`` when some rows have no tokens (their logits are
        no numbers): it holds each row's outcome, and the K and V of all rows are written.
        ValueError for a malformed row, before anything is computed.
        """
        ...
