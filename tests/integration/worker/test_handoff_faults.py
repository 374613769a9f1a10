"""Handoffs that meet damage, silence and death: nothing leaks and every end has a name."""

import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.errors import ErrorCode
from common.messages.control import DecodeRefused, DecodeStarted, RequestFailed, RequestFinished
from common.messages.fields import Role
from common.messages.handoff import (
    Abort,
    Aborted,
    AbortReason,
    Accepted,
    Commit,
    CommitRefused,
    LeasesRenewed,
    Release,
    RenewLeases,
    Reserve,
)
from common.sampling import SamplingParams
from tests.support.running_worker import LAYOUT, RunningWorker, WorkerOptions
from tests.support.scripted_peers import (
    ScriptedDecode,
    ScriptedPrefill,
    scripted_decode,
    scripted_prefill,
)
from tests.support.worker_harness import Harness, expected, harness

GREEDY = SamplingParams(seed=1, max_tokens=20, temperature=0)
PROMPT = tuple(range(100, 161))
NUM_PROMPT_BLOCKS = 8
SHORT_LEASE = WorkerOptions(lease_seconds=0.6)
RENEWED_LEASE = WorkerOptions(lease_seconds=1.5)
"""Long enough for a machine that leaves a process alone for a second."""


class Damage:
    """Flips a byte of the last block of the first ``num_times`` writes, in the target's pool."""

    def __init__(self, num_times: int) -> None:
        self.target: RunningWorker | None = None
        self._num_left = num_times

    def __call__(self, block_ids: Sequence[int]) -> None:
        if self._num_left and self.target is not None:
            self._num_left -= 1
            self.target.pool.buffer[block_ids[-1] * LAYOUT.block_bytes + 5] ^= 0x40


# ---- damage --------------------------------------------------------------------------------------


async def test_a_block_that_is_damaged_once_is_written_again_and_the_answer_is_right(
    tmp_path: Path,
) -> None:
    damage = Damage(1)
    async with harness(tmp_path) as cluster:
        with capture_logs() as logs:
            prefill, damage.target = await cluster.pair(WorkerOptions(after_write=damage))
            cluster.place("r", PROMPT, GREEDY)
            assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
            await cluster.heard("decode", RequestFinished, "r")
            await prefill.idle()
            await damage.target.idle()
        assert [e["request_id"] for e in logs if e["event"] == "block_damaged"] == ["r"]


async def test_a_block_that_is_damaged_again_fails_the_request_by_name(tmp_path: Path) -> None:
    damage = Damage(1000)
    async with harness(tmp_path) as cluster:
        prefill, damage.target = await cluster.pair(WorkerOptions(after_write=damage))
        cluster.place("r", PROMPT, GREEDY)
        assert await cluster.failure("r") is ErrorCode.TRANSFER_FAILED
        failed = await cluster.heard("prefill", RequestFailed, "r")
        assert failed.code is ErrorCode.TRANSFER_FAILED
        assert "damaged" in failed.message
        await prefill.idle()
        await damage.target.idle()


# ---- silence -------------------------------------------------------------------------------------


