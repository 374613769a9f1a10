"""From step plans to the engine's rows, and from their outcomes to the plans' results."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from time import perf_counter

import structlog

from common.engine.failure import EngineBroken, RowOutcome, RowsFailed
from common.engine.interface import Engine, LaunchedStep, PendingToken, SampleSpec, StepRow
from common.errors import RequestError
from common.scheduler.steps import PlannedRow, RowFailed, RowResult, StepPlan

log = structlog.get_logger()

NumberOf = Callable[[int], int]

ENGINE_ERRORS = (RuntimeError, ValueError, IndexError, MemoryError)
"""Whatever the engine's libraries raise fails a step's requests, not the worker.

But where the engine says that it is broken (``EngineBroken``) the worker ends, and its requests go
on elsewhere."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A plan and its outcome: one result a row, in order.

    ``launch_seconds`` is the time that the engine's thread took to hand it to the device, and
    ``device_seconds`` the device's own, where it can tell (``LaunchedStep.seconds_after``): the
    thread sees a step's end late when it is launching the next one.
    """

    plan: StepPlan
    results: Sequence[RowResult]
    launch_seconds: float
    device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    step: LaunchedStep
    launched_at: float
    launch_seconds: float
    before: LaunchedStep | None
    """The one that was in flight when it was launched."""


class StepPipeline:
    """Keeps an engine busy: launches plans and collects their outcomes, oldest first.

    All of the engine's work is done in its one thread. An engine that may have two steps in flight
    gets the next one before the outcome of the last is waited for. With ``slow_down`` above 1 the
    thread holds each outcome back until the step has taken so many times as long.
    """

    def __init__(self, engine: Engine, thread: Executor, slow_down: float = 1.0) -> None:
        self._engine = engine
        self._thread = thread
        self._slow_down = slow_down
        self._never = threading.Event()
        self._free_at = 0.0
        self._in_flight: deque[_InFlight] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight."""
        return not self._in_flight

    def turn(self, plan: StepPlan | None) -> asyncio.Future[list[FinishedStep]]:
        """Launch a plan, if there is one, and return what is finished.

        The thread begins at once, and waits for the oldest step when no more may be launched, or
        nothing is to be. EngineBroken when the engine has lost a rank: nothing it has is of use.
        """
        rows = None if plan is None else step_rows(plan, self._number_of)
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, self._turn, plan, rows)

    def __enter__(self) -> None:
        """Begin; at the end the engine's thread waits for what is in flight, as its last work.

        Until then the engine may write blocks of the pool.
        """

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._collect_all)

    def _collect_all(self) -> list[FinishedStep]:
        return [self._collect() for _ in range(len(self._in_flight))]

    def _turn(self, plan: StepPlan | None, rows: list[StepRow] | None) -> list[FinishedStep]:
        if plan is not None and rows is not None:
            started = perf_counter()
            try:
                step = self._engine.launch(rows)
            except EngineBroken:
                raise
            except ENGINE_ERRORS as error:
                failed = FinishedStep(plan, _all_failed(plan, error), perf_counter() - started)
                return [*self._collect_all(), failed]
            before = self._in_flight[-1].step if self._in_flight else None
            took = perf_counter() - started
            self._in_flight.append(_InFlight(plan, step, started, took, before))
            if len(self._in_flight) < self._engine.max_in_flight:
                return []
        return [self._collect()] if self._in_flight else []

    def _collect(self) -> FinishedStep:
        oldest = self._in_flight.popleft()
        results: Sequence[RowResult]
        try:
            results = self._engine.collect(oldest.step)
        except RowsFailed as failed:
            results = [_result(outcome) for outcome in failed.outcomes]
        except EngineBroken:
            raise
        except ENGINE_ERRORS as error:
            failed_ones = _all_failed(oldest.plan, error)
            return FinishedStep(oldest.plan, failed_ones, oldest.launch_seconds)
        if self._slow_down > 1:
            self._hold_back(oldest)
            return FinishedStep(oldest.plan, results, oldest.launch_seconds)
        try:
            seconds = oldest.step.seconds_after(oldest.before)
        except ENGINE_ERRORS as error:
            log.warning("step_not_timed", reason=str(error))
            seconds = None
        return FinishedStep(oldest.plan, results, oldest.launch_seconds, seconds)

    def _hold_back(self, step: _InFlight) -> None:
        """Wait as much longer as the step is to take; it began when the one before it was over."""
        seconds = perf_counter() - max(step.launched_at, self._free_at)
        self._never.wait(seconds * (self._slow_down - 1))
        self._free_at = perf_counter()

    def _number_of(self, plan_number: int) -> int:
        return next(
            flying.step.number for flying in self._in_flight if flying.plan.number == plan_number
        )


def step_rows(plan: StepPlan, number_of: NumberOf) -> list[StepRow]:
    """Return the engine's rows of a plan; ``number_of`` tells a plan's number as a step."""
    return [_step_row(row, number_of) for row in plan.rows]


def _step_row(row: PlannedRow, number_of: NumberOf) -> StepRow:
    sequence = row.sequence
    end = row.start + row.num_tokens
    if row.pending is None:
        return StepRow(
            token_ids=sequence.tokens(row.start, end),
            start=row.start,
            block_table=sequence.block_table,
            samples=_samples(row) if row.is_last else (),
        )
    return StepRow(
        token_ids=(0,),
        start=row.start,
        block_table=sequence.block_table,
        samples=_samples(row),
        pending=PendingToken(number_of(row.pending.step), row.pending.row),
    )


def _samples(row: PlannedRow) -> tuple[SampleSpec, ...]:
    sequence = row.sequence
    params, prompt = sequence.request.new.params, sequence.request.new.prompt
    drawn: Sequence[int] = ()
    if params.num_drawn:
        prompt, drawn = prompt[: -params.num_drawn], prompt[-params.num_drawn :]
    if sequence.request.has_drawn:
        pending = 0 if row.pending is None else 1
        outputs = [*drawn, *sequence.outputs] if drawn else sequence.outputs
        return (SampleSpec(params, sequence.choice, prompt, outputs, pending),)
    return tuple(SampleSpec(params, choice, prompt, drawn) for choice in params.choices)


def _result(outcome: RowOutcome) -> RowResult:
    return RowFailed(outcome.message) if isinstance(outcome, RequestError) else outcome


def _all_failed(plan: StepPlan, error: Exception) -> list[RowResult]:
    log.error("step_failed", num_rows=len(plan.rows), reason=str(error), exc_info=error)
    return [RowFailed(f"the engine failed: {error}")] * len(plan.rows)
