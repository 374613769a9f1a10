"""What running workers tell of their load, their cache and each request's phases."""

from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import pytest

from common.kv.prefix_cache import HASH_BYTES, PrefixCache
from common.messages.control import (
    Directive,
    KVIndexRequested,
    RequestFinished,
    WorkerAccepted,
)
from common.messages.fields import Mode, PhaseName, Role
from common.sampling import SamplingParams
from tests.support.running_worker import LAYOUT, MODEL, WorkerOptions
from tests.support.worker_harness import QUEUED_SECONDS, Harness, expected, harness

GREEDY = SamplingParams(seed=1, max_tokens=20, temperature=0)
PROMPT = tuple(range(100, 161))


def hashes_of(tokens: Sequence[int]) -> set[bytes]:
    return set(PrefixCache(LAYOUT.block_size, MODEL).chain(None, tokens))


def known(cluster: Harness, worker: str) -> set[bytes]:
    """What a controller knows that applied every batch."""
    found: set[bytes] = set()
    for events, (added, removed) in cluster.index.get(worker, []):
        if events.is_snapshot:
            found.clear()
        for frame, change in ((removed, found.discard), (added, found.add)):
            for at in range(0, len(frame), HASH_BYTES):
                change(frame[at : at + HASH_BYTES])
    return found


async def is_told(cluster: Harness, *all_tokens: Sequence[int]) -> None:
    """Wait until a controller knows the blocks of these tokens, and no others."""
    told: set[bytes] = set().union(*map(hashes_of, all_tokens))
    await cluster.board.wait_for("all is told", lambda: known(cluster, "w") == told)


