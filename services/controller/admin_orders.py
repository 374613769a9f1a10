"""The operator's orders: each is carried out, or refused with what is wrong and what to do."""

from common.messages.admin import (
    AdminRefused,
    ControllerToCli,
    OrderDone,
    OrderDrain,
    OrderRole,
    OrderRoles,
    RoleControl,
)
from common.messages.fields import Role
from services.controller.effects import Answer, Effect, PeerKey
from services.controller.elasticity import Elasticity
from services.controller.members import Members, WorkerRecord
from services.controller.roles import OTHER, Roles
from services.controller.standing_orders import StandingOrders


class AdminOrders:
    """Hands orders on to ``roles`` and says what became of them.

    ``orders`` are those that stand, also for workers that are not there.
    """

    def __init__(
        self, members: Members, roles: Roles, elasticity: Elasticity, orders: StandingOrders
    ) -> None:
        self._members = members
        self._roles = roles
        self._elasticity = elasticity
        self._orders = orders

    def take(
        self,
        sender: PeerKey,
        order: OrderRole | OrderRoles | OrderDrain,
        cause: str,
        now: float,
    ) -> list[Effect]:
        """Carry an order out and answer it."""
        match order:
            case OrderRoles(control=control):
                effects = []
                if control is RoleControl.MANUAL:
                    effects = self._elasticity.end_help(cause)
                self._roles.set_control(control)
                done = OrderDone(message=_CONTROL_TOLD[control])
                return [*effects, Answer(sender, done, cause)]
            case OrderRole() | OrderDrain():
                worker = self._members.worker_named(order.worker_id)
                if worker is None:
                    return [Answer(sender, self._about_absent(order), cause)]
                if isinstance(order, OrderRole):
                    answer, effects = self._give_role(worker, order, cause, now)
                else:
                    answer, effects = self._drain(worker, order, cause, now)
                return [*effects, Answer(sender, answer, cause)]

    def _give_role(
        self, worker: WorkerRecord, order: OrderRole, cause: str, now: float
    ) -> tuple[ControllerToCli, list[Effect]]:
        name, role = order.worker_id, order.role
        if worker.role is Role.COMBINED:
            told = f"{name} is a combined worker: it does prefill and decode, whatever the load"
            return _refused(order, told), []
        if role is Role.COMBINED:
            told = "a running worker becomes prefill or decode; combined is chosen at its start"
            return _refused(order, told), []
        if worker.role is role:
            effects = self._roles.order_by_operator(worker, role, cause, now)
            return OrderDone(message=f"{name} is {role} already"), effects
        if self._roles.is_needed(worker):
            return _refused(order, self._last_of(worker)), []
        effects = self._roles.order_by_operator(worker, role, cause, now)
        return OrderDone(message=f"{name} becomes {role}"), effects

    def _drain(
        self, worker: WorkerRecord, order: OrderDrain, cause: str, now: float
    ) -> tuple[ControllerToCli, list[Effect]]:
        name, on = order.worker_id, order.is_draining
        if on and self._roles.is_needed(worker):
            return _refused(order, self._last_of(worker)), []
        effects = self._roles.drain_by_operator(worker, cause, now, on=on)
        if on:
            done = "takes no new work" if effects else "drains already"
        else:
            done = "takes new work again" if effects else "takes new work already"
        return OrderDone(message=f"{name} {done}"), effects

    def _about_absent(self, order: OrderRole | OrderDrain) -> ControllerToCli:
        """Answer an order about a worker that is not there: a drain of it can be undone."""
        name = order.worker_id
        if not name:
            return _refused(order, f"no worker is named; {self._known()}")
        is_undo = isinstance(order, OrderDrain) and not order.is_draining
        if is_undo and self._orders.is_drained(name):
            self._orders.set_drained(name, on=False)
            return OrderDone(message=f"{name} takes new work when it comes back")
        return _refused(order, f"there is no worker {name}; {self._known()}")

    def _last_of(self, worker: WorkerRecord) -> str:
        """Say what a worker is needed for, and what to do about it that can be done."""
        told = f"{worker.key[0]} is the last ready {worker.role} worker: start another one"
        others = self._members.ready_workers()
        can_follow = any(w.role is OTHER.get(worker.role) for w in others if self._is_spare(w))
        return f"{told}, or give its role to another one first" if can_follow else told

    def _is_spare(self, worker: WorkerRecord) -> bool:
        return not self._roles.is_needed(worker)

    def _known(self) -> str:
        names = sorted(key[0] for key in self._members.workers)
        return f"the workers are {', '.join(names)}" if names else "no worker is registered"


_CONTROL_TOLD = {
    RoleControl.AUTO: "load gives the roles",
    RoleControl.MANUAL: "roles change by `flowpath switch-role` alone",
}


def _refused(order: OrderRole | OrderDrain, message: str) -> AdminRefused:
    return AdminRefused(command=type(order).__name__, message=message)
