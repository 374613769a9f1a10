"""The gateway's cluster half over real sockets: what ends a stream whose end does not come."""

import asyncio
from dataclasses import replace
from time import monotonic

import pytest

from common.errors import ErrorCode, RequestError
from common.ids import RequestId, WorkerId
from common.messages.control import (
    CancelRequest,
    RequestFailed,
    RequestFinished,
    RequestPlaced,
    RequestRefused,
)
from common.messages.fields import PhaseName, PhaseRecord
from common.sampling import FinishReason
from services.gateway import submission as submission_module
from services.gateway.backend import TokenDelta
from services.gateway.submission import (
    ANSWER_SECONDS,
    POLL_SECONDS,
    RESUME_RETRY_SECONDS,
    SILENCE_SECONDS,
    ClusterSubmission,
)
from tests.support.scripted_cluster import MAX_RESUMES, PARAMS, READY, scripted_cluster

FINISHED = RequestFinished(request_id=RequestId("r"), was_cancelled=False)
PREFILL = PhaseRecord(name=PhaseName.PREFILL, worker="p0", seconds=0.25, num_tokens=2)
DECODE = PhaseRecord(name=PhaseName.DECODE, worker="d0", seconds=0.5, num_tokens=3)
NOBODY = RequestRefused(
    request_id=RequestId("r"), code=ErrorCode.NO_WORKER, message="nobody is left"
)
PLACED = RequestPlaced(
    request_id=RequestId("r"), prefill_worker=WorkerId("d0"), decode_worker=WorkerId("d0")
)


async def tokens_of(submission: ClusterSubmission) -> list[int]:
    """Take a stream to its end."""
    return [
        token.token_id
        async for event in submission.events()
        if isinstance(event, TokenDelta)
        for token in event.tokens
    ]


