"""Operators' orders outlive crashes of workers and of the controller, and end by name."""

import stat
from pathlib import Path

import pytest
import structlog

from common.ids import WorkerId
from common.messages.admin import (
    AdminRefused,
    OrderDone,
    OrderDrain,
    OrderRole,
    OrderRoles,
    RoleControl,
)
from common.messages.control import Goodbye, SetDraining, SwitchRole, WorkerAccepted
from common.messages.fields import Role, WorkerState
from services.controller.effects import Effect, KeepOrders
from services.controller.limits import ControllerLimits
from services.controller.orders_file import ORDERS_NAME, OrdersFile
from services.controller.standing_orders import MAX_KEPT, NO_ORDERS, KeptOrders, StandingOrders
from tests.unit.controller.cluster import (
    Cluster,
    answers,
    heartbeat,
    notes,
    only,
    pair_cluster,
    sent_names,
)

D0 = WorkerId("d0")
DRAIN = OrderDrain(worker_id=D0, is_draining=True)
UNDO = OrderDrain(worker_id=D0, is_draining=False)
TO_PREFILL = OrderRole(worker_id=D0, role=Role.PREFILL)


def kept(effects: list[Effect]) -> KeptOrders | None:
    found = [effect.orders for effect in effects if isinstance(effect, KeepOrders)]
    assert len(found) <= 1
    return found[0] if found else None


def state(cluster: Cluster, name: str = "d0") -> WorkerState:
    worker = cluster.core.members.worker_named(name)
    assert worker is not None
    return worker.state


def crash_and_return(cluster: Cluster) -> list[Effect]:
    assert "worker_left" in notes(cluster.tick(200))
    return cluster.join("d0", Role.DECODE, epoch=2, pid=900)


def test_a_drained_worker_that_crashes_drains_when_it_comes_back() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(DRAIN)
    effects = crash_and_return(cluster)
    assert sent_names(effects)[-2:] == [("d0", "WorkerAccepted"), ("d0", "SetDraining")]
    assert "drain_stands" in notes(effects)
    cluster.beat("d0", heartbeat(), epoch=2)
    assert state(cluster) is WorkerState.DRAINING
    cluster.order(UNDO)
    assert state(cluster) is WorkerState.READY
    assert "drain_stands" not in notes(cluster.join("d0", Role.DECODE, epoch=2, pid=900))


def test_a_worker_with_an_ordered_role_gets_it_again_after_a_crash() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(TO_PREFILL)
    effects = crash_and_return(cluster)
    assert sent_names(effects)[-4:] == [
        ("d0", "WorkerAccepted"),
        ("d0", "SwitchRole"),
        ("p0", "PeerJoined"),
        ("d1", "PeerJoined"),
    ]
    ((_, accepted),) = only(effects, WorkerAccepted)
    ((_, switch),) = only(effects, SwitchRole)
    assert isinstance(accepted, WorkerAccepted)
    assert switch == SwitchRole(role=Role.PREFILL, role_generation=accepted.role_generation + 1)


def test_orders_about_a_worker_end_when_it_leaves_in_an_orderly_way() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(TO_PREFILL)
    cluster.order(DRAIN)
    effects = cluster.say("d0", Goodbye(reason="shut down"))
    assert notes(effects).count("orders_ended") == 1
    assert kept(effects) == NO_ORDERS
    effects = cluster.join("d0", Role.DECODE, epoch=2, pid=900)
    assert not only(effects, SwitchRole)
    assert state(cluster) is WorkerState.READY


def test_a_role_that_load_gives_later_replaces_the_operator_s() -> None:
    cluster = pair_cluster(num_decode=3)
    assert kept(cluster.order(TO_PREFILL)) == KeptOrders(roles=((D0, Role.PREFILL),))
    worker = cluster.core.members.worker_named("d0")
    assert worker is not None
    cluster.core.roles.order(worker, Role.DECODE, "load", "test", cluster.now)
    assert kept(cluster.tick()) == NO_ORDERS
    assert not only(crash_and_return(cluster), SwitchRole)


