"""Roles and drains as state: by order, as told, and where nobody else is left."""

import pytest

from common.ids import WorkerId
from common.messages.admin import (
    AdminRefused,
    OrderDone,
    OrderDrain,
    OrderRole,
    OrderRoles,
    RoleControl,
)
from common.messages.control import (
    PeerJoined,
    PlaceDecode,
    PlaceRequest,
    RequestRefused,
    SetDraining,
    SwitchRole,
    WorkerAccepted,
)
from common.messages.fields import Role, WorkerState
from services.controller.effects import Effect
from services.controller.limits import ControllerLimits
from services.controller.members import WorkerRecord
from services.controller.roles import TELL_AGAIN_SECONDS
from services.controller.status import status_report
from tests.unit.controller.cluster import (
    Cluster,
    answers,
    heartbeat,
    notes,
    only,
    pair_cluster,
    sent_names,
    worker_hello,
)

AUTO = ControllerLimits(role_control=RoleControl.AUTO)


def role(worker: str, wanted: Role) -> OrderRole:
    return OrderRole(worker_id=WorkerId(worker), role=wanted)


def drain(worker: str, *, on: bool = True) -> OrderDrain:
    return OrderDrain(worker_id=WorkerId(worker), is_draining=on)


def refusal(effects: list[Effect]) -> str:
    (answer,) = answers(effects)
    assert isinstance(answer, AdminRefused)
    return answer.message


def done(effects: list[Effect]) -> str:
    (answer,) = answers(effects)
    assert isinstance(answer, OrderDone)
    return answer.message


def worker(cluster: Cluster, name: str) -> WorkerRecord:
    found = cluster.core.members.worker_named(name)
    assert found is not None
    return found


def placed(effects: list[Effect]) -> list[tuple[str, str]]:
    return [
        (key[0], "itself" if message.decode is None else message.decode.worker_id)
        for key, message in only(effects, PlaceRequest)
        if isinstance(message, PlaceRequest)
    ]


def test_an_ordered_role_counts_at_once_and_everybody_learns_of_it() -> None:
    cluster = pair_cluster(num_decode=2)
    effects = cluster.order(role("d0", Role.PREFILL))
    assert sent_names(effects) == [
        ("d0", "SwitchRole"),
        ("p0", "PeerJoined"),
        ("d1", "PeerJoined"),
    ]
    assert done(effects) == "d0 becomes prefill"
    switch = only(effects, SwitchRole)[0][1]
    assert switch == SwitchRole(role=Role.PREFILL, role_generation=2)
    joined = only(effects, PeerJoined)[0][1]
    assert isinstance(joined, PeerJoined)
    assert (joined.peer.worker_id, joined.peer.role, joined.peer.epoch) == ("d0", "prefill", 1)
    assert placed([*cluster.submit("r0"), *cluster.submit("r1")]) == [("p0", "d1"), ("d0", "d1")]


def test_the_worker_s_word_confirms_a_role_and_status_tells_what_it_has() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(role("d0", Role.PREFILL))
    assert status_report(cluster.core, cluster.now).workers[0].role is Role.DECODE
    cluster.now += 0.25
    effects = cluster.switched("d0", Role.PREFILL, 2)
    assert notes(effects) == ["role_switched"]
    assert ("seconds", 0.25) in effects[0].facts  # type: ignore[union-attr]  # a Note
    assert status_report(cluster.core, cluster.now).workers[0].role is Role.PREFILL


def test_an_unconfirmed_role_is_ordered_again_with_the_same_generation() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(role("d0", Role.PREFILL))
    assert only(cluster.beat("d0"), SwitchRole) == []
    cluster.now += TELL_AGAIN_SECONDS + 0.1
    (again,) = only(cluster.beat("d0"), SwitchRole)
    assert again[1] == SwitchRole(role=Role.PREFILL, role_generation=2)
    assert only(cluster.beat("d0"), SwitchRole) == []
    cluster.switched("d0", Role.PREFILL, 2)
    cluster.now += TELL_AGAIN_SECONDS + 0.1
    assert only(cluster.beat("d0"), SwitchRole) == []


