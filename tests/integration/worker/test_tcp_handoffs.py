"""Handoffs of real workers over the ``tcp`` transport, whose grants the decode side takes back."""

from collections.abc import Sequence
from pathlib import Path

from structlog.testing import capture_logs

from common.errors import ErrorCode
from common.messages.control import DecodeRefused, RequestFinished
from common.messages.fields import Role
from common.sampling import SamplingParams
from tests.support.running_worker import LAYOUT, RunningWorker, WorkerOptions
from tests.support.scripted_peers import scripted_decode
from tests.support.worker_harness import expected, harness

GREEDY = SamplingParams(seed=1, max_tokens=20, temperature=0)
PROMPT = tuple(range(100, 161))
TCP = WorkerOptions(transport="tcp")


async def test_an_answer_over_tcp_is_the_one_of_a_single_worker(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        with capture_logs() as logs:
            prefill, decode = await cluster.pair(TCP, TCP)
            for number in range(3):
                cluster.place(f"r{number}", PROMPT[number:], GREEDY)
            for number in range(3):
                stream = await cluster.answer(f"r{number}")
                assert stream.token_ids(0) == expected(PROMPT[number:], GREEDY)
            await prefill.idle()
            await decode.idle()
        paired = [entry["transport"] for entry in logs if entry["event"] == "paired"]
        assert paired == ["tcp"]


async def test_a_block_that_is_damaged_is_written_again_with_the_same_token(
    tmp_path: Path,
) -> None:
    targets: list[RunningWorker] = []
    damaged: list[int] = []

    def damage_once(block_ids: Sequence[int]) -> None:
        if not damaged:
            damaged.append(block_ids[-1])
            targets[0].pool.buffer[block_ids[-1] * LAYOUT.block_bytes + 5] ^= 0x40

    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair(
            WorkerOptions(transport="tcp", after_write=damage_once), TCP
        )
        targets.append(decode)
        cluster.place("r", PROMPT, GREEDY)
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
        assert damaged
        await prefill.idle()
        await decode.idle()


async def test_a_cancelled_transfer_is_freed_without_the_writers_word(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair(TCP, TCP)
        prefill.writes.hold(0)
        cluster.place("r", PROMPT, GREEDY)
        await prefill.writes.arrived(1)
        cluster.cancel("r", "decode")
        await decode.idle()
        prefill.writes.open()
        cluster.cancel("r", "prefill")
        await prefill.idle()
        cluster.place("again", PROMPT, GREEDY)
        assert (await cluster.answer("again")).token_ids(0) == expected(PROMPT, GREEDY)
        await decode.idle()


async def test_blocks_of_a_dead_writer_are_freed(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair(TCP, TCP)
        prefill.writes.hold(0)
        cluster.place("r", PROMPT, GREEDY)
        await prefill.writes.arrived(1)
        cluster.bury("prefill", "decode")
        await cluster.heard("decode", RequestFinished, "r")
        await decode.idle()


async def test_a_pair_is_told_of_and_so_is_its_silence(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster, scripted_decode(cluster) as decode:
        await cluster.start_worker("prefill", Role.PREFILL)
        await cluster.told_of_pair("prefill", "decode", is_broken=False)
        decode.is_renewing = False
        pair = await cluster.told_of_pair("prefill", "decode")
        assert (pair.transport, pair.reason) == ("shm", "paired, but silent for over 1.5 s")
        decode.is_renewing = True
        await cluster.told_of_pair("prefill", "decode", is_broken=False)


async def test_workers_without_a_common_transport_are_refused_by_name(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        with capture_logs() as logs:
            prefill, decode = await cluster.pair(WorkerOptions(), TCP)
            cluster.place("r", PROMPT, GREEDY)
            refused = await cluster.heard("prefill", DecodeRefused, "r")
            assert refused.code is ErrorCode.TRANSFER_FAILED
            cluster.cancel("r", "prefill")
            await prefill.idle()
            await decode.idle()
            pair = await cluster.told_of_pair("prefill", "decode")
        assert pair.transport == ""
        failed = [entry for entry in logs if entry["event"] == "pairing_failed"]
        assert len(failed) == 1, "it was tried again for the request, and told once"
        assert pair.reason == failed[0]["reason"]
        assert "[shm]" in failed[0]["reason"]
        assert "[tcp]" in failed[0]["reason"]