async def test_what_a_worker_caches_is_told_batch_by_batch_before_the_heartbeat(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("w", Role.COMBINED)
        assert cluster.heartbeats["w"][-1].index_sequence == 0
        all_tokens: list[tuple[int, ...]] = []
        for place in range(2):
            prompt = tuple(range(place, place + 40))
            cluster.place(f"r{place}", prompt, GREEDY, prefill="w", decode=None)
            tokens = (await cluster.answer(f"r{place}")).token_ids(0)
            all_tokens.append((*prompt, *tokens[:-1]))
            await worker.idle()
            await is_told(cluster, *all_tokens)
        numbers = [events.sequence for events, _ in cluster.index["w"]]
        assert numbers == list(range(1, len(numbers) + 1))
        await cluster.board.wait_for(
            "the beat behind it", lambda: cluster.heartbeats["w"][-1].index_sequence == numbers[-1]
        )


async def test_a_snapshot_is_sent_when_it_is_asked_for_even_of_nothing(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("w", Role.COMBINED)
        cluster.order("w", KVIndexRequested())
        await cluster.board.wait_for("the first", lambda: len(cluster.index.get("w", [])) == 1)
        assert cluster.index["w"][0][0].is_snapshot
        cluster.place("r", PROMPT, GREEDY, prefill="w", decode=None)
        tokens = (await cluster.answer("r")).token_ids(0)
        await worker.idle()
        await is_told(cluster, (*PROMPT, *tokens[:-1]))
        cluster.index["w"].clear()
        cluster.order("w", KVIndexRequested())
        await is_told(cluster, (*PROMPT, *tokens[:-1]))
        assert cluster.index["w"][0][0].is_snapshot


async def test_measured_rates_and_the_mode_are_told(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("w", Role.COMBINED)
        assert cluster.heartbeats["w"][-1].rates.prefill_tokens_per_second == 0
        cluster.order("w", Directive(mode=Mode.DECODE_LED, num_steps=1000))
        cluster.place("r", PROMPT, GREEDY, prefill="w", decode=None)
        await cluster.answer("r")
        await worker.idle()
        await cluster.board.wait_for(
            "both rates",
            lambda: cluster.heartbeats["w"][-1].rates.decode_tokens_per_second > 0,
        )
        beat = cluster.heartbeats["w"][-1]
        assert beat.rates.prefill_tokens_per_second > 0
        assert beat.rates.decode_step_seconds > 0
        assert beat.mode is Mode.DECODE_LED
        anew = WorkerAccepted(
            role=Role.COMBINED, role_generation=1, heartbeat_seconds=0.05, peers=()
        )
        cluster.order("w", anew)
        await cluster.board.wait_for(
            "a mode of its own: whoever directed it is gone",
            lambda: cluster.heartbeats["w"][-1].mode is Mode.BALANCED,
        )


async def test_a_heartbeat_comes_at_once_when_the_last_waiting_prompt_is_admitted(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("w", Role.COMBINED)
        slow = WorkerAccepted(
            role=Role.COMBINED, role_generation=1, heartbeat_seconds=60.0, peers=()
        )
        cluster.order("w", slow)
        await cluster.orders_taken("w")
        # It is answered with a heartbeat, and the next one would come in a minute.
        cluster.order("w", KVIndexRequested())
        await cluster.board.wait_for("a beat", lambda: "w" in cluster.index)
        worker.steps.hold()
        cluster.place("r", PROMPT, GREEDY, prefill="w", decode=None)
        await cluster.board.wait_for(
            "it is told that nothing waits",
            lambda: cluster.heartbeats["w"][-1].load.num_prefilling == 1,
        )
        assert cluster.heartbeats["w"][-1].load.num_waiting == 0
        worker.steps.open()
        await cluster.answer("r")


# ---- phases --------------------------------------------------------------------------------------


async def test_a_handed_over_request_tells_where_its_time_went(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair()
        prefill.steps.hold()
        started = monotonic()
        cluster.place("r", PROMPT, GREEDY)
        await prefill.steps.arrived(1)
        prefill.steps.open()
        stream = await cluster.answer("r")
        seconds = monotonic() - started
        await decode.idle()
        names = [phase.name for phase in stream.phases]
        assert sorted(names) == sorted(
            [
                PhaseName.QUEUE,
                PhaseName.PREFILL,
                PhaseName.TRANSFER,
                PhaseName.DECODE_WAIT,
                PhaseName.DECODE,
            ]
        )
        by_name = {phase.name: phase for phase in stream.phases}
        assert [by_name[name].worker for name in (PhaseName.PREFILL, PhaseName.TRANSFER)] == [
            "prefill",
            "prefill",
        ]
        assert by_name[PhaseName.DECODE].worker == "decode"
        assert by_name[PhaseName.PREFILL].num_tokens == len(PROMPT)
        assert by_name[PhaseName.DECODE].num_tokens == GREEDY.max_tokens - 1
        written = by_name[PhaseName.TRANSFER]
        assert written.num_bytes == -(-len(PROMPT) // LAYOUT.block_size) * LAYOUT.block_bytes
        assert 1 <= written.num_calls <= 8
        assert by_name[PhaseName.QUEUE].seconds >= QUEUED_SECONDS
        total = sum(p.seconds for p in stream.phases if p.name is not PhaseName.TRANSFER)
        assert QUEUED_SECONDS < total <= seconds + QUEUED_SECONDS


async def test_a_decode_that_moved_tells_both_parts_and_the_move(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        source = await cluster.start_worker("source", Role.DECODE)
        target = await cluster.start_worker("target", Role.DECODE)
        source.steps.hold(10)
        started = monotonic()
        cluster.place("r", PROMPT, GREEDY, prefill="source", decode=None)
        await source.steps.arrived(11)
        cluster.migrate("r", "source", "target")
        await cluster.orders_taken("source")
        source.steps.open()
        stream = await cluster.answer("r")
        seconds = monotonic() - started
        await cluster.heard("target", RequestFinished, "r")
        await source.idle()
        await target.idle()
        assert [(phase.name, phase.worker) for phase in stream.phases] == [
            (PhaseName.QUEUE, "source"),
            (PhaseName.PREFILL, "source"),
            (PhaseName.DECODE, "source"),
            (PhaseName.TRANSFER, "source"),
            (PhaseName.MIGRATION, "target"),
            (PhaseName.DECODE, "target"),
        ]
        decodes = [phase for phase in stream.phases if phase.name is PhaseName.DECODE]
        assert sum(phase.num_tokens for phase in decodes) == GREEDY.max_tokens - 1
        total = sum(p.seconds for p in stream.phases if p.name is not PhaseName.TRANSFER)
        assert QUEUED_SECONDS < total <= seconds + QUEUED_SECONDS


# ---- swapping and slowness -----------------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_preempted_sequences_come_back_from_host_memory_as_they_were(
    tmp_path: Path, max_in_flight: int
) -> None:
    params = SamplingParams(seed=1, max_tokens=60, temperature=0)
    prompts = {f"r{place}": tuple(range(place, place + 20)) for place in range(4)}
    options = WorkerOptions(num_blocks=24, num_host_blocks=64, max_in_flight=max_in_flight)
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("w", Role.COMBINED, options)
        for request, prompt in prompts.items():
            cluster.place(request, prompt, params, prefill="w", decode=None)
        for request, prompt in prompts.items():
            assert (await cluster.answer(request)).token_ids(0) == expected(prompt, params)
        await worker.idle()
        preempted = worker.hybrid.metrics.registry.get_sample_value("flowpath_preemptions_total")
        assert preempted
        computed = worker.hybrid.metrics.registry.get_sample_value(
            "flowpath_engine_step_tokens_sum"
        )
        assert computed == 4 * (20 + 60 - 1), "nothing was computed twice"


async def test_heartbeats_count_the_orders_that_had_come(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        await cluster.start_worker("w", Role.COMBINED)
        assert cluster.heartbeats["w"][-1].num_orders == 0
        for number in (1, 2):
            cluster.place(f"r{number}", PROMPT, GREEDY, prefill="w", decode=None)
            await cluster.board.wait_for(
                "the order is counted",
                lambda number=number: cluster.heartbeats["w"][-1].num_orders == number,
            )
        for number in (1, 2):
            await cluster.answer(f"r{number}")
