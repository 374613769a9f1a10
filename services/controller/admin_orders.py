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
from services.controller.roles import Roles


class AdminOrders:
    """Hands orders on to ``roles`` and says what became of them."""

    def __init__(self, members: Members, roles: Roles, elasticity: Elasticity) -> None:
        self._members = members
        self._roles = roles
        self._elasticity = elasticity

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
                    told = f"there is no worker {order.worker_id}; {self._known()}"
                    return [Answer(sender, _refused(order, told), cause)]
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
            return OrderDone(message=f"{name} is {role} already"), []
        if self._roles.is_needed(worker):
            return _refused(order, self._last_of(worker)), []
        effects = self._roles.order(worker, role, "ordered by the operator", cause, now)
        return OrderDone(message=f"{name} becomes {role}"), effects

    def _drain(
        self, worker: WorkerRecord, order: OrderDrain, cause: str, now: float
    ) -> tuple[ControllerToCli, list[Effect]]:
        name = order.worker_id
        if order.is_draining and worker.is_drain_ordered:
            return OrderDone(message=f"{name} drains already"), []
        if not order.is_draining and not (worker.is_drain_ordered or worker.is_draining):
            return OrderDone(message=f"{name} takes new work already"), []
        if order.is_draining and self._roles.is_needed(worker):
            return _refused(order, self._last_of(worker)), []
        effects = self._roles.set_draining(worker, cause, now, on=order.is_draining)
        done = "takes no new work" if order.is_draining else "takes new work again"
        return OrderDone(message=f"{name} {done}"), effects

    def _last_of(self, worker: WorkerRecord) -> str:
        return (
            f"{worker.key[0]} is the last ready {worker.role} worker: start another one, or give "
            f"its role to another one first"
        )

    def _known(self) -> str:
        names = sorted(key[0] for key in self._members.workers)
        return f"the workers are {', '.join(names)}" if names else "no worker is registered"


_CONTROL_TOLD = {
    RoleControl.AUTO: "load gives the roles",
    RoleControl.MANUAL: "roles change by `flowpath switch-role` alone",
}


def _refused(order: OrderRole | OrderDrain, message: str) -> AdminRefused:
    return AdminRefused(command=type(order).__name__, message=message)
