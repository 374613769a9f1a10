"""Real workers load prefixes from a real store instead of computing them, and fill it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from common.ids import RequestId
from common.messages.control import (
    LookUpPrefix,
    PrefixFound,
    PrefixNotCopied,
    PrefixUnavailable,
    RequestFinished,
)
from common.messages.fields import PhaseName, Role
from common.sampling import SamplingParams
from common.worker import kept_blocks, prefixes, stored_prefixes
from tests.support.played_store import (
    BLOCK_BYTES,
    GREEDY,
    LONGER,
    NUM_LOADED,
    PROMPT,
    SIZE,
    Played,
    num_computed,
    playing,
    value,
)
from tests.support.running_worker import WorkerOptions
from tests.support.stored_blocks import PAGE_BYTES, files_of
from tests.support.worker_harness import expected


async def test_what_one_worker_computed_another_one_loads(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        reader, _ = await played.start("reader")
        played.place()
        await played.answered()
        await reader.idle()
        assert num_computed(reader) == len(PROMPT) - NUM_LOADED
        load = played.phase(PhaseName.LOAD)
        num_blocks = NUM_LOADED // SIZE
        assert (load.num_tokens, load.worker) == (NUM_LOADED, "reader")
        assert (load.num_bytes, load.num_calls) == (num_blocks * BLOCK_BYTES, num_blocks)
        assert load.seconds > 0
        assert value(reader, "store_blocks_total", event="hit") == num_blocks
        assert value(reader, "store_read_bytes_total") == num_blocks * BLOCK_BYTES
        assert value(reader, "store_read_seconds_total") > 0
        assert reader.hybrid.heartbeat().rates.read_tokens_per_second > 0
        assert reader.hybrid.heartbeat().load.read_queue_tokens == 0


async def test_a_prompt_that_goes_on_beyond_what_is_stored_computes_the_rest(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        reader, _ = await played.start("reader")
        played.place(LONGER)
        await played.answered(LONGER)
        await reader.idle()
        assert num_computed(reader) == len(LONGER) - len(PROMPT)


async def test_what_is_cached_already_is_not_read(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        reader, store = await played.start("reader")
        for request in ("first", "second"):
            played.place(request=request)
            await played.answered(request=request)
        assert store.num_read == NUM_LOADED // SIZE
        played.place(LONGER)
        await played.answered(LONGER)
        await reader.idle()
        assert PhaseName.LOAD in [p.name for p in played.cluster.streams[RequestId("r")].phases]
        # The prompt's last block was computed here; beyond it lies nothing but misses.
        assert store.num_read == NUM_LOADED // SIZE + (len(LONGER) - len(PROMPT)) // SIZE


async def test_two_requests_read_a_prefix_that_they_share_once(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        reader, store = await played.start("reader")
        store.reads.hold()
        for request in ("a", "b"):
            played.place(request=request)
        await store.reads.arrived(1)
        await played.cluster.orders_taken("reader")
        load = reader.hybrid.heartbeat().load
        assert load.read_queue_tokens == 2 * NUM_LOADED
        assert load.uncomputed_tokens == 2 * (len(PROMPT) - NUM_LOADED), "reads are not computed"
        assert value(reader, "store_read_queue_tokens") == 2 * NUM_LOADED
        store.reads.open()
        for request in ("a", "b"):
            await played.answered(request=request)
        await reader.idle()
        assert store.num_read == NUM_LOADED // SIZE
        assert num_computed(reader, 2) == 2 * (len(PROMPT) - NUM_LOADED)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [damage, cut, Path.unlink])
async def test_a_block_that_is_not_whole_is_computed_with_all_after_it(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        reader, store = await played.start("reader")
        hashes = reader.blocks.prefix_hashes(PROMPT)
        harm(next(p for p in files_of(played.folder) if p.name.startswith(hashes[4].hex())))
        played.place()
        await played.answered()
        await reader.idle()
        assert played.phase(PhaseName.LOAD).num_tokens == 4 * SIZE
        assert num_computed(reader) == len(PROMPT) - 4 * SIZE
        assert value(reader, "store_blocks_total", event="miss") >= 1
        assert store.offered[0][1] == hashes[4], "what was computed is offered again"


async def test_nothing_is_stored_and_all_is_computed(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        reader, _ = await played.start("reader")
        played.place()
        await played.answered()
        await reader.idle()
        assert num_computed(reader) == len(PROMPT)
        assert played.phase(PhaseName.LOAD).num_bytes == 0


async def test_a_prefix_that_finds_no_room_is_computed_when_there_is_some(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        reader, store = await played.start("reader", options=WorkerOptions(num_blocks=16))
        reader.steps.hold()
        other = tuple(range(900, 970))
        played.cluster.place("other", other, GREEDY, prefill="reader", decode=None)
        await reader.steps.arrived(1)
        played.place()
        await played.cluster.orders_taken("reader")
        await played.cluster.board.wait_for(
            "the load is given up", lambda: reader.hybrid.heartbeat().load.read_queue_tokens == 0
        )
        reader.steps.open()
        await played.cluster.answer("other")
        await played.answered()
        await reader.idle()
        assert store.num_read == 0
        assert num_computed(reader, 2) == len(other) + len(PROMPT)


async def test_a_request_cancelled_in_its_load_keeps_the_blocks_until_the_read_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_prefixes, "BATCH_BYTES", 4 * BLOCK_BYTES)
    async with playing(tmp_path) as played:
        await played.fill()
        reader, store = await played.start("reader")
        store.reads.hold()
        played.place()
        await store.reads.arrived(1)
        played.cluster.cancel("r", "reader")
        assert (await played.cluster.heard("reader", RequestFinished, "r")).was_cancelled
        assert reader.blocks.counts().in_transfer == NUM_LOADED // SIZE
        assert reader.hybrid.is_busy
        store.reads.open()
        await reader.idle()
        assert store.num_read == 4, "no further batch is read for nobody"
        assert reader.blocks.match(PROMPT, len(PROMPT)) == 4 * SIZE, "what came is cached"
        counts = reader.blocks.counts()
        assert counts.free + counts.cached == counts.total


async def test_a_load_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "MAX_WAIT_SECONDS", 0.1)
    async with playing(tmp_path) as played:
        await played.fill()
        reader, store = await played.start("reader")
        store.reads.hold()
        played.place()
        await played.answered()
        assert num_computed(reader) == len(PROMPT)
        assert played.phase(PhaseName.LOAD).seconds >= 0.1
        store.reads.open()
        await reader.idle()


# ---- keeping what was computed ------------------------------------------------------------------


async def test_each_worker_offers_what_it_computed_in_order(tmp_path: Path) -> None:
    prompt, params = PROMPT[:20], SamplingParams(seed=1, max_tokens=30, temperature=0)
    async with playing(tmp_path) as played:
        decode, decoded = await played.start("decode", Role.DECODE)
        prefill, prefilled = await played.start("prefill", Role.PREFILL)
        played.cluster.place("r", prompt, params)
        tokens = (await played.cluster.answer("r")).token_ids(0)
        await prefill.idle()
        await decode.idle()
        played.flush()
        hashes = prefill.blocks.prefix_hashes((*prompt, *tokens[:-1]))
        chained = list(zip([None, *hashes], hashes, strict=False))
        assert prefilled.offered == chained[:2]
        assert decoded.offered == chained[2:]
        assert len(files_of(played.folder)) == len(hashes) == 6
        assert value(decode, "store_blocks_total", event="written") == 4
        assert value(decode, "store_written_bytes_total") == 4 * (BLOCK_BYTES + PAGE_BYTES)
        assert value(decode, "store_stored_bytes") > 0


async def test_a_block_that_was_loaded_or_found_cached_is_not_offered(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        reader, store = await played.start("reader")
        played.place(LONGER)
        await played.answered(LONGER)
        await reader.idle()
        hashes = reader.blocks.prefix_hashes((*LONGER, *expected(LONGER, GREEDY)[:-1]))
        assert [block_hash for _, block_hash in store.offered] == hashes[len(PROMPT) // SIZE :]


async def test_nobody_waits_for_a_store_that_does_not_take_blocks(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        reader, store = await played.start("reader")
        store.writes.hold()
        played.place()
        await played.answered()
        await store.writes.arrived(1)
        assert reader.blocks.counts().in_transfer > 0, "they are held until they are copied"
        store.writes.open()
        await reader.idle()
        assert len(store.offered) == len(PROMPT) // SIZE


async def test_what_finds_no_room_in_the_queue_is_dropped_with_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_blocks, "GRACE_SECONDS", 0.0)
    async with playing(tmp_path) as played:
        reader, store = await played.start("reader")
        store.is_full = True
        played.place()
        await played.answered()
        await reader.idle()
        played.flush()
        assert files_of(played.folder) == []
        # Three steps computed four blocks each; each time the first of all was offered again.
        assert len(store.offered) == 3
        assert value(reader, "store_blocks_total", event="dropped_full") == 3
        assert value(reader, "store_blocks_total", event="dropped_orphan") == 8


async def test_what_was_dropped_is_offered_again_before_what_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_blocks, "GRACE_SECONDS", 0.0)
    async with playing(tmp_path) as played:
        reader, store = await played.start("reader")
        store.is_full = True
        played.place()
        await played.answered()
        await reader.idle()
        store.is_full = False
        store.offered.clear()
        played.place(LONGER)
        await played.answered(LONGER)
        await reader.idle()
        played.flush()
        hashes = reader.blocks.prefix_hashes((*LONGER, *expected(LONGER, GREEDY)[:-1]))
        assert [block_hash for _, block_hash in store.offered] == hashes
        assert len(files_of(played.folder)) == len(hashes)


async def test_a_block_whose_beginning_nobody_has_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_blocks, "GRACE_SECONDS", 0.0)
    async with playing(tmp_path) as played:
        reader, store = await played.start("reader")
        store.writes.hold()
        played.place(PROMPT[:40])
        await store.writes.arrived(1)
        reader.blocks.clear_cache()
        store.is_full = True
        store.writes.open()
        await played.answered(PROMPT[:40])
        await reader.idle()
        assert len(store.offered) == 1
        assert value(reader, "store_blocks_total", event="dropped_orphan") == 1


async def test_a_worker_that_is_not_to_write_offers_nothing(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        reader, store = await played.start("reader", options=WorkerOptions(is_keeping=False))
        played.place()
        await played.answered()
        await reader.idle()
        assert store.offered == []


async def test_blocks_that_are_held_for_the_store_do_no_harm_to_a_pool_that_is_too_small(
    tmp_path: Path,
) -> None:
    params = SamplingParams(seed=1, max_tokens=40, temperature=0)
    prompts = {f"r{number}": tuple(range(number, number + 20)) for number in range(6)}
    async with playing(tmp_path) as played:
        reader, store = await played.start("reader", options=WorkerOptions(num_blocks=16))
        for request, prompt in prompts.items():
            played.cluster.place(request, prompt, params, prefill="reader", decode=None)
        for request, prompt in prompts.items():
            stream = await played.cluster.answer(request)
            assert stream.token_ids(0) == expected(prompt, params)
        await reader.idle()
        assert value(reader, "preemptions_total") > 0
        played.flush()
        # Each prompt and output has seven whole blocks, which are kept although it gave way.
        computed = [(*p, *expected(p, params)[:-1]) for p in prompts.values()]
        wanted = {digest for tokens in computed for digest in reader.blocks.prefix_hashes(tokens)}
        assert wanted == {digest for _, digest in store.offered}
        assert len(files_of(played.folder)) == len(wanted)


async def test_who_waits_for_room_gets_that_of_blocks_that_were_held_for_the_store(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as played:
        reader, store = await played.start("reader", options=WorkerOptions(num_blocks=16))
        store.writes.hold()
        other = tuple(range(700, 800))
        for request, prompt in (("first", PROMPT), ("other", other)):
            played.cluster.place(request, prompt, GREEDY, prefill="reader", decode=None)
        await played.answered(request="first")
        await played.cluster.board.wait_for(
            "it waits", lambda: reader.hybrid.heartbeat().load.num_waiting == 1
        )
        await store.writes.arrived(1)
        store.writes.open()
        await played.answered(other, request="other")


# ---- look-ups ------------------------------------------------------------------------------------


async def look_up(played: Played, worker: str, *frames: bytes) -> int:
    order = LookUpPrefix(request_id=RequestId("r"))
    played.cluster.order(worker, order, frames)
    return (await played.cluster.heard(worker, PrefixFound, "r")).num_blocks


async def test_a_worker_tells_how_much_of_a_prompt_is_stored(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        reader, _ = await played.start("reader")
        assert await look_up(played, "reader", b"".join(reader.blocks.prefix_hashes(LONGER))) == 12
        other = reader.blocks.prefix_hashes(tuple(range(40)))
        assert await look_up(played, "reader", b"".join(other)) == 0


async def test_a_worker_without_a_store_finds_nothing(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        worker = await played.cluster.start_worker("plain", Role.PREFILL)
        hashes = worker.blocks.prefix_hashes(PROMPT)
        assert await look_up(played, "plain", b"".join(hashes)) == 0


async def test_a_malformed_look_up_is_ignored(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        reader, _ = await played.start("reader")
        hashes = b"".join(reader.blocks.prefix_hashes(PROMPT))
        for frames in ((hashes[:-1],), (hashes, hashes), (b"",), ()):
            played.cluster.order("reader", LookUpPrefix(request_id=RequestId("bad")), frames)
        assert await look_up(played, "reader", hashes) == 0
        assert "bad" not in str(played.cluster.told)


# ---- both paths ---------------------------------------------------------------------


async def test_what_the_prefill_side_loads_goes_to_the_decode_side_with_the_rest(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        decode, unread = await played.start("decode", Role.DECODE)
        prefill, read = await played.start("prefill")
        n = len(PROMPT)
        played.cluster.place("r", LONGER, GREEDY, num_stored_tokens=n)
        answer = await played.cluster.answer("r")
        assert answer.token_ids(0) == expected(LONGER, GREEDY)
        await prefill.idle()
        await decode.idle()
        assert int(value(prefill, "engine_step_tokens_sum")) == len(LONGER) - n
        assert (read.num_read, unread.num_read) == (n // SIZE, 0)
        load, moved = played.phase(PhaseName.LOAD), played.phase(PhaseName.TRANSFER)
        assert (load.worker, load.num_bytes) == ("prefill", n // SIZE * BLOCK_BYTES)
        assert moved.num_bytes == -(-len(LONGER) // SIZE) * BLOCK_BYTES, "hit and miss"


async def test_the_decode_side_loads_a_prefix_and_hands_it_over(tmp_path: Path) -> None:
    async with playing(tmp_path) as played:
        await played.fill()
        decode, read = await played.start("decode", Role.DECODE)
        prefill, unread = await played.start("prefill")
        n = len(PROMPT)
        played.cluster.place("r", LONGER, GREEDY, num_prefix_tokens=n)
        played.cluster.copy_prefix("r", PROMPT, "decode", "prefill", num_stored_tokens=n)
        answer = await played.cluster.answer("r")
        assert answer.token_ids(0) == expected(LONGER, GREEDY)
        await prefill.idle()
        await decode.idle()
        assert int(value(prefill, "engine_step_tokens_sum")) == len(LONGER) - n
        assert (read.num_read, unread.num_read) == (n // SIZE, 0)
        load, prefix = played.phase(PhaseName.LOAD), played.phase(PhaseName.PREFIX)
        moved = played.phase(PhaseName.TRANSFER)
        assert (load.worker, prefix.worker, moved.worker) == ("decode", "prefill", "prefill")
        assert load.num_bytes == prefix.num_bytes == n // SIZE * BLOCK_BYTES
        num_missed = -(-(len(LONGER) - n) // SIZE)
        assert moved.num_bytes == num_missed * BLOCK_BYTES, "it has the rest already"
        assert load.seconds <= prefix.seconds


async def test_a_decode_side_that_finds_nothing_says_so_and_the_prompt_is_computed_at_once(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as played:
        await played.start("decode", Role.DECODE)
        prefill, _ = await played.start("prefill")
        n = len(PROMPT)
        played.cluster.place("r", LONGER, GREEDY, num_prefix_tokens=n)
        played.cluster.copy_prefix("r", PROMPT, "decode", "prefill", num_stored_tokens=n)
        await played.cluster.heard("decode", PrefixNotCopied, "r")
        assert prefill.steps.num_arrived == 0, "it waits"
        played.cluster.order("prefill", PrefixUnavailable(request_id=RequestId("r")))
        answer = await played.cluster.answer("r")
        assert answer.token_ids(0) == expected(LONGER, GREEDY)
        await prefill.idle()
        assert played.phase(PhaseName.PREFIX).num_bytes == 0


async def test_a_cancelled_request_ends_the_load_at_the_decode_side_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_prefixes, "BATCH_BYTES", 4 * BLOCK_BYTES)
    async with playing(tmp_path) as played:
        await played.fill()
        decode, store = await played.start("decode", Role.DECODE)
        await played.start("prefill")
        store.reads.hold()
        n = len(PROMPT)
        played.cluster.copy_prefix("r", PROMPT, "decode", "prefill", num_stored_tokens=n)
        await store.reads.arrived(1)
        played.cluster.cancel("r", "decode")
        await played.cluster.heard("decode", RequestFinished, "r")
        store.reads.open()
        await decode.idle()
        assert store.num_read == 4
