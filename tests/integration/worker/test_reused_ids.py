"""A request id that comes again while its first request is not over."""

from pathlib import Path

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.control import RequestFailed
from common.messages.handoff import ReserveRefused
from common.sampling import SamplingParams
from tests.support.scripted_peers import scripted_prefill
from tests.support.worker_harness import expected, harness

GREEDY = SamplingParams(seed=1, max_tokens=20, temperature=0)
PROMPT = tuple(range(100, 161))


async def test_an_id_that_is_being_decoded_is_refused_as_a_new_request(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair()
        decode.steps.hold(0)
        cluster.place("r", PROMPT, GREEDY)
        await decode.steps.arrived(1)
        first = cluster.streams_of("r")
        cluster.place("r", PROMPT, GREEDY, prefill="decode", decode=None)
        cluster.streams[RequestId("r")] = first  # the gateway still waits for the first one
        refused = await cluster.heard("decode", RequestFailed, "r")
        assert refused.code is ErrorCode.INTERNAL
        assert "still has a request of this id" in refused.message
        async with scripted_prefill(cluster, "decode", "other") as other:
            await other.pair()
            other.send_reserve("r", PROMPT, GREEDY)
            unheld = await other.hears(ReserveRefused)
        assert unheld.code is ErrorCode.INTERNAL
        assert "still has a request of this id" in unheld.message
        decode.steps.open()
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
        await prefill.idle()
        await decode.idle()
