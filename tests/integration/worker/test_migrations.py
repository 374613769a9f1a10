"""Running decodes that are moved to another worker in their middle, and every trouble then."""

from pathlib import Path

import pytest

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.control import (
    DecodeStarted,
    MigrationFailed,
    RequestFailed,
    RequestFinished,
    SetDraining,
)
from common.messages.fields import Role
from common.sampling import SamplingParams
from tests.support.running_worker import LAYOUT, RunningWorker, WorkerOptions
from tests.support.worker_harness import Harness, expected, harness

LONG = SamplingParams(seed=1, max_tokens=40, temperature=0)
HOT = SamplingParams(seed=7, max_tokens=40, temperature=1)
PROMPT = tuple(range(100, 161))


async def start(
    cluster: Harness, options: WorkerOptions | None = None, target: WorkerOptions | None = None
) -> tuple[RunningWorker, RunningWorker]:
    """Start the worker that decodes and the one that a decode is moved to."""
    source = await cluster.start_worker("source", Role.DECODE, options)
    return source, await cluster.start_worker("target", Role.DECODE, target or options)


async def stop_in_the_middle(
    cluster: Harness, source: RunningWorker, params: SamplingParams = LONG, num_steps: int = 12
) -> None:
    """Let the source decode a request alone, and hold it in a step far from both ends."""
    source.steps.hold(num_steps)
    cluster.place("r", PROMPT, params, prefill=source.name, decode=None)
    await source.steps.arrived(num_steps + 1)


async def move(cluster: Harness, source: RunningWorker, target: RunningWorker) -> None:
    """Order the request away and let the step that is open end."""
    cluster.migrate("r", source.name, target.name)
    await cluster.orders_taken(source.name)
    source.steps.open()


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("params", [LONG, HOT], ids=["greedy", "hot"])
async def test_a_decode_that_is_moved_twice_goes_on_as_if_nothing_had_been(
    tmp_path: Path, params: SamplingParams, max_in_flight: int
) -> None:
    options = WorkerOptions(max_in_flight=max_in_flight)
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster, options)
        await stop_in_the_middle(cluster, source, params)
        target.steps.hold(10)
        await move(cluster, source, target)
        await target.steps.arrived(11)
        await cluster.heard("target", DecodeStarted, "r")
        await source.idle()
        await move(cluster, target, source)
        stream = await cluster.answer("r")
        assert stream.token_ids(0) == expected(PROMPT, params)
        await cluster.heard("source", RequestFinished, "r")
        assert not [entry for entry in cluster.told if isinstance(entry[1], MigrationFailed)]
        await source.idle()
        await target.idle()


async def test_only_what_the_target_lacks_is_moved_and_nothing_is_computed_again(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster)
        cluster.place("before", PROMPT, LONG, prefill="target", decode=None)
        await cluster.answer("before")
        await target.idle()
        num_steps = target.steps.num_arrived
        await stop_in_the_middle(cluster, source, num_steps=14)
        await move(cluster, source, target)
        await cluster.answer("r")
        await source.idle()
        await target.idle()
        # The target had computed the very same tokens: all whole blocks are there, and the source
        # has some tokens of one more.
        moved = source.hybrid.metrics.registry.get_sample_value("flowpath_transfer_bytes_total")
        assert moved == LAYOUT.block_bytes
        num_moved = LONG.max_tokens - (target.steps.num_arrived - num_steps)
        assert 10 <= num_moved < LONG.max_tokens, "one step a token, and none for the others"


async def test_a_target_without_room_leaves_the_decode_where_it_is(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster, target=WorkerOptions(num_blocks=4))
        await stop_in_the_middle(cluster, source)
        await move(cluster, source, target)
        failed = await cluster.heard("source", MigrationFailed, "r")
        assert failed.message.startswith(str(ErrorCode.NO_ROOM))
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, LONG)
        await cluster.heard("source", RequestFinished, "r")
        await source.idle()
        await target.idle()


async def test_a_draining_target_takes_no_decode_and_a_draining_source_gives_it_away(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster)
        await stop_in_the_middle(cluster, source)
        cluster.order("target", SetDraining(is_draining=True))
        await cluster.orders_taken("target")
        source.steps.hold(3)
        cluster.migrate("r", "source", "target")
        failed = await cluster.heard("source", MigrationFailed, "r")
        assert "target is draining" in failed.message
        await source.steps.arrived(16)
        cluster.order("target", SetDraining(is_draining=False))
        await cluster.orders_taken("target")
        cluster.order("source", SetDraining(is_draining=True))
        await move(cluster, source, target)
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, LONG)
        await cluster.heard("target", RequestFinished, "r")
        await source.idle()
        await target.idle()


