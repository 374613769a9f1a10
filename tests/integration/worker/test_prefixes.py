"""Prefixes that another worker's cache holds are copied instead of computed, when that works."""

from pathlib import Path

import pytest

from common.ids import RequestId
from common.messages.control import PrefillRefused, RequestFinished, SetDraining
from common.messages.fields import PhaseName, Role
from common.sampling import SamplingParams
from common.worker import prefixes
from tests.support.running_worker import LAYOUT, RunningWorker, WorkerOptions
from tests.support.worker_harness import Harness, expected, harness

GREEDY = SamplingParams(seed=1, max_tokens=5, temperature=0)
PREFIX = tuple(range(100, 164))
PROMPT = (*PREFIX, *range(30))
NUM_PREFIX_BLOCKS = len(PREFIX) // LAYOUT.block_size


def value(worker: RunningWorker, sample: str) -> float:
    return worker.hybrid.metrics.registry.get_sample_value(f"flowpath_{sample}") or 0.0


async def start(
    cluster: Harness, waiter: WorkerOptions | None = None
) -> tuple[RunningWorker, RunningWorker]:
    """Start a worker that holds the prefix, and one that is to get it."""
    holder = await cluster.start_worker("holder", Role.DECODE)
    cluster.place("first", PREFIX, GREEDY, prefill="holder", decode=None)
    await cluster.answer("first")
    await holder.idle()
    return holder, await cluster.start_worker("waiter", Role.PREFILL, waiter)


def place(cluster: Harness) -> None:
    cluster.place("r", PROMPT, GREEDY, prefill="waiter", decode=None, num_prefix_tokens=len(PREFIX))


async def answered(cluster: Harness, waiter: RunningWorker) -> int:
    """Wait for the right answer; return how many tokens of the prompt were computed."""
    assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
    await cluster.heard("waiter", RequestFinished, "r")
    await waiter.idle()
    return int(value(waiter, "engine_step_tokens_sum")) - (GREEDY.max_tokens - 1)


async def test_a_prefix_comes_from_a_worker_that_decodes_and_is_not_computed(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        holder, waiter = await start(cluster)
        holder.writes.hold()
        place(cluster)
        cluster.copy_prefix("r", PREFIX, "holder", "waiter")
        await holder.writes.arrived(1)
        assert waiter.steps.num_arrived == 0, "it waits"
        holder.writes.open()
        assert await answered(cluster, waiter) == len(PROMPT) - len(PREFIX)
        await holder.idle()
        num_bytes = NUM_PREFIX_BLOCKS * LAYOUT.block_bytes
        assert value(holder, "transfer_bytes_total") == num_bytes
        record = cluster.streams[RequestId("r")].phases[1]
        assert (record.name, record.num_bytes) == (PhaseName.PREFIX, num_bytes)
        assert (record.num_tokens, record.worker) == (len(PREFIX), "waiter")
        assert record.num_calls >= 1
        assert record.seconds > 0


async def test_only_the_blocks_that_the_target_lacks_are_moved(tmp_path: Path) -> None:
    num_known = 3 * LAYOUT.block_size
    async with harness(tmp_path) as cluster:
        holder, waiter = await start(cluster)
        cluster.place("known", PREFIX[:num_known], GREEDY, prefill="waiter", decode=None)
        await cluster.answer("known")
        await waiter.idle()
        before = value(waiter, "engine_step_tokens_sum")
        place(cluster)
        cluster.copy_prefix("r", PREFIX, "holder", "waiter")
        assert await answered(cluster, waiter) - before == len(PROMPT) - len(PREFIX)
        await holder.idle()
        num_missing = NUM_PREFIX_BLOCKS - 3
        assert value(holder, "transfer_bytes_total") == num_missing * LAYOUT.block_bytes


async def test_a_prefix_that_came_before_its_request_is_not_waited_for(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        holder, waiter = await start(cluster)
        cluster.copy_prefix("r", PREFIX, "holder", "waiter")
        await cluster.board.wait_for(
            "the prefix is there", lambda: waiter.blocks.match(PREFIX, 99) == len(PREFIX)
        )
        place(cluster)
        assert await answered(cluster, waiter) == len(PROMPT) - len(PREFIX)
        phases = cluster.streams[RequestId("r")].phases
        assert PhaseName.PREFIX not in [phase.name for phase in phases]
        await holder.idle()


async def test_a_prefix_that_does_not_come_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "MAX_WAIT_SECONDS", 0.1)
    async with harness(tmp_path) as cluster:
        holder, waiter = await start(cluster)
        holder.blocks.clear_cache()
        place(cluster)
        cluster.copy_prefix("r", PREFIX, "holder", "waiter")
        assert await answered(cluster, waiter) == len(PROMPT)
        await holder.idle()
        record = cluster.streams[RequestId("r")].phases[1]
        assert (record.name, record.num_bytes) == (PhaseName.PREFIX, 0)
        assert record.seconds >= 0.1


async def test_a_prefix_that_finds_no_room_is_not_waited_for(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        holder, waiter = await start(cluster, WorkerOptions(num_blocks=16))
        # Another request holds most of the pool until the copy was refused.
        waiter.steps.hold()
        other = tuple(range(900, 970))
        cluster.place("other", other, GREEDY, prefill="waiter", decode=None)
        await waiter.steps.arrived(1)
        place(cluster)
        cluster.copy_prefix("r", PREFIX, "holder", "waiter")
        await cluster.orders_taken("holder")
        await holder.idle()
        waiter.steps.open()
        await cluster.answer("other")
        assert await answered(cluster, waiter) == len(other) + len(PROMPT) + GREEDY.max_tokens - 1


async def test_a_draining_worker_takes_no_prefix(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        holder, waiter = await start(cluster)
        place(cluster)
        await cluster.orders_taken("waiter")
        cluster.order("waiter", SetDraining(is_draining=True))
        await cluster.orders_taken("waiter")
        await cluster.heard("waiter", PrefillRefused, "r")  # others get what it has not begun
        cluster.copy_prefix("r", PREFIX, "holder", "waiter")
        await cluster.orders_taken("holder")
        await holder.idle()
        await waiter.idle()
        assert value(waiter, "engine_step_tokens_sum") == 0


async def test_a_holder_that_dies_in_the_write_leaves_nothing_that_could_be_found(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        holder, waiter = await start(cluster)
        holder.writes.hold()
        place(cluster)
        cluster.copy_prefix("r", PREFIX, "holder", "waiter")
        await holder.writes.arrived(1)
        cluster.bury("holder", "waiter")
        assert await answered(cluster, waiter) == len(PROMPT)


async def test_a_request_that_is_cancelled_while_it_waits_leaves_its_prefix_cached(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        holder, waiter = await start(cluster)
        holder.writes.hold()
        place(cluster)
        cluster.copy_prefix("r", PREFIX, "holder", "waiter")
        await holder.writes.arrived(1)
        cluster.cancel("r", "waiter")
        ended = await cluster.heard("waiter", RequestFinished, "r")
        assert ended.was_cancelled
        holder.writes.open()
        await cluster.board.wait_for(
            "the prefix is there", lambda: waiter.blocks.match(PREFIX, 99) == len(PREFIX)
        )
        await holder.idle()
        await waiter.idle()
