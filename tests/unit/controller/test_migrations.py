"""Running decodes that move: from workers that drain and from full pools."""

import pytest

from common.errors import ErrorCode
from common.ids import RequestId, WorkerId
from common.messages.admin import OrderDrain, RoleControl
from common.messages.control import Cancel, MigrateDecode, RequestFailed, RequestFinished
from services.controller.effects import Effect
from services.controller.elasticity import QUIET_SECONDS
from services.controller.lifecycle import MOVE_REPORT_SECONDS
from services.controller.limits import ControllerLimits
from services.controller.migrations import (
    FAILED_AGAIN_SECONDS,
    MOVED_AGAIN_SECONDS,
    MOVED_TWICE_SECONDS,
)
from services.controller.policy.migration import MAX_MOVING
from tests.unit.controller.cluster import (
    Cluster,
    heartbeat,
    kv,
    notes,
    only,
    pair_cluster,
    rates,
    sent_names,
)

ROUND = 0.2


def decoding_cluster(num_decode: int = 2, num_choices: int = 1) -> Cluster:
    """A cluster whose d0 decodes "r" and whose workers have all told their load."""
    cluster = pair_cluster(num_decode=num_decode)
    cluster.submit("r", num_choices=num_choices)
    cluster.started("d0", "r")
    all_beat(cluster)
    return cluster


def all_beat(cluster: Cluster, used_by_d0: int = 0) -> None:
    names = [worker.peer.worker_id for worker in cluster.core.members.workers.values()]
    for name in names:
        used = used_by_d0 if name == "d0" else 0
        cluster.beat(name, heartbeat(kv(referenced=used)))
    cluster.gateway_beat()


def drain(cluster: Cluster, name: str) -> list[Effect]:
    return cluster.order(OrderDrain(worker_id=WorkerId(name), is_draining=True))


def moves(effects: list[Effect]) -> list[tuple[str, str, str]]:
    return [
        (key[0], message.request_id, message.decode.worker_id)
        for key, message in only(effects, MigrateDecode)
        if isinstance(message, MigrateDecode)
    ]


def moving_cluster() -> Cluster:
    """A cluster that moves "r" from d0, which drains, to d1."""
    cluster = decoding_cluster()
    drain(cluster, "d0")
    assert moves(cluster.tick(after=ROUND)) == [("d0", "r", "d1")]
    return cluster


def test_the_decodes_of_a_draining_worker_move_to_another_one() -> None:
    cluster = decoding_cluster()
    drain(cluster, "d0")
    effects = cluster.tick(after=ROUND)
    assert moves(effects) == [("d0", "r", "d1")]
    assert notes(effects) == ["request_moved", "migration_started"]
    assert cluster.phase("r") == "migrating"
    assert sent_names(cluster.started("d1", "r")) == []
    assert cluster.phase("r") == "decoding"
    assert cluster.core.book.requests["r"].decode == ("d1", 1)  # type: ignore[index]  # an id
    assert len(only(cluster.finished("d1", "r"), RequestFinished)) == 1
    assert cluster.phase("r") == "unknown"


def test_a_full_pool_gives_its_largest_decode_away() -> None:
    cluster = pair_cluster(num_decode=1)
    for name, num_tokens in (("small", 64), ("large", 40 * 64)):
        cluster.submit(name, num_tokens)
        cluster.started("d0", name)
    cluster.join("d1", "decode", pid=201)  # type: ignore[arg-type]  # its value
    all_beat(cluster, used_by_d0=89)
    assert moves(cluster.tick(after=ROUND)) == []
    all_beat(cluster, used_by_d0=92)
    assert moves(cluster.tick(after=ROUND)) == [("d0", "large", "d1")]


LINE = (0.005, 0.002)


def long_batch_cluster(num_decode: int, control: RoleControl = RoleControl.AUTO) -> Cluster:
    """A cluster whose d0 decodes ten requests and has told how long its steps take."""
    cluster = pair_cluster(limits=ControllerLimits(role_control=control))
    for n in range(10):
        cluster.submit(f"r{n}", max_tokens=400)
        cluster.started("d0", f"r{n}")
    for n in range(1, num_decode):
        cluster.join(f"d{n}", "decode", pid=200 + n)  # type: ignore[arg-type]  # its value
    tell_long_batch(cluster)
    return cluster


def tell_long_batch(cluster: Cluster) -> None:
    measured = rates(prefill=1000.0, step_seconds=0.025, line=LINE)
    for worker in cluster.core.members.workers.values():
        name = worker.peer.worker_id
        num_decoding = 10 if name == "d0" else 0
        load = heartbeat(kv(), num_decoding=num_decoding, measured=measured)
        cluster.beat(name, load)
    cluster.gateway_beat()


def test_decodes_of_a_long_batch_move_to_a_worker_with_a_short_one_and_stay_there() -> None:
    cluster = long_batch_cluster(num_decode=2)
    begun = moves(cluster.tick(after=ROUND))
    assert {(source, target) for source, _, target in begun} == {("d0", "d1")}
    assert len(begun) == 4
    for _, name, _ in begun:
        cluster.started("d1", name)
    tell_long_batch(cluster)
    assert moves(cluster.tick(after=ROUND)) == []