async def test_a_decode_side_that_goes_silent_fails_the_request_when_the_lease_ends(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster, scripted_decode(cluster) as decode:
        prefill = await cluster.start_worker("prefill", Role.PREFILL, RENEWED_LEASE)
        cluster.place("r", PROMPT, GREEDY)
        decode.reserve(await decode.hears(Reserve), range(NUM_PROMPT_BLOCKS))
        await decode.hears(Commit)
        decode.is_renewing = False
        assert await cluster.failure("r") is ErrorCode.WORKER_DIED
        abort = await decode.hears(Abort)
        assert abort.reason is AbortReason.LEASE_EXPIRED
        await prefill.idle()


async def test_blocks_of_a_silent_prefill_side_drain_until_it_has_answered(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        decode = await cluster.start_worker("decode", Role.DECODE, SHORT_LEASE)
        async with scripted_prefill(cluster, "decode") as prefill:
            await prefill.pair()
            transfer = await prefill.reserve("r", PROMPT, GREEDY)
            abort = await prefill.hears(Abort)
            assert abort.reason is AbortReason.LEASE_EXPIRED
            assert decode.blocks.counts().in_transfer > 0  # it may still be writing
            prefill.say(Aborted(transfer_id=transfer))
            await decode.idle()


async def test_a_commit_that_comes_after_the_lease_is_not_decoded(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        decode = await cluster.start_worker("decode", Role.DECODE, SHORT_LEASE)
        async with scripted_prefill(cluster, "decode") as prefill:
            await prefill.pair()
            await prefill.reserve("r", PROMPT, GREEDY)
            await prefill.hears(Abort)
            transfer = prefill.commit("r", PROMPT, GREEDY, [0] * NUM_PROMPT_BLOCKS)
            prefill.say(Aborted(transfer_id=transfer))
            await decode.idle()
            dropped = await cluster.heard("decode", RequestFinished, "r")
            assert dropped.was_cancelled
            assert not [m for m in prefill.got if isinstance(m, Accepted | CommitRefused)]


async def test_a_lease_that_is_renewed_outlives_its_length_many_times(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair(RENEWED_LEASE, RENEWED_LEASE)
        prefill.steps.hold(1)
        cluster.place("r", PROMPT, GREEDY)
        await prefill.steps.arrived(2)
        beats = len(cluster.heartbeats["decode"])
        await cluster.board.wait_for(
            "more than two leases of beats", lambda: len(cluster.heartbeats["decode"]) > beats + 180
        )
        prefill.steps.open()
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
        await decode.idle()


async def test_a_transfer_that_the_prefill_side_no_longer_names_is_freed(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        decode = await cluster.start_worker("decode", Role.DECODE)
        async with scripted_prefill(cluster, "decode") as prefill:
            await prefill.pair()
            await prefill.reserve("r", PROMPT, GREEDY)
            prefill.say(RenewLeases(transfer_ids=()))
            await prefill.hears(LeasesRenewed)
            await decode.idle()


# ---- death ---------------------------------------------------------------------------------------


async def _until_reserving(cluster: Harness, worker: RunningWorker, peer: ScriptedDecode) -> None:
    cluster.place("r", PROMPT, GREEDY)
    await peer.hears(Reserve)


async def _until_ready(cluster: Harness, worker: RunningWorker, peer: ScriptedDecode) -> None:
    worker.steps.hold()
    cluster.place("r", PROMPT, GREEDY)
    peer.reserve(await peer.hears(Reserve), range(NUM_PROMPT_BLOCKS))
    await peer.is_understood()


async def _until_writing(cluster: Harness, worker: RunningWorker, peer: ScriptedDecode) -> None:
    worker.writes.hold()
    cluster.place("r", PROMPT, GREEDY)
    peer.reserve(await peer.hears(Reserve), range(NUM_PROMPT_BLOCKS))
    await worker.writes.arrived(1)


async def _until_committing(cluster: Harness, worker: RunningWorker, peer: ScriptedDecode) -> None:
    cluster.place("r", PROMPT, GREEDY)
    peer.reserve(await peer.hears(Reserve), range(NUM_PROMPT_BLOCKS))
    await peer.hears(Commit)


PREFILL_PHASES = [_until_reserving, _until_ready, _until_writing, _until_committing]
UntilPrefill = Callable[[Harness, RunningWorker, ScriptedDecode], Coroutine[None, None, None]]


async def test_a_decode_side_that_is_gone_before_it_reserved_is_replaced(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster, scripted_decode(cluster) as gone:
        prefill = await cluster.start_worker("prefill", Role.PREFILL)
        await _until_reserving(cluster, prefill, gone)
        decode = await cluster.start_worker("other", Role.DECODE)
        cluster.bury("decode", "prefill")
        refused = await cluster.heard("prefill", DecodeRefused, "r")
        assert (refused.code, refused.decode_worker) == (ErrorCode.WORKER_DIED, "decode")
        cluster.place_decode("r", "other")
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
        await prefill.idle()
        await decode.idle()


@pytest.mark.parametrize("until", PREFILL_PHASES[1:])
async def test_the_death_of_a_decode_side_ends_the_request_in_each_phase(
    tmp_path: Path, until: UntilPrefill
) -> None:
    async with harness(tmp_path) as cluster, scripted_decode(cluster) as decode:
        prefill = await cluster.start_worker("prefill", Role.PREFILL)
        await until(cluster, prefill, decode)
        cluster.bury("decode", "prefill")
        cluster.cancel("sentinel", "prefill")
        await cluster.heard("prefill", RequestFinished, "sentinel")
        prefill.writes.open()
        prefill.steps.open()
        assert await cluster.failure("r") is ErrorCode.WORKER_DIED
        failed = await cluster.heard("prefill", RequestFailed, "r")
        assert (failed.code, "decode worker decode left" in failed.message) == (
            ErrorCode.WORKER_DIED,
            True,
        )
        await prefill.idle()


@pytest.mark.parametrize("until", PREFILL_PHASES)
async def test_a_cancel_ends_the_handoff_in_each_phase(tmp_path: Path, until: UntilPrefill) -> None:
    async with harness(tmp_path) as cluster, scripted_decode(cluster) as decode:
        prefill = await cluster.start_worker("prefill", Role.PREFILL)
        await until(cluster, prefill, decode)
        cluster.cancel("r", "prefill")
        cluster.cancel("sentinel", "prefill")
        await cluster.heard("prefill", RequestFinished, "sentinel")
        assert not [m for m in decode.got if isinstance(m, Abort)] or not prefill.writes.is_held
        prefill.writes.open()
        prefill.steps.open()
        abort = await decode.hears(Abort)
        assert abort.reason is AbortReason.CANCELLED
        ended = await cluster.heard("prefill", RequestFinished, "r")
        assert ended.was_cancelled
        await prefill.idle()


@pytest.mark.parametrize("until", PREFILL_PHASES)
async def test_a_decode_side_that_lets_go_is_answered_and_replaced_in_each_phase(
    tmp_path: Path, until: UntilPrefill
) -> None:
    async with harness(tmp_path) as cluster, scripted_decode(cluster) as decode:
        prefill = await cluster.start_worker("prefill", Role.PREFILL)
        await until(cluster, prefill, decode)
        reserve = await decode.hears(Reserve)
        decode.say(Abort(transfer_id=reserve.transfer_id, reason=AbortReason.SHUTTING_DOWN))
        prefill.writes.open()
        prefill.steps.open()
        answer = await decode.hears(Aborted)
        assert answer.transfer_id == reserve.transfer_id
        refused = await cluster.heard("prefill", DecodeRefused, "r")
        assert refused.code is ErrorCode.TRANSFER_FAILED
        cluster.place_decode("r", "prefill")
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
        await prefill.idle()


async def _until_reserved(worker: RunningWorker, peer: ScriptedPrefill) -> None:
    await peer.pair()
    await peer.reserve("r", PROMPT, GREEDY)


async def _until_draining(worker: RunningWorker, peer: ScriptedPrefill) -> None:
    await _until_reserved(worker, peer)
    await peer.hears(Abort)  # its short lease expired


@pytest.mark.parametrize("until", [_until_reserved, _until_draining])
async def test_the_death_of_a_prefill_side_frees_its_reservations(
    tmp_path: Path, until: Callable[[RunningWorker, ScriptedPrefill], Coroutine[None, None, None]]
) -> None:
    async with harness(tmp_path) as cluster:
        decode = await cluster.start_worker("decode", Role.DECODE, SHORT_LEASE)
        async with scripted_prefill(cluster, "decode") as prefill:
            await until(decode, prefill)
            assert decode.blocks.counts().in_transfer > 0
            cluster.bury("prefill", "decode")
            dropped = await cluster.heard("decode", RequestFinished, "r")
            assert dropped.was_cancelled
            await decode.idle()


async def test_blocks_of_a_process_that_was_only_taken_for_dead_drain_until_it_is_gone(
    tmp_path: Path,
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        async with harness(tmp_path) as cluster:
            decode = await cluster.start_worker("decode", Role.DECODE)
            async with scripted_prefill(cluster, "decode", pid=process.pid) as prefill:
                await _until_reserved(decode, prefill)
                cluster.bury("prefill", "decode")
                await prefill.hears(Abort)
                assert decode.blocks.counts().in_transfer > 0, "it may still write"
                process.kill()
                process.wait()
                await cluster.heard("decode", RequestFinished, "r")
                await decode.idle()


async def test_a_prefill_side_that_dies_while_its_commit_is_verified_is_not_needed(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        decode = await cluster.start_worker("decode", Role.DECODE)
        async with scripted_prefill(cluster, "decode") as prefill:
            gate = threading.Event()
            decode.copier.submit(gate.wait, 10)
            cluster.streams_of("r")
            await prefill.write_and_commit("r", PROMPT, GREEDY)
            cluster.bury("prefill", "decode")
            cluster.cancel("sentinel", "decode")
            await cluster.heard("decode", RequestFinished, "sentinel")
            gate.set()
            await cluster.heard("decode", DecodeStarted, "r")
            assert len((await cluster.answer("r")).token_ids(0)) == GREEDY.max_tokens
            await decode.idle()


async def test_a_prefill_side_that_dies_before_its_release_leaves_the_decode_alone(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        decode = await cluster.start_worker("decode", Role.DECODE)
        async with scripted_prefill(cluster, "decode") as prefill:
            decode.steps.hold()
            cluster.streams_of("r")
            await prefill.write_and_commit("r", PROMPT, GREEDY)
            await prefill.hears(Accepted)
            cluster.bury("prefill", "decode")
            decode.steps.open()
            assert len((await cluster.answer("r")).token_ids(0)) == GREEDY.max_tokens
            await decode.idle()


async def test_a_cancel_while_a_commit_is_verified_frees_the_blocks_after_it(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        decode = await cluster.start_worker("decode", Role.DECODE)
        async with scripted_prefill(cluster, "decode") as prefill:
            gate = threading.Event()
            decode.copier.submit(gate.wait, 10)
            await prefill.write_and_commit("r", PROMPT, GREEDY)
            await cluster.board.wait_for(
                "the commit is verified", lambda: decode.hybrid.is_busy and decode.is_copying
            )
            cluster.cancel("r", "decode")
            await prefill.hears(Abort)
            assert decode.blocks.counts().in_transfer > 0
            gate.set()
            dropped = await cluster.heard("decode", RequestFinished, "r")
            assert dropped.was_cancelled
            await decode.idle()


async def test_a_released_transfer_is_forgotten(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        await cluster.start_worker("decode", Role.DECODE)
        async with scripted_prefill(cluster, "decode") as prefill:
            cluster.streams_of("r")
            transfer = await prefill.write_and_commit("r", PROMPT, GREEDY)
            await prefill.hears(Accepted)
            prefill.say(Release(transfer_id=transfer))
            prefill.say(RenewLeases(transfer_ids=(transfer,)))
            renewed = await prefill.hears(LeasesRenewed)
            assert renewed.unknown_ids == (transfer,)
            await cluster.answer("r")
