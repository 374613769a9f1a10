"""Running workers that change their roles and drain, as the controller orders."""

from pathlib import Path

from common.errors import ErrorCode
from common.messages.control import (
    PrefillRefused,
    RequestFinished,
    RoleSwitched,
    SetDraining,
    SwitchRole,
    WorkerAccepted,
)
from common.messages.fields import Role
from common.sampling import SamplingParams
from tests.support.running_worker import RunningWorker
from tests.support.worker_harness import HEARTBEAT_SECONDS, Harness, expected, harness

GREEDY = SamplingParams(seed=1, max_tokens=20, temperature=0)
PROMPT = tuple(range(100, 161))


async def switch(cluster: Harness, worker: str, role: Role, generation: int) -> RoleSwitched:
    cluster.order(worker, SwitchRole(role=role, role_generation=generation))
    return await cluster.heard(worker, RoleSwitched)


async def test_two_workers_change_their_roles_and_requests_go_the_other_way(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        first, second = await cluster.pair()
        cluster.place("before", PROMPT, GREEDY)
        assert (await cluster.answer("before")).token_ids(0) == expected(PROMPT, GREEDY)
        for name, role in (("decode", Role.PREFILL), ("prefill", Role.DECODE)):
            answer = await switch(cluster, name, role, 2)
            assert answer == RoleSwitched(role=role, role_generation=2)
            cluster.tell_role(name, role)
        pair = await cluster.told_of_pair("decode", "prefill", is_broken=False)
        assert pair.transport == "shm"
        cluster.place("after", PROMPT, GREEDY, prefill="decode", decode="prefill")
        assert (await cluster.answer("after")).token_ids(0) == expected(PROMPT, GREEDY)
        await cluster.heard("prefill", RequestFinished, "after")
        await first.idle()
        await second.idle()


async def test_what_runs_goes_on_where_it_is_when_the_role_changes(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        prefill, decode = await cluster.pair()
        decode.steps.hold(3)
        cluster.place("r", PROMPT, GREEDY)
        await decode.steps.arrived(4)
        await switch(cluster, "decode", Role.PREFILL, 2)
        decode.steps.open()
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
        await cluster.heard("decode", RequestFinished, "r")
        await prefill.idle()
        await decode.idle()


async def test_a_stale_order_is_answered_with_the_role_that_holds(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        await cluster.start_worker("w", Role.DECODE)
        await switch(cluster, "w", Role.PREFILL, 5)
        answer = await switch(cluster, "w", Role.DECODE, 4)
        assert answer == RoleSwitched(role=Role.PREFILL, role_generation=5)
        answer = await switch(cluster, "w", Role.DECODE, 5)
        assert answer == RoleSwitched(role=Role.PREFILL, role_generation=5)


async def test_any_worker_hands_over_to_any_other_one(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        first = await cluster.start_worker("first", Role.DECODE)
        second = await cluster.start_worker("second", Role.DECODE)
        cluster.place("r", PROMPT, GREEDY, prefill="second", decode="first")
        assert (await cluster.answer("r")).token_ids(0) == expected(PROMPT, GREEDY)
        await cluster.heard("first", RequestFinished, "r")
        await first.idle()
        await second.idle()


async def test_a_worker_that_is_told_to_drain_refuses_by_name_until_that_is_undone(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        worker = await cluster.start_worker("w", Role.COMBINED)
        worker.steps.hold()
        cluster.place("old", PROMPT, GREEDY, prefill="w", decode=None)
        await worker.steps.arrived(1)
        cluster.order("w", SetDraining(is_draining=True))
        await cluster.board.wait_for(
            "the drain is told", lambda: cluster.heartbeats["w"][-1].is_draining
        )
        cluster.place("new", PROMPT, GREEDY, prefill="w", decode=None)
        refused = await cluster.heard("w", PrefillRefused, "new")
        assert (refused.code, refused.message) == (ErrorCode.SHUTTING_DOWN, "w is draining")
        cluster.order("w", SetDraining(is_draining=False))
        cluster.place("newer", PROMPT, GREEDY, prefill="w", decode=None)
        worker.steps.open()
        for request in ("old", "newer"):
            assert (await cluster.answer(request)).token_ids(0) == expected(PROMPT, GREEDY)
        await cluster.board.wait_for(
            "it drains no more", lambda: not cluster.heartbeats["w"][-1].is_draining
        )
        await worker.idle()


async def begin_and_let_wait(cluster: Harness) -> RunningWorker:
    """Let a worker compute one request, while two wait: for their turn, and for a prefix."""
    worker = await cluster.start_worker("w", Role.COMBINED)
    worker.steps.hold()
    cluster.place("begun", PROMPT, GREEDY, prefill="w", decode=None)
    await worker.steps.arrived(1)
    cluster.place("waiting", PROMPT, GREEDY, prefill="w", decode=None)
    cluster.place("receiving", PROMPT, GREEDY, prefill="w", decode=None, num_prefix_tokens=48)
    await cluster.orders_taken("w")
    return worker


async def test_a_worker_that_is_told_to_drain_gives_back_what_it_has_not_begun(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        worker = await begin_and_let_wait(cluster)
        for _ in range(2):
            cluster.order("w", SetDraining(is_draining=True))
        for request in ("waiting", "receiving"):
            refused = await cluster.heard("w", PrefillRefused, request)
            assert (refused.code, refused.message) == (ErrorCode.SHUTTING_DOWN, "w is draining")
        assert worker.hybrid.heartbeat().load.num_waiting == 0
        worker.steps.open()
        assert (await cluster.answer("begun")).token_ids(0) == expected(PROMPT, GREEDY)
        await worker.idle()
        told = [m for _, m in cluster.told if isinstance(m, PrefillRefused)]
        assert told == [], "each is told of once, and what was begun not at all"
        for request in ("waiting", "receiving"):
            stream = cluster.streams_of(request)
            assert (stream.tokens, stream.failure) == ({}, None), "its gateway hears nothing"
        cluster.order("w", SetDraining(is_draining=False))
        cluster.place("waiting", PROMPT, GREEDY, prefill="w", decode=None)
        assert (await cluster.answer("waiting")).token_ids(0) == expected(PROMPT, GREEDY)
        await worker.idle()


async def test_a_controller_that_was_started_anew_gets_nothing_back_that_it_did_not_place(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path) as cluster:
        worker = await begin_and_let_wait(cluster)
        again = WorkerAccepted(
            role=Role.COMBINED,
            role_generation=1,
            heartbeat_seconds=HEARTBEAT_SECONDS,
            peers=(),
        )
        cluster.order("w", again)
        cluster.place("new", PROMPT, GREEDY, prefill="w", decode=None)
        cluster.order("w", SetDraining(is_draining=True))
        await cluster.heard("w", PrefillRefused, "new")
        worker.steps.open()
        assert (await cluster.answer("waiting")).token_ids(0) == expected(PROMPT, GREEDY)
        assert worker.hybrid.heartbeat().load.num_waiting == 1, "for its prefix"
        cluster.cancel("receiving", "w")
        await cluster.heard("w", RequestFinished, "receiving")
        await worker.idle()