SLOW_LINE = (0.1, 0.002)


def moved_from(cluster: Cluster, slow: str) -> set[str]:
    """Let one of d0 and d1 be slow, carry out the moves that begin, and return who moved."""
    for worker in cluster.core.members.workers.values():
        name = worker.peer.worker_id
        line = SLOW_LINE if name == slow else LINE
        cluster.beat(name, heartbeat(kv(), measured=rates(step_seconds=0.5, line=line)))
    cluster.gateway_beat()
    begun = moves(cluster.tick(after=ROUND))
    other = {"d0": "d1", "d1": "d0"}[slow]
    for source, name, target in begun:
        assert (source, target) == (slow, other)
        cluster.started(target, name)
    return {name for _, name, _ in begun}


def test_who_was_sent_to_and_fro_stays_for_a_minute() -> None:
    cluster = long_batch_cluster(num_decode=2)
    everybody = {f"r{n}" for n in range(10)}
    assert moved_from(cluster, "d0") == everybody
    assert moved_from(cluster, "d1") == set()
    cluster.now += MOVED_AGAIN_SECONDS
    assert moved_from(cluster, "d1") == everybody
    cluster.now += MOVED_TWICE_SECONDS / 2
    assert moved_from(cluster, "d0") == set()
    cluster.now += MOVED_TWICE_SECONDS / 2
    assert moved_from(cluster, "d0") == everybody


def test_in_a_quiet_time_a_prefill_worker_takes_decodes_of_a_long_batch() -> None:
    cluster = long_batch_cluster(num_decode=1)
    assert moves(cluster.tick(after=ROUND)) == [], "prompts came just now"
    cluster.now += QUIET_SECONDS
    tell_long_batch(cluster)
    effects = cluster.tick(after=ROUND)
    assert "help_granted" in notes(effects)
    assert {(source, target) for source, _, target in moves(effects)} == {("d0", "p0")}


def test_when_prompts_come_again_a_prefill_worker_gives_the_decodes_back() -> None:
    cluster = long_batch_cluster(num_decode=1)
    cluster.now += QUIET_SECONDS
    tell_long_batch(cluster)
    taken = {name for _, name, _ in moves(cluster.tick(after=ROUND))}
    for name in taken:
        cluster.started("p0", name)
    assert len(taken) == 4
    effects = cluster.submit("next")
    assert "help_ended" in notes(effects), "at once, and so the prompt is to be decoded by d0"
    assert cluster.core.book.requests[RequestId("next")].decode == ("d0", 1)
    tell_long_batch(cluster)
    effects = cluster.tick(after=ROUND)
    assert set(moves(effects)) == {("p0", name, "d0") for name in taken}
    for name in taken:
        cluster.started("d0", name)
    cluster.finished("p0", "next")
    cluster.now += QUIET_SECONDS
    tell_long_batch(cluster)
    again = {name for _, name, _ in moves(cluster.tick(after=ROUND))}
    assert len(again) == 4
    assert not again & taken, "who came back stays for a minute"


def test_a_request_that_is_refused_ends_no_quiet_time() -> None:
    cluster = long_batch_cluster(num_decode=1)
    cluster.now += QUIET_SECONDS
    tell_long_batch(cluster)
    assert "help_granted" in notes(cluster.tick(after=ROUND))
    assert "help_ended" not in notes(cluster.submit("huge", 4_000_000))
    assert "help_ended" in notes(cluster.submit("small"))


def test_a_drain_does_not_wait_for_decodes_that_spread() -> None:
    cluster = long_batch_cluster(num_decode=3)
    begun = {name for _, name, _ in moves(cluster.tick(after=ROUND))}
    assert len(begun) > MAX_MOVING
    drain(cluster, "d0")
    tell_long_batch(cluster)
    leaving = {name for source, name, _ in moves(cluster.tick(after=ROUND)) if source == "d0"}
    assert leaving
    assert not leaving & begun


def test_how_far_a_decode_is_is_not_told_by_what_its_worker_did_before() -> None:
    """A controller that was started anew hears of decodes before their worker tells its load."""
    cluster = pair_cluster(num_decode=2)
    cluster.submit("r", max_tokens=2000)
    cluster.started("d0", "r")
    cluster.gateway_beat()
    cluster.tick(after=ROUND)
    for num_steps in (70_000, 70_005):
        cluster.beat("d0", heartbeat(kv(), num_steps=num_steps))
        cluster.beat("d1")
        cluster.tick(after=ROUND)
    drain(cluster, "d0")
    cluster.tick(after=ROUND)
    target = cluster.core.members.worker_named("d1")
    assert target is not None
    assert target.replaced_blocks == 2


def test_where_the_operator_gives_the_roles_a_prefill_worker_takes_no_decodes() -> None:
    cluster = long_batch_cluster(num_decode=1, control=RoleControl.MANUAL)
    cluster.now += QUIET_SECONDS
    tell_long_batch(cluster)
    assert moves(cluster.tick(after=ROUND)) == []


