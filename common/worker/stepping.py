"""From a step plan to the engine's rows, and from its outcome to the plan's results."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

import structlog

from common.engine.failure import RowsFailed
from common.engine.interface import Engine, SampleSpec, StepRow
from common.errors import RequestError
from common.scheduler.local import PlannedRow, RowFailed, RowResult, StepPlan

log = structlog.get_logger()


async def execute_step(engine: Engine, thread: Executor, plan: StepPlan) -> Sequence[RowResult]:
    """Have the engine's thread compute a plan; one result a row, in its order."""
    loop = asyncio.get_running_loop()
    rows = step_rows(plan)
    try:
        return await loop.run_in_executor(thread, engine.execute, rows)
    except RowsFailed as failed:
        return [
            RowFailed(outcome.message) if isinstance(outcome, RequestError) else outcome
            for outcome in failed.outcomes
        ]
    except (RuntimeError, ValueError, IndexError, MemoryError) as error:
        # Whatever the engine's libraries raise fails this step's requests, not the worker.
        log.exception("step_failed", num_rows=len(rows), reason=str(error))
        return [RowFailed(f"the engine failed: {error}")] * len(rows)


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