def test_a_role_of_an_older_generation_is_named_and_changes_nothing() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(role("d0", Role.PREFILL))
    cluster.switched("d0", Role.PREFILL, 2)
    cluster.order(role("d0", Role.DECODE))
    assert notes(cluster.switched("d0", Role.PREFILL, 2)) == ["role_stale"]
    assert worker(cluster, "d0").role is Role.DECODE


def test_a_hello_of_an_older_generation_is_answered_with_the_role_that_holds() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(role("d0", Role.PREFILL))
    effects = cluster.say("d0", worker_hello("d0", Role.DECODE, pid=200), role_generation=1)
    assert notes(effects) == ["role_stale"]
    accepted = only(effects, WorkerAccepted)[0][1]
    assert isinstance(accepted, WorkerAccepted)
    assert (accepted.role, accepted.role_generation) == (Role.PREFILL, 2)


def test_a_restarted_controller_takes_roles_and_generations_as_the_workers_tell_them() -> None:
    cluster = Cluster()
    cluster.join_gateway()
    cluster.join("p0", Role.PREFILL)
    cluster.join("p1", Role.PREFILL)
    effects = cluster.say("d0", worker_hello("d0", Role.DECODE), role_generation=7)
    accepted = only(effects, WorkerAccepted)[0][1]
    assert isinstance(accepted, WorkerAccepted)
    assert (accepted.role, accepted.role_generation) == (Role.DECODE, 7)
    (switch,) = only(cluster.order(role("p1", Role.DECODE)), SwitchRole)
    assert switch[1] == SwitchRole(role=Role.DECODE, role_generation=2)
    later = cluster.switched("d0", Role.PREFILL, 9)
    assert notes(later) == ["role_switched"]
    assert [key[0] for key, _ in only(later, PeerJoined)] == ["p0", "p1"]
    assert worker(cluster, "d0").role_generation == 9


def test_requests_of_a_worker_that_changes_its_role_end_where_they_are() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.submit("placed")
    cluster.submit("decoding")
    record = cluster.core.book.requests["decoding"]  # type: ignore[index]  # an id
    assert record.decode == ("d1", 1)
    cluster.started("d1", "decoding")
    cluster.order(role("d1", Role.PREFILL))
    assert cluster.phase("decoding") == "decoding"
    cluster.finished("d1", "decoding")
    assert cluster.phase("decoding") == "unknown"