def test_nothing_moves_where_nobody_else_decodes() -> None:
    cluster = decoding_cluster(num_decode=1)
    cluster.beat("d0", heartbeat(is_draining=True))
    assert moves(cluster.tick(after=ROUND)) == []


def test_a_request_with_several_choices_stays() -> None:
    cluster = decoding_cluster(num_choices=2)
    drain(cluster, "d0")
    assert moves(cluster.tick(after=ROUND)) == []


@pytest.mark.parametrize(("num_steps", "num_blocks"), [(2, 1), (5, 2), (500, 2)])
def test_a_decode_s_blocks_are_estimated_from_its_worker_s_steps(
    num_steps: int, num_blocks: int
) -> None:
    """Two tokens more fit into the block of 60; of 16 in all it has no more than 76."""
    cluster = pair_cluster(num_decode=2)
    cluster.submit("r", 60)
    cluster.started("d0", "r")
    cluster.beat("d0", heartbeat(kv(), num_steps=100))
    cluster.beat("d1")
    cluster.tick(after=ROUND)
    cluster.beat("d0", heartbeat(kv(), num_steps=100 + num_steps))
    drain(cluster, "d0")
    cluster.tick(after=ROUND)
    target = cluster.core.members.worker_named("d1")
    assert target is not None
    assert target.replaced_blocks == num_blocks


def test_a_failed_move_leaves_the_decode_where_it_is_and_is_tried_again_later() -> None:
    cluster = moving_cluster()
    effects = cluster.migration_failed("d0", "r")
    assert notes(effects) == ["migration_failed", "request_moved"]
    assert cluster.phase("r") == "decoding"
    assert moves(cluster.tick(after=ROUND)) == []
    cluster.now += FAILED_AGAIN_SECONDS
    all_beat(cluster)
    assert moves(cluster.tick(after=ROUND)) == [("d0", "r", "d1")]


def test_a_source_that_missed_the_move_is_told_to_stop() -> None:
    cluster = moving_cluster()
    cluster.started("d1", "r")
    assert sent_names(cluster.migration_failed("d0", "r")) == [("d0", "Cancel")]
    assert cluster.phase("r") == "decoding"
    cluster.finished("d1", "r")
    assert sent_names(cluster.migration_failed("d0", "r")) == [("d0", "Cancel")]


def test_a_decode_that_ends_while_it_moves_is_ended() -> None:
    cluster = moving_cluster()
    assert len(only(cluster.finished("d0", "r"), RequestFinished)) == 1
    assert cluster.phase("r") == "unknown"


def test_the_death_of_the_source_fails_the_request_and_stops_the_target() -> None:
    cluster = moving_cluster()
    effects = cluster.tick(200)
    ((_, failed),) = only(effects, RequestFailed)
    assert isinstance(failed, RequestFailed)
    assert failed.code is ErrorCode.WORKER_DIED
    assert [key[0] for key, _ in only(effects, Cancel)] == ["d1"]
    assert cluster.phase("r") == "unknown"
    assert sent_names(cluster.started("d1", "r")) == [("d1", "Cancel")]


def test_the_death_of_the_target_leaves_the_word_to_the_source() -> None:
    cluster = moving_cluster()
    assert only(cluster.tick(201), RequestFailed) == []
    assert cluster.phase("r") == "migrating"
    cluster.migration_failed("d0", "r")
    assert cluster.phase("r") == "decoding"


def test_a_request_that_a_dead_target_took_along_fails_soon() -> None:
    cluster = moving_cluster()
    cluster.tick(201)
    cluster.now += MOVE_REPORT_SECONDS + 0.1
    all_beat(cluster)
    ((_, failed),) = only(cluster.tick(), RequestFailed)
    assert isinstance(failed, RequestFailed)
    assert failed.code is ErrorCode.WORKER_DIED


def test_a_cancel_reaches_both_ends_of_a_move_and_again_the_one_that_took_it() -> None:
    cluster = moving_cluster()
    assert sent_names(cluster.cancel("r")) == [("d0", "Cancel"), ("d1", "Cancel")]
    assert sent_names(cluster.started("d1", "r")) == [("d1", "Cancel")]
    assert cluster.phase("r") == "cancelling_decode"
    cluster.finished("d0", "r", was_cancelled=True)
    assert cluster.phase("r") == "cancelling_decode", "d1 has it"
    cluster.finished("d1", "r", was_cancelled=True)
    assert cluster.phase("r") == "unknown"


def test_a_stop_string_in_a_moving_choice_is_told_to_both_ends() -> None:
    cluster = moving_cluster()
    assert sent_names(cluster.cancel("r", choice=0)) == [("d0", "Cancel"), ("d1", "Cancel")]
    assert cluster.phase("r") == "migrating"


def test_reports_of_a_target_that_has_not_taken_over_are_ignored() -> None:
    cluster = moving_cluster()
    assert notes(cluster.failed("d1", "r")) == ["event_ignored"]
    assert notes(cluster.migration_failed("d1", "r")) == ["event_ignored"]
    assert cluster.phase("r") == "migrating"
