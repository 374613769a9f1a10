"""One request after the other through real workers: alone, handed over, refused, preempted."""

import asyncio
from pathlib import Path

from structlog.testing import capture_logs

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.control import (
    DecodeRefused,
    DecodeStarted,
    PrefillRefused,
    RequestFailed,
    RequestFinished,
    WorkerAccepted,
)
from common.messages.fields import Role
from common.sampling import FinishReason, SamplingParams
from tests.support.running_worker import WorkerOptions
from tests.support.worker_harness import expected, harness

GREEDY = SamplingParams(seed=1, max_tokens=20, temperature=0)
HOT = SamplingParams(seed=7, max_tokens=12, temperature=1, num_choices=3)
PROMPT = tuple(range(100, 161))


async def test_a_worker_of_both_roles_answers_alone(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("combined", Role.COMBINED)
        cluster.place("r", PROMPT, HOT, prefill="combined", decode=None)
        stream = await cluster.answer("r", 3)
        for choice in range(3):
            assert stream.token_ids(choice) == expected(PROMPT, HOT, choice)
            assert stream.finished[choice] is FinishReason.LENGTH
        ended = await cluster.heard("combined", RequestFinished, "r")
        assert not ended.was_cancelled
        await worker.idle()


async def test_a_handed_over_request_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair()
        cluster.place("r", PROMPT, HOT)
        stream = await cluster.answer("r", 3)
        assert [stream.token_ids(choice) for choice in range(3)] == [
            expected(PROMPT, HOT, choice) for choice in range(3)
        ]
        await cluster.heard("decode", DecodeStarted, "r")
        await cluster.heard("decode", RequestFinished, "r")
        await prefill.idle()
        await decode.idle()
        assert not [entry for entry in cluster.told if entry[0] == "prefill"]


async def test_a_decode_that_finds_no_room_goes_on_elsewhere(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        tiny = await cluster.start_worker("tiny", Role.DECODE, WorkerOptions(num_blocks=4))
        prefill, decode = await cluster.pair()
        cluster.place("r", PROMPT, GREEDY, decode="tiny")
        refused = await cluster.heard("prefill", DecodeRefused, "r")
        assert (refused.decode_worker, refused.code) == ("tiny", ErrorCode.NO_ROOM)
        cluster.place_decode("r", "decode")
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
        await cluster.heard("decode", RequestFinished, "r")
        for worker in (tiny, prefill, decode):
            await worker.idle()


async def test_a_decode_that_finds_no_room_anywhere_stays_where_its_prefill_was(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        prefill, _ = await cluster.pair(decode=WorkerOptions(num_blocks=4))
        cluster.place("r", PROMPT, HOT)
        await cluster.heard("prefill", DecodeRefused, "r")
        cluster.place_decode("r", "prefill")
        stream = await cluster.answer("r", 3)
        for choice in range(3):
            assert stream.token_ids(choice) == expected(PROMPT, HOT, choice)
        await cluster.heard("prefill", RequestFinished, "r")
        await prefill.idle()


async def test_a_prompt_that_fills_the_decode_pool_is_taken_without_room_for_growth(
    tmp_path: Path,
) -> None:
    prompt = tuple(range(60))
    async with harness(tmp_path) as cluster:
        _, decode = await cluster.pair(decode=WorkerOptions(num_blocks=8))
        params = SamplingParams(seed=1, max_tokens=5, temperature=0)
        cluster.place("r", prompt, params)
        assert (await cluster.answer("r")).token_ids(0) == expected(prompt, params)
        await decode.idle()


async def test_decodes_that_outgrow_a_tiny_pool_are_preempted_and_end_right(
    tmp_path: Path,
) -> None:
    params = SamplingParams(seed=1, max_tokens=60, temperature=0)
    prompts = {f"r{place}": tuple(range(place, place + 20)) for place in range(4)}
    async with harness(tmp_path) as cluster:
        with capture_logs() as logs:
            _, decode = await cluster.pair(decode=WorkerOptions(num_blocks=24))
            for request, prompt in prompts.items():
                cluster.place(request, prompt, params)
            for request, prompt in prompts.items():
                assert (await cluster.answer(request)).token_ids(0) == expected(prompt, params)
        assert [entry for entry in logs if entry["event"] == "preempted"]
        await decode.idle()


async def test_a_choice_that_was_cancelled_before_the_handoff_is_not_decoded(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        await cluster.start_worker("tiny", Role.DECODE, WorkerOptions(num_blocks=4))
        _, decode = await cluster.pair()
        cluster.place("r", PROMPT, HOT, decode="tiny")
        await cluster.heard("prefill", DecodeRefused, "r")
        stream = cluster.streams[RequestId("r")]
        await cluster.board.wait_for("first tokens", lambda: len(stream.tokens) == 3)
        cluster.cancel("r", "prefill", choice=1)
        cluster.place_decode("r", "decode")
        await cluster.heard("decode", RequestFinished, "r")
        # Tokens come on a channel of their own.
        await cluster.board.wait_for(
            "the tokens of choices 0 and 2",
            lambda: [len(stream.token_ids(c)) for c in (0, 2)] == [12, 12],
        )
        assert len(stream.token_ids(1)) == 1
        await decode.idle()


async def test_a_choice_that_is_cancelled_while_its_blocks_are_written_is_not_decoded(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair()
        prefill.writes.hold()
        cluster.place("r", PROMPT, HOT)
        stream = cluster.streams[RequestId("r")]
        await cluster.board.wait_for("first tokens", lambda: len(stream.tokens) == 3)
        cluster.cancel("r", "prefill", choice=1)
        # Orders are taken one by one: once this is answered, the cancel has been taken.
        cluster.cancel("unknown", "prefill")
        await cluster.heard("prefill", RequestFinished, "unknown")
        prefill.writes.open()
        await cluster.heard("decode", RequestFinished, "r")
        await cluster.board.wait_for(
            "the tokens of choices 0 and 2",
            lambda: [len(stream.token_ids(c)) for c in (0, 2)] == [12, 12],
        )
        assert len(stream.token_ids(1)) == 1
        await decode.idle()


async def test_a_request_whose_last_choice_was_cancelled_on_its_way_is_told_by_the_decode_side(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair()
        prefill.writes.hold()
        cluster.place("r", PROMPT, GREEDY)
        await prefill.writes.arrived(1)
        cluster.cancel("r", "decode", choice=0)
        # Orders are taken one by one: once this is answered, the cancel has been taken.
        cluster.cancel("unknown", "decode")
        await cluster.heard("decode", RequestFinished, "unknown")
        prefill.writes.open()
        # The controller counts a request's end only from who has started to decode it.
        await cluster.heard("decode", DecodeStarted, "r")
        await cluster.heard("decode", RequestFinished, "r")
        await prefill.idle()
        await decode.idle()


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("combined", Role.COMBINED)
        worker.steps.hold()
        cluster.place("old", PROMPT, GREEDY, prefill="combined", decode=None)
        await worker.steps.arrived(1)
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(worker.hybrid.drain(10.0))
            await cluster.board.wait_for(
                "the drain is told", lambda: cluster.heartbeats["combined"][-1].is_draining
            )
            cluster.place("new", PROMPT, GREEDY, prefill="combined", decode=None)
            refused = await cluster.heard("combined", PrefillRefused, "new")
            assert refused.code is ErrorCode.SHUTTING_DOWN
            worker.steps.open()
        assert draining.result() is True
        assert (await cluster.answer("old")).token_ids(0) == expected(PROMPT, GREEDY)


async def test_an_idle_worker_that_drains_refuses_what_was_on_its_way_before_it_leaves(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("combined", Role.COMBINED)
        cluster.is_answering = False
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(worker.hybrid.drain(10.0))
            await cluster.board.wait_for(
                "the drain is told", lambda: cluster.heartbeats["combined"][-1].is_draining
            )
            assert not draining.done()
            cluster.place("late", PROMPT, GREEDY, prefill="combined", decode=None)
            cluster.is_answering = True
            refused = await cluster.heard("combined", PrefillRefused, "late")
            assert refused.code is ErrorCode.SHUTTING_DOWN
        assert draining.result() is True


async def test_a_registration_is_told_once_however_many_hellos_are_answered(
    tmp_path: Path,
) -> None:
    with capture_logs() as logs:
        async with harness(tmp_path) as cluster:
            worker = await cluster.start_worker("combined", Role.COMBINED)
            accepted = WorkerAccepted(
                role=Role.COMBINED, role_generation=1, heartbeat_seconds=0.02, peers=()
            )
            for _ in range(3):
                cluster.order("combined", accepted)
            cluster.place("r", PROMPT, GREEDY, prefill="combined", decode=None)
            await cluster.answer("r")
            await worker.idle()
    assert [entry["event"] for entry in logs].count("registered") == 1


async def test_a_controller_that_is_silent_is_told_of_once_and_so_is_its_return(
    tmp_path: Path,
) -> None:
    with capture_logs() as logs:
        async with harness(tmp_path) as cluster:
            await cluster.start_worker("combined", Role.COMBINED)
            cluster.is_answering = False

            def told() -> list[str]:
                return [entry["event"] for entry in logs if "controller_" in entry["event"]]

            await cluster.board.wait_for("it is missed", lambda: told() == ["controller_silent"])
            cluster.is_answering = True
            back = ["controller_silent", "controller_back"]
            await cluster.board.wait_for("it is back", lambda: told() == back)


async def test_what_a_drain_cannot_finish_in_time_ends_by_name(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("combined", Role.COMBINED)
        worker.steps.hold(2)
        cluster.place("r", PROMPT, GREEDY, prefill="combined", decode=None)
        await worker.steps.arrived(3)
        assert await worker.hybrid.drain(0.0) is False
        worker.hybrid.abandon(ErrorCode.SHUTTING_DOWN, "over")
        assert await cluster.failure("r") is ErrorCode.SHUTTING_DOWN
        failed = await cluster.heard("combined", RequestFailed, "r")
        assert failed.code is ErrorCode.SHUTTING_DOWN
        worker.steps.open()
        await worker.idle()


async def test_books_that_do_not_add_up_quarantine_a_worker_at_rest(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("combined", Role.COMBINED)
        cluster.place("r", PROMPT, GREEDY, prefill="combined", decode=None)
        await cluster.answer("r")
        await worker.idle()
        assert worker.hybrid.availability.why_refuse() is None
        worker.blocks._num_holders[0] += 1
        await cluster.board.wait_for(
            "the worker looked at its books",
            lambda: worker.hybrid.availability.why_refuse() is not None,
        )
        cluster.place("s", PROMPT, GREEDY, prefill="combined", decode=None)
        failed = await cluster.heard("combined", PrefillRefused, "s")
        assert (failed.code, failed.message) == (ErrorCode.NO_WORKER, "combined is quarantined")