def test_a_refused_decode_goes_to_a_worker_that_became_a_decode_worker() -> None:
    cluster = pair_cluster(num_prefill=2)
    cluster.submit("r", 64)
    assert only(cluster.refused("p0", "d0", "r"), PlaceDecode) == []
    (again,) = only(cluster.order(role("p1", Role.DECODE)), PlaceDecode)
    assert isinstance(again[1], PlaceDecode)
    assert (again[0][0], again[1].decode.worker_id) == ("p0", "p1")
    assert again[1].decode.role is Role.DECODE


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (role("x", Role.PREFILL), "there is no worker x; the workers are d0, p0"),
        (drain("x"), "there is no worker x; the workers are d0, p0"),
        (drain(""), "no worker is named; the workers are d0, p0"),
        (role("d0", Role.COMBINED), "combined is chosen at its start"),
        (role("d0", Role.PREFILL), "d0 is the last ready decode worker: start another one"),
        (drain("p0"), "p0 is the last ready prefill worker: start another one"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused_with_what_to_do(
    order: OrderRole | OrderDrain, told: str
) -> None:
    cluster = pair_cluster()
    effects = cluster.order(order)
    assert told in refusal(effects)
    assert sent_names(effects) == []


def test_a_combined_worker_is_never_switched() -> None:
    cluster = pair_cluster()
    cluster.join("c0", Role.COMBINED)
    told = refusal(cluster.order(role("c0", Role.PREFILL)))
    assert told.startswith("c0 is a combined worker")


def test_the_last_of_its_role_may_go_where_a_combined_worker_stays() -> None:
    cluster = pair_cluster()
    cluster.join("c0", Role.COMBINED)
    assert done(cluster.order(role("d0", Role.PREFILL))) == "d0 becomes prefill"
    assert done(cluster.order(drain("p0"))) == "p0 takes no new work"
    assert done(cluster.order(drain("d0"))) == "d0 takes no new work"
    assert "c0 is the last ready combined worker" in refusal(cluster.order(drain("c0")))


def test_a_combined_worker_may_go_where_workers_of_both_roles_stay() -> None:
    cluster = pair_cluster()
    cluster.join("c0", Role.COMBINED)
    assert done(cluster.order(drain("c0"))) == "c0 takes no new work"


def test_only_what_can_be_done_is_advised_against_draining_the_last_of_a_role() -> None:
    cluster = pair_cluster()
    assert refusal(cluster.order(drain("p0"))).endswith(": start another one")
    cluster.join("d1", Role.DECODE)
    advice = ": start another one, or give its role to another one first"
    assert refusal(cluster.order(drain("p0"))).endswith(advice)
    alone = Cluster()
    alone.join("combined-0", Role.COMBINED)
    told = "combined-0 is the last ready combined worker: start another one"
    assert refusal(alone.order(drain("combined-0"))) == told


def test_orders_that_hold_already_are_done_and_send_nothing() -> None:
    cluster = pair_cluster(num_decode=2)
    for order in (role("d0", Role.DECODE), drain("d0", on=False)):
        effects = cluster.order(order)
        assert "already" in done(effects)
        assert sent_names(effects) == []


def test_a_drained_worker_gets_no_work_until_the_order_is_taken_back() -> None:
    cluster = pair_cluster(num_decode=2)
    effects = cluster.order(drain("d0"))
    assert only(effects, SetDraining)[0][1] == SetDraining(is_draining=True)
    assert worker(cluster, "d0").state is WorkerState.DRAINING
    cluster.beat("d0", heartbeat())  # sent before the order came
    assert placed([*cluster.submit("r0"), *cluster.submit("r1")]) == [("p0", "d1")] * 2
    cluster.beat("d0", heartbeat(is_draining=True))
    effects = cluster.order(drain("d0", on=False))
    assert only(effects, SetDraining)[0][1] == SetDraining(is_draining=False)
    cluster.beat("d0")
    assert worker(cluster, "d0").state is WorkerState.READY


def test_a_drain_that_the_worker_s_heartbeats_do_not_show_is_ordered_again() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(drain("d0"))
    cluster.now += TELL_AGAIN_SECONDS + 0.1
    assert len(only(cluster.beat("d0"), SetDraining)) == 1
    cluster.now += TELL_AGAIN_SECONDS + 0.1
    assert only(cluster.beat("d0", heartbeat(is_draining=True)), SetDraining) == []


def test_a_role_that_lost_its_last_worker_is_done_by_all_the_others_until_it_has_one() -> None:
    cluster = pair_cluster(num_decode=2, limits=AUTO)
    effects = cluster.tick(100)
    assert notes(effects) == ["worker_left", "role_stand_in", "role_stand_in"]
    assert cluster.core.readiness(cluster.now) == (True, "")
    assert placed(cluster.submit("r0", 640))
    cluster.started("d0", "r0")
    effects = cluster.join("p0", Role.PREFILL, epoch=2)
    assert notes(effects).count("role_stand_in_ended") == 2
    assert [key for key, _ in placed(cluster.submit("r1", 640))] == ["p0"]


def test_prefill_workers_decode_where_the_last_decode_worker_is_gone() -> None:
    cluster = pair_cluster(limits=AUTO)
    cluster.tick(200)
    assert placed(cluster.submit("r", 640)) == [("p0", "itself")]


def test_nobody_stands_in_where_roles_are_the_operator_s() -> None:
    cluster = pair_cluster(limits=AUTO)
    assert done(cluster.order(OrderRoles(control=RoleControl.MANUAL))).startswith("roles change by")
    cluster.tick(200)
    assert only(cluster.submit("r"), RequestRefused)
    cluster.order(OrderRoles(control=RoleControl.AUTO))
    assert placed(cluster.submit("r")) == [("p0", "itself")]


def test_a_cluster_that_starts_is_not_ready_before_it_has_both_roles() -> None:
    cluster = Cluster(AUTO)
    cluster.join_gateway()
    cluster.join("p0", Role.PREFILL)
    cluster.tick()
    assert cluster.core.readiness(cluster.now) == (False, "no decode worker is ready")
