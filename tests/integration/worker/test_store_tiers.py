"""Real workers with host memory before the store: a tier, and the buffer of the papers' 2.2."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from common.messages.control import RequestFinished
from common.messages.fields import PhaseName, Role
from common.worker import kept_blocks, prefetcher, stored_prefixes
from tests.support.gated_store import GatedStore
from tests.support.played_store import (
    BLOCK_BYTES,
    GREEDY,
    LONGER,
    PROMPT,
    SIZE,
    Played,
    num_computed,
    playing,
    value,
)
from tests.support.running_worker import RunningWorker, WorkerOptions
from tests.support.stored_blocks import files_of
from tests.support.worker_harness import expected

NUM_STORED = len(PROMPT)
HIT_BYTES = NUM_STORED // SIZE * BLOCK_BYTES
MISSED_BYTES = -(-(len(LONGER) - NUM_STORED) // SIZE) * BLOCK_BYTES
OTHER = tuple(range(700, 700 + NUM_STORED))
BUFFERED = WorkerOptions(num_buffer_blocks=3, is_keeping=False)
"""The buffer holds a quarter of what is read."""


def passed(worker: RunningWorker) -> dict[str, float]:
    """Return the bytes of each resource between the store and the worker's pool."""
    buffer = {
        way: value(worker, "store_buffer_bytes_total", way=way)
        for way in ("loaded", "uploaded", "downloaded")
    }
    return {"storage link": worker.store.link_stats().kv_bytes, **buffer}


async def pair(played: Played) -> tuple[RunningWorker, RunningWorker]:
    decode, _ = await played.start("decode", Role.DECODE, BUFFERED)
    prefill, _ = await played.start("prefill", Role.PREFILL, BUFFERED)
    return prefill, decode


async def answered(played: Played, *workers: RunningWorker) -> None:
    answer = await played.cluster.answer("r")
    assert answer.token_ids(0) == expected(LONGER, GREEDY)
    for worker in workers:
        await worker.idle()


READ = {
    "storage link": HIT_BYTES,
    "loaded": HIT_BYTES,
    "uploaded": HIT_BYTES,
    "downloaded": 0,
}
UNREAD = dict.fromkeys(READ, 0)


