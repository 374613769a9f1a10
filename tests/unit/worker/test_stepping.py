"""Plans on their way through an engine that has two steps in flight."""

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import pytest_asyncio

from common.engine.failure import EngineBroken, RowsFailed
from common.engine.interface import DeferredStep, LaunchedStep, StepRow
from common.errors import ErrorCode, RequestError
from common.sampling import SampledToken
from common.scheduler.steps import RowFailed, StepPlan
from common.worker import stepping
from common.worker.stepping import StepPipeline
from tests.support.scheduler_bench import Bench, new_request

DRAWN = [(SampledToken(token_id=7),)]


@dataclass(frozen=True)
class TimedOnDevice:
    """A step whose device says that it took 10 s for each of its number since the one before."""

    number: int

    def seconds_after(self, before: LaunchedStep | None) -> float | None:
        return 10.0 * (self.number - (before.number if before else 0))


class ScriptedEngine:
    """Notes what is asked of it; ``collect`` of a step draws or raises what the script says."""

    max_in_flight = 2

    def __init__(self) -> None:
        self.told: list[str] = []
        self.rows: list[Sequence[StepRow]] = []
        self.refused: set[int] = set()
        self.failing: dict[int, Exception] = {}
        self.takes: Callable[[], None] = lambda: None
        self.launched: Callable[[int, Sequence[StepRow]], LaunchedStep] = DeferredStep

    def launch(self, rows: Sequence[StepRow]) -> LaunchedStep:
        number = len(self.rows)
        self.told.append(f"launch {number}")
        if number in self.refused:
            raise ValueError("row 0 is malformed")
        self.rows.append(rows)
        return self.launched(number, rows)

    def collect(self, step: LaunchedStep) -> list[tuple[SampledToken, ...]]:
        self.told.append(f"collect {step.number}")
        self.takes()
        if step.number in self.failing:
            raise self.failing[step.number]
        return DRAWN


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest_asyncio.fixture
async def pipeline(engine: ScriptedEngine) -> AsyncIterator[StepPipeline]:
    thread = ThreadPoolExecutor(1)
    yield StepPipeline(engine, thread)
    thread.shutdown(wait=True)


@pytest.fixture
def bench() -> Bench:
    """A sequence that decodes."""
    bench = Bench()
    bench.add(new_request("a", [1, 2, 3], max_tokens=9))
    bench.step()
    return bench


def planned(bench: Bench) -> StepPlan:
    plan, _ = bench.plan()
    assert plan is not None
    return plan


async def test_the_next_step_is_launched_before_the_last_is_waited_for(
    engine: ScriptedEngine, pipeline: StepPipeline, bench: Bench
) -> None:
    first, second = planned(bench), planned(bench)
    assert await pipeline.turn(first) == []
    (finished,) = await pipeline.turn(second)
    assert (finished.plan, finished.results) == (first, DRAWN)
    assert engine.told == ["launch 0", "launch 1", "collect 0"]
    pending = engine.rows[1][0].pending
    assert pending is not None
    assert (pending.step, pending.row) == (0, 0)
    assert engine.rows[1][0].samples[0].position == 2
    (finished,) = await pipeline.turn(None)
    assert finished.plan == second
    assert pipeline.is_idle
    assert await pipeline.turn(None) == []


async def test_a_step_s_time_on_the_device_is_since_the_one_that_was_in_flight(
    engine: ScriptedEngine, pipeline: StepPipeline, bench: Bench
) -> None:
    await pipeline.turn(planned(bench))
    (finished,) = await pipeline.turn(None)
    assert finished.device_seconds is None, "an engine that computes when it is asked cannot tell"
    bench.finish(finished.plan)
    engine.launched = lambda number, _: TimedOnDevice(number)
    await pipeline.turn(planned(bench))
    (first,) = await pipeline.turn(planned(bench))
    (second,) = await pipeline.turn(None)
    assert (first.device_seconds, second.device_seconds) == (10.0, 10.0)
    bench.finish(first.plan)
    bench.finish(second.plan)
    engine.failing = {3: RuntimeError("the device is lost")}
    await pipeline.turn(planned(bench))
    (failed,) = await pipeline.turn(None)
    assert failed.device_seconds is None


async def test_a_step_that_cannot_be_launched_fails_after_those_before_it(
    engine: ScriptedEngine, pipeline: StepPipeline, bench: Bench
) -> None:
    engine.refused = {1}
    first, second = planned(bench), planned(bench)
    await pipeline.turn(first)
    earlier, failed = await pipeline.turn(second)
    assert (earlier.plan, earlier.results) == (first, DRAWN)
    assert failed.plan == second
    assert failed.results == [RowFailed("the engine failed: row 0 is malformed")]
    assert pipeline.is_idle


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("the device is lost"), "the engine failed: the device is lost"),
        (RowsFailed([RequestError(ErrorCode.INTERNAL, "no number")]), "no number"),
    ],
)
async def test_a_step_that_fails_fails_its_rows(
    engine: ScriptedEngine,
    pipeline: StepPipeline,
    bench: Bench,
    error: Exception,
    message: str,
) -> None:
    engine.failing = {0: error}
    await pipeline.turn(planned(bench))
    (finished,) = await pipeline.turn(None)
    assert finished.results == [RowFailed(message)]


async def test_an_engine_that_is_broken_ends_the_worker_and_fails_no_request(
    engine: ScriptedEngine, pipeline: StepPipeline, bench: Bench
) -> None:
    engine.failing = {0: EngineBroken("rank 1 was killed")}
    await pipeline.turn(planned(bench))
    with pytest.raises(EngineBroken, match="rank 1 was killed"):
        await pipeline.turn(None)


async def test_at_the_end_the_thread_waits_for_what_is_in_flight(
    engine: ScriptedEngine, pipeline: StepPipeline, bench: Bench
) -> None:
    with pipeline:
        await pipeline.turn(planned(bench))
    assert await pipeline.turn(None) == []  # behind it in the same thread
    assert engine.told == ["launch 0", "collect 0"]


async def test_a_slowed_down_step_takes_so_many_times_as_long(
    engine: ScriptedEngine, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(stepping, "perf_counter", clock)
    with ThreadPoolExecutor(1) as thread:
        pipeline = StepPipeline(engine, thread, slow_down=3.0)
        monkeypatch.setattr(pipeline, "_never", clock)
        engine.takes = lambda: clock.wait(2.0)
        engine.launched = lambda number, _: TimedOnDevice(number)
        first, second = planned(bench), planned(bench)
        await pipeline.turn(first)
        (slowed,) = await pipeline.turn(second)
        assert clock.now == 6.0, "2 s of its own and twice as long again"
        assert slowed.device_seconds is None, "its device knows nothing of that"
        await pipeline.turn(None)
        assert clock.now == 12.0, "the second begins when the first is over"


class FakeClock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds
