"""What the local scheduler plans and what comes back: the steps of an engine."""

from dataclasses import dataclass

from common.sampling import SampledToken
from common.scheduler.request import PendingDraw, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step and of the worker. Tokens and sequences."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    growth_tokens: int
    """Room for output that an admission asks for beside the prompt."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One row of a step: ``num_tokens`` tokens of a sequence from position ``start``.

    ``pending`` is the draw of an earlier step that gives the row's last token, when that step's
    outcome is not known yet.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_last: bool
    """Whether the row reaches the sequence's last token, so that tokens are drawn after it."""
    pending: PendingDraw | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step computes. ``number`` counts the plans before it."""

    number: int
    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowFailed:
    """The engine could not compute a row; the others are unharmed."""

    message: str


RowResult = tuple[SampledToken, ...] | RowFailed