async def test_the_bytes_of_a_read_at_the_prefill_side(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        prefill, decode = await pair(played)
        played.cluster.place("r", LONGER, GREEDY, num_stored_tokens=NUM_STORED)
        await answered(played, prefill, decode)
        assert (passed(prefill), passed(decode)) == (READ, UNREAD)
        assert played.phase(PhaseName.LOAD).num_bytes == HIT_BYTES
        assert played.phase(PhaseName.TRANSFER).num_bytes == HIT_BYTES + MISSED_BYTES


async def test_the_bytes_of_a_read_at_the_decode_side(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        prefill, decode = await pair(played)
        played.cluster.place("r", LONGER, GREEDY, num_prefix_tokens=NUM_STORED)
        played.cluster.copy_prefix("r", PROMPT, "decode", "prefill", num_stored_tokens=NUM_STORED)
        await answered(played, prefill, decode)
        assert (passed(prefill), passed(decode)) == (UNREAD, READ)
        assert played.phase(PhaseName.PREFIX).num_bytes == HIT_BYTES
        assert played.phase(PhaseName.TRANSFER).num_bytes == MISSED_BYTES


async def test_what_is_computed_leaves_the_pool_through_the_buffer(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        options = WorkerOptions(num_buffer_blocks=2)
        writer, store = await played.start("reader", options=options)
        played.place()
        await played.answered()
        await writer.idle()
        played.flush()
        assert len(store.offered) == len(files_of(played.folder)) == len(PROMPT) // SIZE
        assert passed(writer)["downloaded"] == HIT_BYTES


@pytest.mark.parametrize("num_buffer_blocks", [0, 3], ids=["direct", "buffered"])
async def test_a_worker_reads_from_its_tier_what_it_wrote_itself(
    tmp_path: Path, num_buffer_blocks: int
) -> None:
    async with playing(tmp_path) as played:
        options = WorkerOptions(num_tier_blocks=32, num_buffer_blocks=num_buffer_blocks)
        reader, store = await played.start("reader", options=options)
        played.place(request="first")
        await played.answered(request="first")
        await reader.idle()
        before = (store.num_read, reader.store.link_stats().kv_bytes)
        reader.blocks.clear_cache()
        reader.pool.buffer[:] = bytes(len(reader.pool.buffer))
        played.place()
        await played.answered()
        await reader.idle()
        num_loaded = len(PROMPT) // SIZE - 1
        assert played.phase(PhaseName.LOAD).num_bytes == num_loaded * BLOCK_BYTES
        assert value(reader, "store_blocks_total", event="tier_hit") == num_loaded
        assert (store.num_read, reader.store.link_stats().kv_bytes) == before
        assert num_computed(reader, 2) == len(PROMPT) + SIZE
        assert value(reader, "store_tier_bytes") == HIT_BYTES
        rates = reader.hybrid.heartbeat().rates
        assert rates.read_tokens_per_second == 0, "of storage nothing is known yet"


async def test_a_block_of_the_tier_that_storage_lost_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_blocks, "GRACE_SECONDS", 0.0)
    async with playing(tmp_path) as played:
        options = WorkerOptions(num_tier_blocks=32)
        reader, _ = await played.start("reader", options=options)
        played.place()
        await played.answered()
        await reader.idle()
        played.flush()
        hashes = reader.blocks.prefix_hashes(PROMPT)
        lost = hashes[3:]
        for path in files_of(played.folder):
            if bytes.fromhex(path.name[:32]) in lost:
                path.unlink()
        assert len(files_of(played.folder)) == 3
        played.stores[0].read(lost, bytearray(len(lost) * BLOCK_BYTES), range(len(lost)), hashes[2])
        # As after a restart: what was kept before is not remembered.
        reader.hybrid._stored.kept._last_kept.clear()
        played.place(LONGER, request="longer")
        await played.answered(LONGER, request="longer")
        await reader.idle()
        played.flush()
        assert len(files_of(played.folder)) == (len(LONGER) + GREEDY.max_tokens - 1) // SIZE


async def test_a_load_asks_for_a_buffer_full_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_prefixes, "BATCH_BYTES", BLOCK_BYTES)
    async with playing(tmp_path) as played:
        await played.fill()
        options = WorkerOptions(num_buffer_blocks=8)
        reader, store = await played.start("reader", options=options)
        store.reads.hold()
        played.place()
        await store.reads.arrived(1)
        played.cluster.cancel("r", "reader")
        await played.cluster.heard("reader", RequestFinished, "r")
        store.reads.open()
        await reader.idle()
        assert store.num_read == 8, "and for no other one when nobody waits any more"


# ---- prefixes that find no room in the pool ------------------------------------------------------

FILLER = tuple(range(900, 970))
"""What a small pool is full of."""
SMALL = WorkerOptions(num_blocks=16, num_tier_blocks=64)
NUM_AHEAD = len(PROMPT) // SIZE - 1


async def full_reader(
    played: Played, options: WorkerOptions = SMALL
) -> tuple[RunningWorker, GatedStore]:
    """Start a reader whose pool is full until its steps are let go on."""
    await played.fill()
    reader, store = await played.start("reader", options=options)
    reader.steps.hold()
    played.cluster.place("filler", FILLER, GREEDY, prefill="reader", decode=None)
    await reader.steps.arrived(1)
    return reader, store


async def is_ahead(played: Played, reader: RunningWorker, num_blocks: int = NUM_AHEAD) -> None:
    await played.cluster.board.wait_for(
        "blocks are in the tier", lambda: reader.store.stats().num_prefetched == num_blocks
    )


def prefetches(reader: RunningWorker) -> tuple[float, float, float, float]:
    kinds = ("prefetched_blocks", "prefetch_used_blocks", "prefetch_wasted_blocks")
    prefetched, used, wasted = (value(reader, f"{kind}_total") for kind in kinds)
    return prefetched, used, wasted, value(reader, "prefetch_accuracy_ratio")


@pytest.mark.parametrize("num_buffer_blocks", [0, 3], ids=["direct", "buffered"])
async def test_a_waiting_requests_blocks_are_in_the_tier_when_room_comes(
    tmp_path: Path, num_buffer_blocks: int
) -> None:
    async with playing(tmp_path) as played:
        options = replace(SMALL, num_buffer_blocks=num_buffer_blocks)
        reader, store = await full_reader(played, options)
        played.place()
        await is_ahead(played, reader)
        num_read = store.num_read
        assert prefetches(reader) == (NUM_AHEAD, 0, 0, 0)
        reader.steps.open()
        await played.cluster.answer("filler")
        await played.answered()
        await reader.idle()
        assert num_read == store.num_read == NUM_AHEAD, "storage is asked once"
        assert prefetches(reader) == (NUM_AHEAD, NUM_AHEAD, 0, 1)
        totals = reader.hybrid.heartbeat().totals
        assert (totals.prefetch_used_blocks, totals.prefetch_wasted_blocks) == (NUM_AHEAD, 0)
        assert num_computed(reader, 2) == len(FILLER) + SIZE
        assert played.phase(PhaseName.LOAD).num_bytes == NUM_AHEAD * BLOCK_BYTES


async def test_what_a_cancelled_request_had_brought_is_wasted(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        reader, _ = await full_reader(played)
        played.place()
        await is_ahead(played, reader)
        played.cluster.cancel("r", "reader")
        assert (await played.cluster.heard("reader", RequestFinished, "r")).was_cancelled
        assert prefetches(reader) == (NUM_AHEAD, 0, NUM_AHEAD, 0)


async def test_blocks_that_another_request_waits_for_are_not_given_up(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        reader, _ = await full_reader(played)
        for request in ("r", "twin"):
            played.place(request=request)
        await is_ahead(played, reader)
        played.cluster.cancel("r", "reader")
        await played.cluster.heard("reader", RequestFinished, "r")
        reader.steps.open()
        await played.answered(request="twin")
        await reader.idle()
        assert prefetches(reader) == (NUM_AHEAD, NUM_AHEAD, 0, 1)


async def test_no_more_is_brought_than_the_tier_has_room_for_and_the_rest_is_read_later(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as played:
        reader, store = await full_reader(played, replace(SMALL, num_tier_blocks=16))
        played.place()
        await is_ahead(played, reader, 4)
        assert store.num_read == 4
        reader.steps.open()
        await played.answered()
        await reader.idle()
        assert (store.num_read, prefetches(reader)) == (NUM_AHEAD, (4, 4, 0, 1))


async def test_nothing_is_brought_while_a_read_waits_for_its_own_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "BATCH_BYTES", 4 * BLOCK_BYTES)
    async with playing(tmp_path) as played:
        short = tuple(range(300, 300 + 3 * SIZE))
        await played.fill(short, request="short")
        reader, store = await full_reader(played)
        store.reads.hold()
        played.place()
        await store.reads.arrived(1)
        played.place(short, request="s")
        await store.reads.arrived(2)
        store.reads.open()
        await is_ahead(played, reader)
        asked = [len(hashes) for hashes in store.asked]
        assert sorted(asked[:2]) == [2, 4], "a batch that was under way, and the load"
        assert asked[2:] == [4, 3], "the rest comes after both"
        reader.steps.open()
        await played.answered()
        await played.answered(short, request="s")
        await reader.idle()


async def test_a_worker_that_is_told_so_prefetches_nothing(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        reader, store = await full_reader(played, replace(SMALL, is_prefetching=False))
        played.place()
        await played.cluster.orders_taken("reader")
        reader.steps.open()
        await played.answered()
        await reader.idle()
        assert (store.num_read, prefetches(reader)) == (0, (0, 0, 0, 0))
        assert num_computed(reader, 2) == len(FILLER) + len(PROMPT)


# ---- prompts that are loaded at the start --------------------------------------------------------


async def test_prompts_are_loaded_before_anybody_asks_for_them(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        options = WorkerOptions(to_preload=(tuple(range(500, 540)), PROMPT))
        reader, store = await played.start("reader", options=options)
        await played.cluster.board.wait_for(
            "all of it is cached", lambda: reader.blocks.match(PROMPT, NUM_STORED) == NUM_STORED
        )
        num_read = store.num_read
        played.place()
        await played.answered()
        await reader.idle()
        assert store.num_read == num_read, "the request finds it"
        assert num_computed(reader) == SIZE


async def test_no_more_than_half_of_the_pool_is_loaded_ahead(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        await played.fill(OTHER, request="other")
        blocks = 4 * NUM_STORED // SIZE - 2
        options = WorkerOptions(num_blocks=blocks, to_preload=(PROMPT, OTHER))
        reader, _ = await played.start("reader", options=options)
        await played.cluster.board.wait_for(
            "the first is cached", lambda: reader.blocks.match(PROMPT, NUM_STORED) == NUM_STORED
        )
        await reader.idle()
        assert reader.blocks.match(OTHER, len(OTHER)) == 0


async def test_a_worker_that_drains_preloads_nothing_more(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        store = played.open_store()
        store.reads.hold()
        options = WorkerOptions(store=store, to_preload=(PROMPT, OTHER))
        reader = await played.cluster.start_worker("reader", Role.PREFILL, options)
        await store.reads.arrived(1)
        draining = asyncio.ensure_future(reader.hybrid.drain(30.0))
        await asyncio.sleep(0)
        store.reads.open()
        assert await draining
        await reader.idle()
        assert store.num_read == len(PROMPT) // SIZE
