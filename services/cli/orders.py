"""``flowpath switch-role``, ``roles`` and ``drain``: the operator's orders to the controller."""

import asyncio
from collections.abc import Callable, Iterator
from enum import StrEnum
from time import monotonic

from common.config.settings import Settings
from common.errors import ConfigError
from common.ids import WorkerId
from common.messages.admin import (
    OrderDrain,
    OrderRole,
    OrderRoles,
    RoleControl,
    WorkerStatus,
)
from common.messages.fields import Role, WorkerLoad, WorkerState
from services.cli.admin import give_order, need_status

POLL_SECONDS = 0.1
SETTLE_SECONDS = 0.1
"""What was placed on a worker just before it was to drain is in its heartbeats after so long."""

Tell = Callable[[str], None]
LeftToDo = Callable[[WorkerStatus, float], str]
"""Says what is left of an order that was given so many seconds ago; nothing when it is done."""


class GivenRole(StrEnum):
    """What a worker can be told to be; one started to do both is never told."""

    PREFILL = "prefill"
    DECODE = "decode"


async def switch_role(
    settings: Settings, worker: str, role: GivenRole, wait_seconds: float | None, tell: Tell
) -> None:
    """Let a worker take a role; with ``wait_seconds`` until it has it.

    ConfigError when the controller refuses, no controller answers, the worker leaves meanwhile,
    or the time is over.
    """
    wanted = Role(role)
    tell(await give_order(settings, OrderRole(worker_id=WorkerId(worker), role=wanted)))
    if wait_seconds is None:
        return

    def left_to_do(status: WorkerStatus, _ordered_seconds_ago: float) -> str:
        return "" if status.role is wanted else f"is still {status.role}"

    await _follow(settings, worker, left_to_do, wait_seconds, tell)
    tell(f"{worker} is {wanted}")


async def set_role_control(settings: Settings, control: RoleControl, tell: Tell) -> None:
    """Let load give the roles, or the operator alone. ConfigError as ``switch_role``."""
    tell(await give_order(settings, OrderRoles(control=control)))


async def drain(
    settings: Settings, worker: str, is_draining: bool, wait_seconds: float | None, tell: Tell
) -> None:
    """Let a worker take no new work, or take it again; with ``wait_seconds`` until it is empty.

    ConfigError as ``switch_role``.
    """
    order = OrderDrain(worker_id=WorkerId(worker), is_draining=is_draining)
    tell(await give_order(settings, order))
    if wait_seconds is None:
        return
    left_to_do = _work_left if is_draining else _drain_left
    await _follow(settings, worker, left_to_do, wait_seconds, tell)
    tell(f"{worker} has nothing to do" if is_draining else f"{worker} takes work again")


async def _follow(
    settings: Settings,
    worker: str,
    left_to_do: LeftToDo,
    wait_seconds: float,
    tell: Tell,
) -> None:
    """Ask for the worker's state until nothing is left; each change of what is left is told."""
    ordered_at = monotonic()
    told = ""
    while True:
        seconds = monotonic() - ordered_at
        report = await need_status(settings)
        found = next((status for status in report.workers if status.id == worker), None)
        if found is None:
            raise ConfigError(f"{worker} has left the cluster")
        left = left_to_do(found, seconds)
        if not left:
            return
        if seconds > wait_seconds:
            raise ConfigError(f"after {wait_seconds:g} s {worker} {left}; the order stays")
        if left != told:
            told = left
            tell(f"  {worker} {left}")
        await asyncio.sleep(POLL_SECONDS)


def _drain_left(status: WorkerStatus, _ordered_seconds_ago: float) -> str:
    return "still drains" if status.state is WorkerState.DRAINING else ""


def _work_left(status: WorkerStatus, ordered_seconds_ago: float) -> str:
    if status.state is not WorkerState.DRAINING:
        return f"is still {status.state}"
    if status.load is None or status.heartbeat_age_seconds > ordered_seconds_ago - SETTLE_SECONDS:
        return "has not told its load since"
    work = ", ".join(_work(status.load))
    return f"has {work} left" if work else ""


def _work(load: WorkerLoad) -> Iterator[str]:
    for count, what in (
        (load.num_waiting, "waiting"),
        (load.num_prefilling, "in prefill"),
        (load.num_sending, "sending"),
        (load.num_receiving, "receiving"),
        (load.num_decoding, "decoding"),
        (load.num_swapped, "swapped out"),
    ):
        if count:
            yield f"{count} {what}"
