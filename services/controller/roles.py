"""Roles and drains as state: what a worker was told to be, and what it says it is.

A worker can do everything, so an order counts from the moment it is given: work of the new role is
placed at once, and the worker's ``RoleSwitched`` only confirms it. Every order raises the worker's
role generation; what a worker says of an older one is stale and changes nothing. What the operator
orders stands for whoever comes under the worker's name (``standing_orders``).
"""

from dataclasses import replace

from common.ids import WorkerId
from common.messages.admin import RoleControl
from common.messages.control import PeerJoined, RoleSwitched, SetDraining, SwitchRole
from common.messages.fields import Role, WorkerState
from services.controller.effects import Effect, Fact, Note, Send
from services.controller.members import Members, WorkerRecord
from services.controller.standing_orders import StandingOrders

TELL_AGAIN_SECONDS = 1.0
"""An order that a worker's heartbeats do not show after so long is sent again."""
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Roles:
    """Gives the workers in ``members`` their roles, and takes them out of work.

    What the operator orders goes to ``orders`` too.
    """

    def __init__(self, members: Members, orders: StandingOrders) -> None:
        self._members = members
        self._orders = orders
        self._seen: set[Role] = set()
        self._stood: tuple[RoleControl, int] | None = None
        self.set_control(orders.control)

    @property
    def control(self) -> RoleControl:
        """Who gives the roles."""
        return self._orders.control

    def set_control(self, control: RoleControl) -> None:
        """Let load give the roles, or the operator alone."""
        self._orders.set_control(control)
        self._members.cluster.has_fixed_roles = control is RoleControl.MANUAL
        if control is RoleControl.MANUAL:
            for worker in self._members.workers.values():
                worker.help = None
                worker.stands_in = False

    def is_needed(self, worker: WorkerRecord) -> bool:
        """Whether a role would be left without a ready worker, were this one not there."""
        if worker.state is not WorkerState.READY:
            return False
        others = {w.role for w in self._members.ready_workers() if w is not worker}
        needed = set(OTHER) if worker.role is Role.COMBINED else {worker.role}
        return Role.COMBINED not in others and not needed <= others

    def order(
        self, worker: WorkerRecord, role: Role, reason: str, cause: str, now: float
    ) -> list[Effect]:
        """Give a worker the other role, as load asks, from now on, and tell all workers."""
        self._orders.set_role(worker.peer.worker_id, None)
        return self._give(worker, role, reason, cause, now)

    def order_by_operator(
        self, worker: WorkerRecord, role: Role, cause: str, now: float
    ) -> list[Effect]:
        """Give a worker a role that whoever has its name is to have; nothing where it has it."""
        self._orders.set_role(worker.peer.worker_id, role)
        if worker.role is role:
            return []
        return self._give(worker, role, "ordered by the operator", cause, now)

    def drain_by_operator(
        self, worker: WorkerRecord, cause: str, now: float, *, on: bool
    ) -> list[Effect]:
        """Let whoever has a worker's name take no new work, or take it again."""
        self._orders.set_drained(worker.peer.worker_id, on=on)
        if worker.is_drain_ordered if on else not (worker.is_drain_ordered or worker.is_draining):
            return []
        return self.set_draining(worker, cause, now, on=on)

    def resume_orders(self, worker: WorkerRecord, cause: str, now: float) -> list[Effect]:
        """Tell a worker that has just joined what stands for its name."""
        name = worker.peer.worker_id
        role = self._orders.role_of(name)
        is_drained = self._orders.is_drained(name)
        if role is worker.role or worker.role is Role.COMBINED:
            role = None
        effects: list[Effect] = []
        if role is not None:
            effects += self._give(worker, role, "the operator's order stands", cause, now)
        if is_drained:
            facts = (("worker", name), ("reason", "the operator's order stands"))
            effects.append(Note("drain_stands", cause, facts=facts, level="warning"))
            effects += self.set_draining(worker, cause, now, on=True)
        return effects

    def end_orders(self, worker: WorkerId, reason: str, cause: str) -> list[Effect]:
        """Let whoever comes under this name next begin as its settings say."""
        role, is_drained = self._orders.role_of(worker), self._orders.is_drained(worker)
        if role is None and not is_drained:
            return []
        self._orders.set_role(worker, None)
        self._orders.set_drained(worker, on=False)
        facts = (("worker", worker), ("role", role), ("drained", is_drained), ("reason", reason))
        return [Note("orders_ended", cause, facts=facts)]

    def _give(
        self, worker: WorkerRecord, role: Role, reason: str, cause: str, now: float
    ) -> list[Effect]:
        before = worker.role
        worker.peer = replace(worker.peer, role=role)
        worker.role_generation += 1
        worker.help = None
        worker.role_told_at = now
        facts: tuple[Fact, ...] = (
            ("worker", worker.key[0]),
            ("before", before),
            ("role", role),
            ("generation", worker.role_generation),
            ("reason", reason),
        )
        return [
            Note("role_ordered", cause, facts=facts),
            Send(worker.key, self._order_of(worker), cause),
            *self._introduce(worker, cause),
        ]

    def switched(
        self, worker: WorkerRecord, message: RoleSwitched, cause: str, now: float
    ) -> list[Effect]:
        """Note what holds on a worker."""
        return self.told(worker, message.role, message.role_generation, cause, now)

    def told(
        self, worker: WorkerRecord, role: Role, generation: int, cause: str, now: float
    ) -> list[Effect]:
        """Compare what a worker says with what it was told; the higher generation holds."""
        if generation < worker.role_generation:
            stale: tuple[Fact, ...] = (
                ("worker", worker.key[0]),
                ("generation", generation),
                ("expected", worker.role_generation),
            )
            return [Note("role_stale", cause, facts=stale, level="warning")]
        effects: list[Effect] = []
        is_news = worker.held_role is not role
        worker.held_role = role
        if is_news or worker.role_told_at is not None:
            told_at = now if worker.role_told_at is None else worker.role_told_at
            facts: tuple[Fact, ...] = (
                ("worker", worker.key[0]),
                ("role", role),
                ("generation", generation),
                ("seconds", round(now - told_at, 6)),
            )
            effects.append(Note("role_switched", cause, facts=facts))
        worker.role_told_at = None
        worker.role_generation = generation
        if worker.role is not role:
            worker.peer = replace(worker.peer, role=role)
            effects += self._introduce(worker, cause)
        return effects

    def set_draining(
        self, worker: WorkerRecord, cause: str, now: float, *, on: bool
    ) -> list[Effect]:
        """Let a worker take no new work, or take it again."""
        before = worker.state
        worker.drain_told_at = now
        worker.is_drain_ordered = on
        order = SetDraining(is_draining=on)
        return [*worker.state_note(before, cause), Send(worker.key, order, cause)]

    def tell_again(self, worker: WorkerRecord, cause: str, now: float) -> list[Effect]:
        """Repeat the orders that are not confirmed, after a heartbeat."""
        effects: list[Effect] = []
        told_at = worker.role_told_at
        if told_at is not None and now - told_at > TELL_AGAIN_SECONDS:
            worker.role_told_at = now
            effects.append(Send(worker.key, self._order_of(worker), cause))
        is_unheard = worker.is_drain_ordered and not worker.is_draining
        if is_unheard and now - worker.drain_told_at > TELL_AGAIN_SECONDS:
            worker.drain_told_at = now
            effects.append(Send(worker.key, SetDraining(is_draining=True), cause))
        return effects

    def stand_in(self, cause: str) -> list[Effect]:
        """Let every ready worker do the work of a role that lost its last one, until it has one.

        Only where load may change roles. Serving slowly is better than refusing; but a cluster that
        starts is not ready before it has both roles.
        """
        standing = (self.control, self._members.standing())
        if standing == self._stood:
            return []
        roles = {worker.role for worker in self._members.ready_workers()}
        self._seen |= roles
        is_missing = (
            self.control is RoleControl.AUTO
            and len(roles) == 1
            and Role.COMBINED not in roles
            and self._seen >= set(OTHER)
        )
        effects: list[Effect] = []
        for worker in self._members.workers.values():
            stands_in = is_missing and worker.state is WorkerState.READY
            if worker.stands_in is stands_in:
                continue
            worker.stands_in = stands_in
            facts: tuple[Fact, ...] = (("worker", worker.key[0]), ("role", worker.role))
            event = "role_stand_in" if stands_in else "role_stand_in_ended"
            effects.append(Note(event, cause, facts=facts, level="warning"))
        self._stood = (self.control, self._members.standing())
        return effects

    def _order_of(self, worker: WorkerRecord) -> SwitchRole:
        return SwitchRole(role=worker.role, role_generation=worker.role_generation)

    def _introduce(self, worker: WorkerRecord, cause: str) -> list[Effect]:
        joined = PeerJoined(peer=worker.peer)
        return [Send(key, joined, cause) for key in self._members.workers if key != worker.key]
