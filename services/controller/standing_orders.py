"""The operator's orders that stand: what outlives the processes that it is about, and us.

Theory of operation
-------------------
An order about a worker is about its *name*. A crash takes the process away, not what the operator
wants of it: whoever comes under that name next is told the same again. An order ends when

- another one undoes or replaces it; load that gives a worker another role replaces it too,
- the worker leaves in an orderly way: what is started under that name later begins as its settings
  say,
- the last of ``MAX_KEPT`` newer ones pushes it out.

Who gives the roles is an order about the cluster. It stands until the operator says what the
setting says, or the cluster has ended. The shell keeps all of it where it outlives the controller.
"""

from dataclasses import dataclass

from common.ids import WorkerId
from common.messages.admin import RoleControl
from common.messages.fields import Role

MAX_KEPT = 4096
"""Orders of one kind; names that never come back are forgotten beyond that, oldest first."""


@dataclass(frozen=True, slots=True)
class KeptOrders:
    """All standing orders. ``control`` is None where the setting holds."""

    control: RoleControl | None = None
    drained: tuple[WorkerId, ...] = ()
    roles: tuple[tuple[WorkerId, Role], ...] = ()


NO_ORDERS = KeptOrders()


class StandingOrders:
    """What the operator wants. ``setting`` says who gives the roles where no order does."""

    def __init__(self, setting: RoleControl, kept: KeptOrders = NO_ORDERS) -> None:
        self._setting = setting
        self._control = kept.control
        self._drained = dict.fromkeys(kept.drained)
        self._roles = dict(kept.roles)
        self._is_changed = False

    @property
    def control(self) -> RoleControl:
        """Who gives the roles."""
        return self._control or self._setting

    def set_control(self, control: RoleControl) -> None:
        """Let ``control`` stand; what the setting says anyway is no order."""
        order = None if control is self._setting else control
        self._is_changed = self._is_changed or order is not self._control
        self._control = order

    def is_drained(self, worker: WorkerId) -> bool:
        """Whether a worker of this name is to take no work."""
        return worker in self._drained

    def set_drained(self, worker: WorkerId, *, on: bool) -> None:
        """Let a worker of this name take no work, or end that order."""
        if on is self.is_drained(worker):
            return
        self._is_changed = True
        self._drained.pop(worker, None)
        if on:
            self._drained[worker] = None
            _bound(self._drained)

    def role_of(self, worker: WorkerId) -> Role | None:
        """Return what a worker of this name is to be, if the operator has said."""
        return self._roles.get(worker)

    def set_role(self, worker: WorkerId, role: Role | None) -> None:
        """Let a worker of this name be a role, or end that order."""
        if role is self.role_of(worker):
            return
        self._is_changed = True
        self._roles.pop(worker, None)
        if role is not None:
            self._roles[worker] = role
            _bound(self._roles)

    def kept(self) -> KeptOrders:
        """Return all that stand, the oldest first."""
        return KeptOrders(self._control, tuple(self._drained), tuple(self._roles.items()))

    def take_news(self) -> KeptOrders | None:
        """Return all that stand if an order was given or ended since the last call."""
        if not self._is_changed:
            return None
        self._is_changed = False
        return self.kept()


def _bound(orders: dict[WorkerId, None] | dict[WorkerId, Role]) -> None:
    while len(orders) > MAX_KEPT:
        del orders[next(iter(orders))]