def test_a_combined_worker_gets_no_role_that_one_before_it_was_ordered() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(TO_PREFILL)
    cluster.tick(200)
    assert not only(cluster.join("d0", Role.COMBINED, epoch=2), SwitchRole)


def test_a_drain_can_be_undone_while_its_worker_is_not_there() -> None:
    cluster = pair_cluster(num_decode=2)
    cluster.order(DRAIN)
    cluster.tick(200)
    effects = cluster.order(UNDO)
    assert answers(effects) == [OrderDone(message="d0 takes new work when it comes back")]
    assert kept(effects) == NO_ORDERS
    (again,) = answers(cluster.order(UNDO))
    assert isinstance(again, AdminRefused)


def test_a_started_controller_goes_by_the_orders_that_an_earlier_one_kept() -> None:
    auto = ControllerLimits(role_control=RoleControl.AUTO)
    before = pair_cluster(num_decode=2, limits=auto)
    assert kept(before.order(OrderRoles(control=RoleControl.MANUAL))) == KeptOrders(
        control=RoleControl.MANUAL
    )
    orders = kept(before.order(DRAIN))
    assert orders is not None
    after = Cluster(auto, orders)
    assert after.core.roles.control is RoleControl.MANUAL
    assert after.core.members.cluster.has_fixed_roles
    after.join("d1", Role.DECODE)
    told = only(after.join("d0", Role.DECODE), SetDraining)
    assert [message for _, message in told] == [SetDraining(is_draining=True)]
    effects = after.order(OrderRoles(control=RoleControl.AUTO))
    assert kept(effects) == KeptOrders(drained=(D0,))  # what the setting says is no order


def test_an_order_that_stands_already_is_not_kept_again_and_one_is_kept_before_its_answer() -> None:
    cluster = pair_cluster(num_decode=2)
    assert isinstance(cluster.order(DRAIN)[0], KeepOrders)
    assert kept(cluster.order(DRAIN)) is None
    assert kept(cluster.tick()) is None


def test_names_that_never_come_back_are_forgotten_oldest_first() -> None:
    orders = StandingOrders(RoleControl.AUTO)
    for number in range(MAX_KEPT + 1):
        orders.set_drained(WorkerId(f"w{number}"), on=True)
        orders.set_role(WorkerId(f"w{number}"), Role.DECODE)
    assert not orders.is_drained(WorkerId("w0"))
    assert orders.role_of(WorkerId("w0")) is None
    assert len(orders.kept().drained) == len(orders.kept().roles) == MAX_KEPT


ORDERS = KeptOrders(RoleControl.MANUAL, (D0,), ((WorkerId("p0"), Role.DECODE),))


def test_the_file_gives_back_what_was_written_and_tells_it_and_goes_with_the_last_order(
    tmp_path: Path,
) -> None:
    file = OrdersFile(tmp_path)
    assert file.read() == NO_ORDERS
    file.write(ORDERS)
    assert stat.S_IMODE((tmp_path / ORDERS_NAME).stat().st_mode) == 0o600
    with structlog.testing.capture_logs() as lines:
        assert OrdersFile(tmp_path).read() == ORDERS
    assert [(line["event"], line["roles_by"], line["drained"]) for line in lines] == [
        ("orders_stand", "manual", ["d0"])
    ]
    file.write(NO_ORDERS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", '{"control": "nobody"}', "[]"])
def test_a_damaged_file_is_named_and_no_order_stands(tmp_path: Path, text: str) -> None:
    (tmp_path / ORDERS_NAME).write_text(text)
    with structlog.testing.capture_logs() as lines:
        assert OrdersFile(tmp_path).read() == NO_ORDERS
    assert [line["event"] for line in lines] == ["orders_lost"]


def test_orders_that_cannot_be_written_are_told_of(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        OrdersFile(tmp_path / "gone").write(ORDERS)
    assert [line["event"] for line in lines] == ["orders_not_kept"]