async def test_a_stream_whose_last_tokens_are_lost_goes_on_elsewhere(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.emit(0, 7)
        events = submission.events()
        assert [token.token_id for token in (await anext(events)).tokens] == [7]
        cluster.say(FINISHED)
        await cluster.settle()
        submission.check_deadlines(monotonic() + 0.9 * SILENCE_SECONDS)  # they may still come
        assert list(cluster.submitted) == ["r", "marker"]
        submission.check_deadlines(monotonic() + SILENCE_SECONDS)
        await cluster.hears_cancel()
        _, prompt = await cluster.resubmitted("r~1")
        assert prompt == [1, 2, 7]
        cluster.emit(1, 8, finish=FinishReason.STOP, request="r~1")
        assert [token.token_id async for event in events for token in event.tokens] == [8]
        await submission.aclose()


async def test_a_stream_whose_last_tokens_are_lost_is_ended_by_name_without_resumes(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        cluster.backend.max_resumes = 0
        submission = await cluster.submit()
        cluster.say(FINISHED)
        await cluster.settle()
        submission.check_deadlines(monotonic() + SILENCE_SECONDS)
        with pytest.raises(RequestError, match="tokens were lost") as failed:
            await tokens_of(submission)
        assert failed.value.code is ErrorCode.TRANSFER_FAILED
        await submission.aclose()
        await cluster.hears_cancel()


async def test_last_tokens_that_are_behind_the_news_of_the_end_are_waited_for(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.say(FINISHED)
        await cluster.settle()
        cluster.emit(0, 7)
        cluster.emit(1, 8, finish=FinishReason.STOP)
        assert await tokens_of(submission) == [7, 8]
        submission.check_deadlines(monotonic() + 2 * SILENCE_SECONDS)
        assert await tokens_of(submission) == []
        await submission.aclose()


async def test_a_request_that_was_placed_and_is_refused_after_all_is_placed_again(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.say(NOBODY)
        await cluster.resubmitted("r~1")
        cluster.emit(0, 7, finish=FinishReason.STOP, request="r~1")
        assert await tokens_of(submission) == [7]
        await submission.aclose()


async def test_a_request_that_was_placed_and_is_refused_after_all_ends_by_name_without_resumes(
    tmp_path,
):
    async with scripted_cluster(tmp_path) as cluster:
        cluster.backend.max_resumes = 0
        submission = await cluster.submit()
        cluster.say(NOBODY)
        with pytest.raises(RequestError, match="nobody is left") as failed:
            await tokens_of(submission)
        assert failed.value.code is ErrorCode.NO_WORKER
        await submission.aclose()


async def test_a_queued_request_counts_as_taken_in_and_waits_as_long_as_it_takes(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        cluster.queueing = True
        submission = await cluster.submit()
        submission.check_deadlines(monotonic() + 20 * ANSWER_SECONDS)
        cluster.say(PLACED)
        cluster.emit(0, 7, finish=FinishReason.STOP)
        assert await tokens_of(submission) == [7]
        assert list(cluster.submitted) == ["r"]
        await submission.aclose()


async def test_a_queued_request_is_queued_again_by_the_next_controller(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        cluster.queueing = True
        queued = await cluster.submit()
        cluster.queueing = False
        placed = await cluster.submit(name="p")
        cluster.begin_anew()
        _, prompt = await cluster.resubmitted("r~1")
        assert prompt == [1, 2]
        cluster.emit(0, 7, finish=FinishReason.STOP, request="r~1")
        cluster.emit(0, 8, finish=FinishReason.STOP, request="p")
        assert await tokens_of(queued) == [7]
        assert await tokens_of(placed) == [8]
        assert list(cluster.submitted) == ["r", "p", "r~1"]
        await queued.aclose()
        await placed.aclose()


async def test_a_request_whose_controller_died_before_it_answered_is_asked_for_again(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        cluster.backend.max_resumes = 0
        cluster.ignoring = 1
        async with asyncio.TaskGroup() as group:
            submitting = group.create_task(cluster.submit())
            await cluster.resubmitted("r")
            cluster.begin_anew()
        submission = submitting.result()
        # A worker may have the first one, and would not take its id again.
        await cluster.hears_cancel("r")
        cluster.emit(0, 7, finish=FinishReason.STOP, request="r~1")
        assert await tokens_of(submission) == [7]
        await submission.aclose()


@pytest.mark.parametrize("is_refused_first", [False, True])
async def test_a_request_that_the_next_controller_gets_from_a_stranger_is_served_once(
    tmp_path, is_refused_first
):
    async with scripted_cluster(tmp_path) as cluster:
        cluster.ignoring = 1
        async with asyncio.TaskGroup() as group:
            submitting = group.create_task(cluster.submit())
            await cluster.resubmitted("r")
            if not is_refused_first:
                cluster.begin_anew()
            else:
                cluster.be_another()
            cluster.refuse("r", ErrorCode.NO_WORKER, "it does not know this gateway yet")
            await cluster.resubmitted("r~1")
        submission = submitting.result()
        await cluster.settle()
        cluster.emit(0, 7, request="r~1")
        cluster.emit(1, 8, finish=FinishReason.STOP, request="r~1")
        assert await tokens_of(submission) == [7, 8]
        await submission.aclose()
        await cluster.hears_streams(0)
        assert (cluster.num_submits("r"), cluster.num_submits("r~1")) == (1, 1)
        assert (cluster.num_cancels("r"), cluster.num_cancels("r~1")) == (1, 0)


async def test_tokens_that_come_before_the_word_of_their_placing_are_enough(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        cluster.ignoring = 1
        async with asyncio.TaskGroup() as group:
            submitting = group.create_task(cluster.submit())
            await cluster.resubmitted("r")
            cluster.emit(0, 7)
        submission = submitting.result()
        cluster.begin_anew()
        await cluster.settle()
        cluster.emit(1, 8, finish=FinishReason.STOP)
        assert await tokens_of(submission) == [7, 8]
        await submission.aclose()
        assert "r~1" not in cluster.submitted


async def test_a_request_that_comes_before_the_controller_knows_the_gateway_is_held(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        await cluster.settle()
        cluster.refusing = ["r"]  # as a controller does that got it before the hello
        cluster.deaf = True
        cluster.begin_anew()
        await cluster.hears_hellos(2)
        async with asyncio.TaskGroup() as group:
            submitting = group.create_task(cluster.submit())
            await cluster.hears_hellos(3)  # it says hello until it is answered
            assert cluster.num_submits("r") == 0
            cluster.refusing, cluster.deaf = [], False
        submission = submitting.result()
        cluster.emit(0, 7, finish=FinishReason.STOP)
        assert await tokens_of(submission) == [7]
        await submission.aclose()


async def test_a_fenced_gateway_lets_its_streams_go_on_after_what_they_have(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.emit(0, 7)
        events = submission.events()
        assert [token.token_id for token in (await anext(events)).tokens] == [7]
        cluster.fence()
        submit, prompt = await cluster.resubmitted("r~1")
        assert (prompt, submit.params.num_drawn) == ([1, 2, 7], 1)
        cluster.emit(1, 8, finish=FinishReason.STOP, request="r~1")
        assert [token.token_id async for event in events for token in event.tokens] == [8]
        await submission.aclose()


async def test_a_fenced_gateway_without_resumes_ends_its_streams_by_name(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        cluster.backend.max_resumes = 0
        submission = await cluster.submit()
        cluster.fence()
        with pytest.raises(RequestError, match="fenced: no heartbeat") as failed:
            await tokens_of(submission)
        assert failed.value.code is ErrorCode.NO_WORKER
        await submission.aclose()


async def test_what_an_earlier_controller_placed_outlives_a_fence(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.begin_anew()
        await cluster.settle()
        cluster.fence()
        await cluster.hears_hellos(3)
        cluster.emit(0, 7, finish=FinishReason.STOP)
        assert await tokens_of(submission) == [7]
        await submission.aclose()
        assert "r~1" not in cluster.submitted


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_a_stream_whose_worker_died_while_there_was_no_controller_goes_on_at_once(
    tmp_path, has_tokens
):
    async with scripted_cluster(tmp_path) as cluster:
        await cluster.tell(replace(READY, workers=(cluster.worker,), has_all_workers=True))
        submission = await cluster.submit()
        if has_tokens:
            cluster.emit(0, 7)
            await anext(submission.events())
        cluster.state = replace(READY, workers=(cluster.worker,))
        cluster.begin_anew()
        await cluster.hears_hellos(2)
        await cluster.settle()
        submission.check_deadlines(monotonic() + 20.0)
        assert "r~1" not in cluster.submitted, "the worker may not have said hello yet"
        anew = replace(cluster.worker, epoch=cluster.worker.epoch ^ 1)
        await cluster.tell(replace(READY, workers=(anew,), has_all_workers=True))
        submission.check_deadlines(monotonic() + 2 * POLL_SECONDS)
        await cluster.hears_cancel("r")
        _, prompt = await cluster.resubmitted("r~1")
        assert prompt == ([1, 2, 7] if has_tokens else [1, 2])
        await submission.aclose()


async def test_a_stream_whose_worker_lives_or_is_heard_outlives_its_controller(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(submission_module, "POLL_SECONDS", 15.0)
    async with scripted_cluster(tmp_path) as cluster:
        await cluster.tell(replace(READY, workers=(cluster.worker,), has_all_workers=True))
        submission = await cluster.submit()
        cluster.begin_anew()
        await cluster.hears_hellos(2)
        await cluster.settle()
        submission.check_deadlines(monotonic() + 20.0)
        await cluster.tell(replace(READY, has_all_workers=True))
        cluster.emit(0, 7)
        events = submission.events()
        await anext(events)
        submission.check_deadlines(monotonic() + 5.0)
        cluster.emit(1, 8, finish=FinishReason.STOP)
        assert [token.token_id async for event in events for token in event.tokens] == [8]
        await submission.aclose()
        assert "r~1" not in cluster.submitted


async def test_a_choice_whose_worker_died_goes_on_while_another_one_still_looks_for_a_worker(
    tmp_path,
):
    async with scripted_cluster(tmp_path) as cluster:
        await cluster.tell(replace(READY, workers=(cluster.worker,), has_all_workers=True))
        submission = await cluster.submit(2)
        cluster.emit(0, 7)
        cluster.emit(0, 20, choice=1)
        await anext(submission.events())
        cluster.refusing = ["r~2"]
        cluster.say(died("r"))
        await cluster.hears_submits("r~2", 2)
        cluster.begin_anew()
        await cluster.hears_hellos(2)
        await cluster.tell(replace(READY, has_all_workers=True))
        submission.check_deadlines(monotonic() + 2 * POLL_SECONDS)
        await cluster.hears_cancel("r~1")
        await submission.aclose()


async def test_tokens_of_a_request_that_nobody_asked_for_end_it_once(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.emit(0, 7, request="stray")
        cluster.emit(1, 8, request="stray")
        cluster.emit(0, 7, finish=FinishReason.STOP)
        assert await tokens_of(submission) == [7]
        await submission.aclose()
        await cluster.hears_cancel("stray")
        other = await cluster.submit(name="other")
        cluster.emit(1, 8)  # late
        cluster.emit(0, 9, finish=FinishReason.STOP, request="other")
        assert await tokens_of(other) == [9]
        await other.aclose()
        await cluster.hears_streams(0)
        assert (cluster.num_cancels("stray"), cluster.num_cancels("r")) == (1, 0)


async def test_a_request_that_fails_once_its_answer_is_whole_leaves_nothing(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.emit(0, 7, finish=FinishReason.STOP)
        assert await tokens_of(submission) == [7]
        cluster.say(died("r"))
        await cluster.settle()
        await submission.aclose()
        await cluster.hears_streams(0)


async def test_a_worker_whose_tokens_cannot_be_is_told_to_stop(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.emit(0, 7, choice=5)
        with pytest.raises(RequestError, match="choice 5 of 1"):
            await tokens_of(submission)
        await cluster.hears_cancel("r")
        await submission.aclose()


# ---- requests that lose their worker -------------------------------------------------------------


def died(request: str, code: ErrorCode = ErrorCode.WORKER_DIED) -> RequestFailed:
    return RequestFailed(request_id=RequestId(request), code=code, message="d0 is gone")


async def test_a_stream_whose_worker_dies_goes_on_elsewhere_without_gap_or_repeat(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.emit(0, 7, 8)
        cluster.emit(3, 99)  # behind a gap: another worker draws it again
        events = submission.events()
        assert [token.token_id for token in (await anext(events)).tokens] == [7, 8]
        cluster.say(died("r"))
        submit, prompt = await cluster.resubmitted("r~1")
        assert prompt == [1, 2, 7, 8]
        assert submit.params == replace(PARAMS, num_drawn=2)
        cluster.emit(2, 666)  # the dead worker's last word
        cluster.emit(2, 9, 10, request="r~1")
        cluster.emit(4, 11, finish=FinishReason.STOP, request="r~1")
        rest = [token.token_id async for event in events for token in event.tokens]
        assert rest == [9, 10, 11]
        await submission.aclose()


async def test_the_phases_of_all_workers_of_a_request_are_kept(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.emit(0, 7, phases=(PREFILL,))
        events = submission.events()
        await anext(events)
        cluster.say(died("r"))
        await cluster.resubmitted("r~1")
        cluster.emit(1, 8, phases=(PREFILL,), request="r~1")
        cluster.emit(2, 9, finish=FinishReason.STOP, phases=(DECODE,), request="r~1")
        assert [token.token_id async for event in events for token in event.tokens] == [8, 9]
        names = [(phase.name, phase.worker) for phase in submission.phases]
        assert names == [
            ("place", "g"),
            ("prefill", "p0"),
            ("resume", "g"),
            ("prefill", "p0"),
            ("decode", "d0"),
        ]
        await submission.aclose()


async def test_choices_go_on_each_with_its_own_tokens(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit(3)
        cluster.emit(0, 7)
        cluster.emit(0, 20, 21, choice=1)
        cluster.emit(0, 30, choice=2, finish=FinishReason.LENGTH)
        await cluster.settle()
        cluster.say(died("r"))
        first, first_prompt = await cluster.resubmitted("r~1")
        second, second_prompt = await cluster.resubmitted("r~2")
        assert (first_prompt, second_prompt) == ([1, 2, 7], [1, 2, 20, 21])
        assert first.params == replace(PARAMS, num_choices=1, first_choice=0, num_drawn=1)
        assert second.params == replace(PARAMS, num_choices=1, first_choice=1, num_drawn=2)
        await submission.cancel_choice(1)
        cluster.emit(1, 8, finish=FinishReason.STOP, request="r~1")
        assert sorted(await tokens_of(submission)) == [7, 8, 20, 21, 30]
        await submission.aclose()
        cancels = [message for message in cluster.got if isinstance(message, CancelRequest)]
        assert [
            (cancel.request_id, cancel.choice)
            for cancel in cancels
            if cancel.request_id != "marker"
        ] == [("r~2", None)]


async def test_a_request_without_tokens_goes_on_whole(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit(3)
        cluster.say(died("r"))
        submit, prompt = await cluster.resubmitted("r~1")
        assert (prompt, submit.params) == ([1, 2], replace(PARAMS, num_choices=3))
        await submission.aclose()


async def test_a_request_that_nobody_takes_again_ends_with_what_ended_it_first(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(submission_module, "RESUME_SECONDS", 5 * RESUME_RETRY_SECONDS)
    async with scripted_cluster(tmp_path) as cluster:
        cluster.refusing = ["r~1"]
        submission = await cluster.submit()
        cluster.say(died("r"))
        with pytest.raises(RequestError, match="d0 is gone") as failed:
            await tokens_of(submission)
        assert failed.value.code is ErrorCode.WORKER_DIED
        assert cluster.num_submits("r~1") > 2
        await submission.aclose()


async def test_a_client_that_leaves_while_nobody_serves_it_leaves_nothing(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        cluster.refusing = ["r~1", "q~1"]
        submission, other = await cluster.submit(), await cluster.submit(name="q")
        cluster.say(died("r"))
        await cluster.resubmitted("r~1")
        await submission.aclose()
        cluster.say(died("q"))
        await cluster.hears_submits("q~1", 2)  # one more try of the first would have come before
        assert cluster.num_submits("r~1") == 1
        await other.aclose()


async def test_choices_that_go_on_apart_are_each_resumed_as_often(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        num_choices = MAX_RESUMES + 2
        submission = await cluster.submit(num_choices)
        for choice in range(num_choices):
            cluster.emit(0, choice, choice=choice)
        await cluster.settle()
        cluster.say(died("r"))
        for choice in range(num_choices):
            name = f"r~{choice + 1}"
            await cluster.resubmitted(name)
            cluster.say(died(name))
        for choice in range(num_choices):
            name = f"r~{num_choices + choice + 1}"
            submit, _ = await cluster.resubmitted(name)
            assert submit.params.first_choice == choice
            cluster.emit(1, 9, choice=choice, finish=FinishReason.STOP, request=name)
        assert sorted(await tokens_of(submission)) == [*range(num_choices), *[9] * num_choices]
        await submission.aclose()


async def test_a_request_that_kills_worker_after_worker_is_given_up(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        for name in ("r", *(f"r~{number}" for number in range(1, MAX_RESUMES + 1))):
            await cluster.resubmitted(name)
            cluster.say(died(name))
        with pytest.raises(RequestError, match="d0 is gone"):
            await tokens_of(submission)
        assert len(cluster.submitted) == 1 + MAX_RESUMES
        await submission.aclose()


async def test_a_fault_of_the_request_itself_is_not_tried_elsewhere(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.say(died("r", ErrorCode.INTERNAL))
        with pytest.raises(RequestError, match="d0 is gone"):
            await tokens_of(submission)
        assert list(cluster.submitted) == ["r"]
        await submission.aclose()
