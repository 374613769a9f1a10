"""What the local scheduler plans and what comes back: the steps of an engine."""

from dataclasses import dataclass, field

from common.sampling import SampledToken
from common.scheduler.quota import Allowance
from common.scheduler.request import PendingDraw, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step and of the worker. Tokens and sequences."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    growth_tokens: int
    """Room for output that an admission asks for beside the prompt."""
    quota_seconds: float = 0.0
    """Most that the prompts of a step may take, as predicted; 0 is no bound but the tokens."""

    @property
    def min_chunk(self) -> int:
        """Smallest chunk of a prompt that is worth a step with decodes: an eighth of a step."""
        num_blocks = self.max_num_batched_tokens // (8 * self.block_size)
        return max(1, num_blocks * self.block_size or self.block_size // 2)


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
    is_decode: bool = False
    """Whether it goes on after a token that was drawn just before, not after computing tokens."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step computes. ``number`` counts the plans before it."""

    number: int
    rows: tuple[PlannedRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class StepDraft:
    """A step while it is being planned: what it holds so far and what still fits.

    ``allowance`` bounds its prompts beside, where they have a quota.
    """

    number: int
    tokens_left: int
    rows_left: int
    allowance: Allowance | None = None
    rows: list[PlannedRow] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits."""
        return self.tokens_left < 1 or self.rows_left < 1

    def add(self, row: PlannedRow) -> None:
        """Take a row in, which fits."""
        self.rows.append(row)
        self.tokens_left -= row.num_tokens
        self.rows_left -= 1
        row.sequence.last_planned = self.number

    def has(self, sequence: Sequence) -> bool:
        """Whether the sequence has a row already."""
        return sequence.last_planned == self.number


@dataclass(frozen=True, slots=True)
class RowFailed:
    """The engine could not compute a row; the others are unharmed."""

    message: str


RowResult = tuple[SampledToken, ...] | RowFailed
