"""How fast a worker is, from the times of its steps. Pure.

Rates are quotients of sums that fade with the worker's busy time, so that a step counts by how long
it took and one that was slow for a reason of its own does little.
"""

from collections.abc import Sequence as SequenceOf

from common.messages.fields import WorkerRates
from common.scheduler.decode_cost import HALF_LIFE_SECONDS, CostMeter
from common.scheduler.steps import PlannedRow, StepPlan

EWMA_WEIGHT = 0.3

SLOWEST_SHARE = 1.25
"""How much longer than alone decodes may take on average where that is over the SLA."""

MAX_DEBT = 8.0
"""Target times after which prompts get their chunk, however long the last one took."""


class _FadingRate:
    """A quotient of two sums; ``value`` is 0 while nothing was added."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        keep: float = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds

    @property
    def value(self) -> float:
        return self._amount / self._seconds if self._seconds > 0 else 0.0


class StepRates:
    """Learns from every finished step.

    ``block_size`` is in tokens, and so is ``min_chunk``: the smallest chunk of a prompt that is
    worth a step with decodes.
    """

    def __init__(self, block_size: int, min_chunk: int) -> None:
        self._block_size = block_size
        self._min_chunk = min_chunk
        self._clock = 0.0
        self._prefill = _FadingRate()
        self._prefill_alone = _FadingRate()
        self._decode = _FadingRate()
        self._decode_alone = 0.0
        self._decode_cost = CostMeter()
        self._token_seconds = 0.0
        self._token_seconds_alone = 0.0
        self._target = 0.0
        self._credit = 0.0
        self._spent_by: int | None = None
        self._held_back: set[int] = set()

    @property
    def token_seconds(self) -> float:
        """EWMA of the time between two tokens of a decoding sequence; 0 while not known."""
        return self._token_seconds

    def rates(self) -> WorkerRates:
        """Return the rates of late; 0 where nothing was measured."""
        cost = self._decode_cost.cost()
        return WorkerRates(
            prefill_tokens_per_second=self._prefill.value,
            decode_step_seconds=self._token_seconds_alone or self._token_seconds,
            decode_tokens_per_second=self._decode.value,
            decode_base_seconds=cost.base,
            decode_seconds_per_sequence=cost.each,
            decode_seconds_per_token=cost.token,
        )

    def prompt_allowance(self, sla_seconds: float) -> int | None:
        """Return how many prompt tokens the next step may have beside decodes; None for any.

        Steps with decodes are to take ``sla_seconds`` on average, or ``SLOWEST_SHARE`` of what they
        take alone where that is more. A step with prompts may take longer, in one chunk that is
        worth its step's fixed cost; then those after it have none until the average is right again.
        None while the rate is not known.
        """
        self._target = max(sla_seconds, SLOWEST_SHARE * self._decode_alone)
        rate = self._prefill_alone.value
        if rate <= 0:
            return None
        if self._credit < 0 or self._spent_by is not None:
            return 0
        return max(self._min_chunk, int(rate * self._target))

    def spend(self, plan_number: int) -> None:
        """A step with prompts and decodes was planned; no other until it is finished."""
        self._spent_by = plan_number

    def hold_back(self, plan_number: int) -> None:
        """A step of decodes is planned while prompts wait: they are computed the slower for it."""
        self._held_back.add(plan_number)

    def note(self, seconds: float, plan: StepPlan) -> None:
        """Learn from a finished step, which took ``seconds`` since the one before it ended.

        Steps are told in order, and those of no time at all not.
        """
        if self._spent_by is not None and plan.number >= self._spent_by:
            self._spent_by = None
        was_held_back = plan.number in self._held_back
        self._held_back.discard(plan.number)
        if seconds <= 0:
            return
        self._clock += seconds
        if was_held_back:
            self._prefill.add(0, seconds)
        decodes = [row for row in plan.rows if row.is_decode]
        num_prompt_tokens = plan.num_tokens - len(decodes)
        self._note_gaps(plan.rows, is_alone=not num_prompt_tokens)
        if decodes:
            self._decode.add(len(decodes), seconds)
        if decodes and not num_prompt_tokens:
            self._decode_alone = _ewma(self._decode_alone, seconds)
            num_tokens = sum(row.start + row.num_tokens for row in decodes)
            self._decode_cost.add(len(decodes), num_tokens, seconds)
        if num_prompt_tokens >= self._block_size:
            # Fewer say how long a step takes, and not how fast prompts are computed.
            self._prefill.add(num_prompt_tokens, seconds)
            beside = self._decode_alone if decodes else 0.0
            self._prefill_alone.add(num_prompt_tokens, max(seconds - beside, seconds / 10))
        if decodes:
            least = -MAX_DEBT * self._target
            credit = self._credit + self._target - seconds
            self._credit = min(self._target, max(least, credit))

    def _note_gaps(self, rows: SequenceOf[PlannedRow], *, is_alone: bool) -> None:
        gaps: list[float] = []
        for row in rows:
            if not row.is_last:
                continue
            sequence = row.sequence
            if row.is_decode and sequence.drawn_at is not None:
                gaps.append(self._clock - sequence.drawn_at)
            sequence.drawn_at = self._clock
        if gaps:
            gap = sum(gaps) / len(gaps)
            self._token_seconds = _ewma(self._token_seconds, gap)
            if is_alone:
                self._token_seconds_alone = _ewma(self._token_seconds_alone, gap)


def _ewma(before: float, value: float) -> float:
    return value if before == 0 else before + EWMA_WEIGHT * (value - before)
