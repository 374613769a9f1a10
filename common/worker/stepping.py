"""From a step plan to the engine's rows."""

from common.engine.interface import SampleSpec, StepRow
from common.scheduler.local import PlannedRow, StepPlan


def step_rows(plan: StepPlan) -> list[StepRow]:
    """Return the engine's rows of a plan, in its order."""
    return [_step_row(row) for row in plan.rows]


def _step_row(row: PlannedRow) -> StepRow:
    sequence = row.sequence
    end = row.start + row.num_tokens
    return StepRow(
        token_ids=sequence.tokens(row.start, end),
        start=row.start,
        block_table=sequence.block_table,
        samples=_samples(row) if row.is_last else (),
    )


def _samples(row: PlannedRow) -> tuple[SampleSpec, ...]:
    sequence = row.sequence
    new = sequence.request.new
    if sequence.request.has_drawn:
        return (SampleSpec(new.params, sequence.choice, new.prompt, sequence.outputs),)
    return tuple(
        SampleSpec(new.params, choice, new.prompt, ()) for choice in range(new.params.num_choices)
    )
