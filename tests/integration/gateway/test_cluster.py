"""The gateway's cluster half over real sockets: what ends a stream whose end does not come."""

from time import monotonic

import pytest

from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages.control import RequestFinished, RequestRefused
from common.sampling import FinishReason
from services.gateway.backend import TokenDelta
from services.gateway.cluster import SILENCE_SECONDS, ClusterSubmission
from tests.support.scripted_cluster import scripted_cluster

FINISHED = RequestFinished(request_id=RequestId("r"), was_cancelled=False)


async def tokens_of(submission: ClusterSubmission) -> list[int]:
    """Take a stream to its end."""
    return [
        token.token_id
        async for event in submission.events()
        if isinstance(event, TokenDelta)
        for token in event.tokens
    ]


async def test_a_stream_whose_last_tokens_are_lost_is_ended_by_name(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        cluster.emit(0, 7)
        events = submission.events()
        assert [token.token_id for token in (await anext(events)).tokens] == [7]
        cluster.say(FINISHED)
        await cluster.settle()
        submission.check_deadlines(monotonic() + 0.9 * SILENCE_SECONDS)  # they may still come
        submission.check_deadlines(monotonic() + SILENCE_SECONDS)
        with pytest.raises(RequestError, match="tokens were lost") as failed:
            await anext(events)
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


async def test_a_request_that_was_placed_and_is_refused_after_all_ends_by_name(tmp_path):
    async with scripted_cluster(tmp_path) as cluster:
        submission = await cluster.submit()
        refused = RequestRefused(
            request_id=RequestId("r"), code=ErrorCode.NO_WORKER, message="nobody is left"
        )
        cluster.say(refused)
        with pytest.raises(RequestError, match="nobody is left") as failed:
            await tokens_of(submission)
        assert failed.value.code is ErrorCode.NO_WORKER
        await submission.aclose()
