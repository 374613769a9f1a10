"""What a scheduler asks of an engine in one step, and what comes back.

Steps may overlap: ``launch`` enqueues one, and while it runs the next may be launched, whose rows
then name tokens that nobody has seen yet (``PendingToken``); ``collect`` waits for its outcome.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.sampling import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class PendingToken:
    """The first token drawn for row ``row`` of the launched step ``step``, not yet collected."""

    step: int
    row: int


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One draw after a row's last token.

    ``output_token_ids`` are the choice's collected tokens (penalties read them) and ``num_pending``
    counts those in flight after them. The draw is for generated position ``position`` and is a
    pure function of (seed, choice, position) and of the logits. A choice with penalties has no
    pending tokens.
    """

    params: SamplingParams
    choice: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    num_pending: int = 0

    @property
    def position(self) -> int:
        """Tokens generated before this one."""
        return len(self.output_token_ids) + self.num_pending


@dataclass(frozen=True, slots=True)
class StepRow:
    """Tokens of one sequence to compute in one step: a prefill chunk, or one decoded token.

    ``token_ids`` go to positions ``start .. start + len(token_ids) - 1``; K and V of all earlier
    positions are in the pool, or will be when the steps launched before have run. ``block_table``
    lists the pool blocks of positions 0 .. start + len(token_ids) - 1 in order. ``samples`` is
    empty for a chunk that is not the prompt's last, and has n entries after the last chunk of a
    request with n choices. Where ``pending`` is set, the last of ``token_ids`` means nothing: the
    token is the pending one.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: tuple[SampleSpec, ...] = ()
    pending: PendingToken | None = None


class LaunchedStep(Protocol):
    """A step that an engine has taken on."""

    @property
    def number(self) -> int:
        """How many steps were launched before."""
        ...

    def seconds_after(self, before: "LaunchedStep | None") -> float | None:
        """Return the device's time from the end of the step before to its own end.

        That is the step which was in flight when it was launched; where none was (None), the time
        is from its own launch. Both were collected. None where the device cannot tell.
        """
        ...


class Engine(Protocol):
    """Executes steps over one KV pool. Called from one thread at a time."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched and not yet collected."""
        ...

    def launch(self, rows: Sequence[StepRow]) -> LaunchedStep:
        """Take on a step that computes all rows in one pass and writes their K and V into the pool.

        ValueError for a malformed row, before anything is computed or counted.
        """
        ...

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        """Wait for the oldest launched step and return the drawn tokens of each of its rows.

        They are in the order of the rows and of their ``samples``.

        Raises ``common.engine.failure.RowsFailed`` when some rows have no tokens (their logits are
        no numbers): it holds each row's outcome, and the K and V of all rows are written.
        """
        ...


class SynchronousStep:
    """Base of steps that are computed when they are collected."""

    __slots__ = ()

    def seconds_after(self, before: LaunchedStep | None) -> float | None:
        """Return None: whoever waited for the step knows how long it took."""
        return None


@dataclass(frozen=True, slots=True)
class DeferredStep(SynchronousStep):
    """A step of an engine that computes when it is asked for the outcome."""

    number: int
    rows: Sequence[StepRow]
