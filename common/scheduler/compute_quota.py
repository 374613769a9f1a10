"""A worker's quota of compute: what the prompts of one step may take, as learnt from steps. Pure.

DualPath fits the time of attention (papers 2.8). What a worker can measure is the time of a whole
step, so that is what is fitted: the seconds of each step that computed prompts and nothing else,
against the pairs of a query and a key in its chunks, their tokens, and their number
(``attention_cost``). The quota is in these seconds. Steps with decodes beside teach nothing, and
the time of their decodes comes on top.

The part of that time that grows with the pairs is what attention itself takes, as far as it can be
told: ``attention_seconds``.
"""

from common.scheduler.attention_cost import AttentionCost, AttentionCostFit, Chunk
from common.scheduler.quota import Allowance
from common.scheduler.steps import StepPlan

ERROR_WEIGHT = 0.1


class ComputeQuota:
    """Gives each step its allowance. With ``seconds`` 0 there is none, but costs are learnt.

    Until one step has been measured the budget of tokens alone bounds a step. A step computes one
    block of ``block_size`` tokens of its first prompt whatever that costs.
    """

    def __init__(self, seconds: float, block_size: int) -> None:
        self._seconds = seconds
        self._block_size = block_size
        self._fit = AttentionCostFit()
        self._error = 0.0

    @property
    def cost(self) -> AttentionCost:
        """What chunks are taken to cost now."""
        return self._fit.cost

    @property
    def error(self) -> float:
        """Mean error of the predictions of late, as a share of the time taken; 0 before any.

        Nothing is predicted without a quota.
        """
        return self._error

    def allowance(self) -> Allowance | None:
        """Return what the prompts of the next step may take; None for any number of tokens."""
        if self._seconds <= 0 or not self._fit.num_observed:
            return None
        size = self._block_size
        return Allowance(self._fit.cost, self._seconds, block_size=size, min_tokens=size)

    def attention_seconds(self, plan: StepPlan) -> float:
        """Estimate what attention over the prompts of a step takes, by what is known now.

        0 while no step was measured. Of decodes nothing is estimated: memory bounds them, and no
        cost of theirs is fitted.
        """
        if not self._fit.num_observed:
            return 0.0
        prompts = (row for row in plan.rows if not row.is_decode)
        num_pairs = sum(Chunk(row.start, row.num_tokens).num_pairs for row in prompts)
        return self._fit.cost.pair_seconds * num_pairs

    def note(self, seconds: float, plan: StepPlan) -> None:
        """Learn from a finished step, which took ``seconds``; not from one of no time at all."""
        if seconds <= 0 or any(row.is_decode for row in plan.rows):
            return
        chunks = [Chunk(row.start, row.num_tokens) for row in plan.rows]
        if self._seconds > 0 and self._fit.num_observed:
            expected = sum(map(self._fit.cost.seconds, chunks))
            error = abs(expected - seconds) / seconds
            is_first = self._fit.num_observed == 1
            self._error += (1.0 if is_first else ERROR_WEIGHT) * (error - self._error)
        self._fit.observe(chunks, seconds)