async def test_a_target_that_dies_in_the_write_leaves_the_decode_where_it_is(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster)
        await stop_in_the_middle(cluster, source)
        source.writes.hold()
        await move(cluster, source, target)
        await source.writes.arrived(1)
        cluster.bury("target", "source")
        await cluster.orders_taken("source")
        source.writes.open()
        failed = await cluster.heard("source", MigrationFailed, "r")
        assert "target left: died" in failed.message
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, LONG)
        await source.idle()


async def test_a_source_that_dies_in_the_write_leaves_nothing_at_the_target(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster)
        await stop_in_the_middle(cluster, source)
        source.writes.hold()
        await move(cluster, source, target)
        await source.writes.arrived(1)
        cluster.bury("source", "target")
        dropped = await cluster.heard("target", RequestFinished, "r")
        assert dropped.was_cancelled
        await target.idle()


@pytest.mark.parametrize("workers", [("source", "target"), ("target",), ("source",)], ids=str)
async def test_a_client_that_cancels_during_the_write_ends_both_sides(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster)
        await stop_in_the_middle(cluster, source)
        source.writes.hold()
        await move(cluster, source, target)
        await source.writes.arrived(1)
        cluster.cancel("r", *workers)
        for worker in workers:
            await cluster.orders_taken(worker)
        source.writes.open()
        ended = await cluster.heard("source", RequestFinished, "r")
        assert ended.was_cancelled
        await source.idle()
        await target.idle()
        assert not [entry for entry in cluster.told if isinstance(entry[1], MigrationFailed)]


async def test_a_source_that_fails_the_request_during_the_write_ends_both_sides(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster)
        await stop_in_the_middle(cluster, source)
        source.writes.hold()
        await move(cluster, source, target)
        await source.writes.arrived(1)
        source.hybrid.abandon(ErrorCode.SHUTTING_DOWN, "over")
        source.writes.open()
        failed = await cluster.heard("source", RequestFailed, "r")
        assert failed.code is ErrorCode.SHUTTING_DOWN
        await source.idle()
        await target.idle()


async def test_a_request_whose_last_token_was_in_the_open_step_just_ends(tmp_path: Path) -> None:
    params = SamplingParams(seed=1, max_tokens=12, temperature=0)
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster)
        await stop_in_the_middle(cluster, source, params)  # two chunks, then the 12th token
        await move(cluster, source, target)
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, params)
        ended = await cluster.heard("source", RequestFinished, "r")
        assert not ended.was_cancelled
        await source.idle()
        await target.idle()
        assert cluster.told == [("source", DecodeStarted(request_id=RequestId("r")))]


async def test_what_cannot_be_moved_is_told_by_name_and_goes_on(tmp_path: Path) -> None:
    several = SamplingParams(seed=7, max_tokens=20, temperature=1, num_choices=2)
    async with harness(tmp_path) as cluster:
        source, _ = await start(cluster)
        cluster.migrate("unknown", "source", "target")
        failed = await cluster.heard("source", MigrationFailed, "unknown")
        assert "unknown" in failed.message
        await stop_in_the_middle(cluster, source, several)
        cluster.migrate("r", "source", "target")
        await cluster.heard("source", MigrationFailed, "r")
        cluster.migrate("r", "source", "source")
        failed = await cluster.heard("source", MigrationFailed, "r")
        assert "already" in failed.message
        source.steps.open()
        stream = await cluster.answer("r", 2)
        for choice in range(2):
            assert stream.token_ids(choice) == expected(PROMPT, several, choice)
        await source.idle()


async def test_a_repeated_order_moves_a_decode_once(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        source, target = await start(cluster)
        await stop_in_the_middle(cluster, source)
        source.writes.hold()
        cluster.migrate("r", "source", "target")
        await move(cluster, source, target)
        await source.writes.arrived(1)
        cluster.migrate("r", "source", "target")
        await cluster.orders_taken("source")
        source.writes.open()
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, LONG)
        await cluster.heard("target", RequestFinished, "r")
        await source.idle()
        await target.idle()
        assert not [entry for entry in cluster.told if isinstance(entry[1], MigrationFailed)]
