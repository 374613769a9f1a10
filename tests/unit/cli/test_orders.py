"""The operator's orders over a real admin channel, against a scripted controller."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.settings import Settings
from common.errors import ConfigError
from common.ids import Epoch, WorkerId
from common.messages.admin import (
    AdminRefused,
    CliToController,
    ControllerToCli,
    GetStatus,
    OrderDone,
    OrderDrain,
    OrderRole,
    OrderRoles,
    RoleControl,
    StatusReport,
    WorkerStatus,
)
from common.messages.fields import Mode, Role, WorkerLoad, WorkerState
from services.cli import admin as admin_module
from services.cli import orders as orders_module
from services.cli.orders import GivenRole, drain, set_role_control, switch_role
from tests.support.scripted_admin import scripted_admin

NOTHING = WorkerLoad(
    num_waiting=0,
    num_prefilling=0,
    num_sending=0,
    num_receiving=0,
    num_decoding=0,
    uncomputed_tokens=0,
    num_steps=1,
)
WORKER = WorkerStatus(
    id=WorkerId("decode-0"),
    pid=1,
    host="here",
    epoch=Epoch(5),
    role=Role.DECODE,
    state=WorkerState.READY,
    heartbeat_age_seconds=0.0,
    kv=None,
    load=NOTHING,
    pairs=(),
    mode=Mode.BALANCED,
    rates=None,
)
DRAINING = replace(WORKER, state=WorkerState.DRAINING)
DONE = OrderDone(message="ordered")


@pytest.fixture(autouse=True)
def _poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(orders_module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(admin_module, "DEADLINE_SECONDS", 60.0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(port=1, run_dir=tmp_path)


def report(*workers: WorkerStatus) -> StatusReport:
    return StatusReport(
        is_ready=True,
        reason="",
        model_name="toy",
        model_fingerprint="0123456789abcdef",
        uptime_seconds=1.0,
        num_requests=0,
        policy="flowkv",
        role_control=RoleControl.AUTO,
        scenario="normal",
        workers=workers,
        gateways=(),
    )


class Controller:
    """Answers an order, then tells one state of its workers after the other, the last for ever."""

    def __init__(self, *states: Sequence[WorkerStatus], answer: ControllerToCli = DONE) -> None:
        self._states: Iterator[Sequence[WorkerStatus]] = iter(states)
        self._last: Sequence[WorkerStatus] = ()
        self._answer = answer

    def __call__(self, message: CliToController) -> ControllerToCli:
        if not isinstance(message, GetStatus):
            return self._answer
        self._last = next(self._states, self._last)
        return report(*self._last)


async def test_a_role_is_ordered_and_the_answer_is_told(settings: Settings) -> None:
    told: list[str] = []
    async with scripted_admin(settings, Controller()) as controller:
        await switch_role(settings, "decode-0", GivenRole.PREFILL, None, told.append)
    assert controller.got == [OrderRole(worker_id=WorkerId("decode-0"), role=Role.PREFILL)]
    assert told == ["ordered"]


async def test_a_wait_for_a_role_ends_when_the_worker_has_it(settings: Settings) -> None:
    told: list[str] = []
    switched = replace(WORKER, role=Role.PREFILL)
    switching = replace(WORKER, is_switching=True)
    states = ([WORKER], [switching], [switched])
    async with scripted_admin(settings, Controller(*states)):
        await switch_role(settings, "decode-0", GivenRole.PREFILL, 60.0, told.append)
    assert told == ["ordered", "  decode-0 is still decode", "decode-0 is prefill"]


async def test_role_control_is_ordered(settings: Settings) -> None:
    told: list[str] = []
    async with scripted_admin(settings, Controller()) as controller:
        await set_role_control(settings, RoleControl.MANUAL, told.append)
    assert controller.got == [OrderRoles(control=RoleControl.MANUAL)]
    assert told == ["ordered"]


async def test_a_wait_for_a_drain_tells_what_is_left_until_nothing_is(settings: Settings) -> None:
    told: list[str] = []
    busy = replace(DRAINING, load=replace(NOTHING, num_decoding=2, num_sending=1))
    less = replace(DRAINING, load=replace(NOTHING, num_swapped=1))
    states = ([WORKER], [replace(DRAINING, load=None)], [busy], [busy], [less], [DRAINING])
    async with scripted_admin(settings, Controller(*states)) as controller:
        await drain(settings, "decode-0", True, 60.0, told.append)
    assert controller.got[0] == OrderDrain(worker_id=WorkerId("decode-0"), is_draining=True)
    assert told == [
        "ordered",
        "  decode-0 is still ready",
        "  decode-0 has not told its load since",
        "  decode-0 has 1 sending, 2 decoding left",
        "  decode-0 has 1 swapped out left",
        "decode-0 has nothing to do",
    ]


async def test_a_load_told_before_the_order_does_not_end_the_wait(settings: Settings) -> None:
    old = replace(DRAINING, heartbeat_age_seconds=60.0)
    busy = replace(DRAINING, load=replace(NOTHING, num_waiting=1))
    told: list[str] = []
    async with scripted_admin(settings, Controller([old], [old], [busy], [DRAINING])):
        await drain(settings, "decode-0", True, 60.0, told.append)
    assert told[1:3] == [
        "  decode-0 has not told its load since",
        "  decode-0 has 1 waiting left",
    ]


async def test_a_drain_is_undone(settings: Settings) -> None:
    told: list[str] = []
    async with scripted_admin(settings, Controller([DRAINING], [WORKER])) as controller:
        await drain(settings, "decode-0", False, 60.0, told.append)
    assert controller.got[0] == OrderDrain(worker_id=WorkerId("decode-0"), is_draining=False)
    assert told == ["ordered", "  decode-0 still drains", "decode-0 takes work again"]


async def test_a_refused_order_tells_the_controller_s_reason(settings: Settings) -> None:
    refused = AdminRefused(command="OrderRole", message="decode-0 is the last decode worker")
    async with scripted_admin(settings, Controller(answer=refused)):
        with pytest.raises(ConfigError, match="the controller refused: decode-0 is the last"):
            await switch_role(settings, "decode-0", GivenRole.PREFILL, 60.0, print)


async def test_an_order_without_a_controller_says_where_it_looked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_module, "DEADLINE_SECONDS", 0.05)
    with pytest.raises(ConfigError, match=f"no controller answered at {settings.run_dir}"):
        await drain(settings, "decode-0", True, None, print)


async def test_a_worker_that_leaves_ends_the_wait_for_it(settings: Settings) -> None:
    async with scripted_admin(settings, Controller([WORKER], [])):
        with pytest.raises(ConfigError, match="decode-0 has left the cluster"):
            await switch_role(settings, "decode-0", GivenRole.PREFILL, 60.0, print)


async def test_a_wait_has_an_end_that_tells_what_is_left(settings: Settings) -> None:
    busy = replace(DRAINING, load=replace(NOTHING, num_decoding=1))
    async with scripted_admin(settings, Controller([busy])):
        with pytest.raises(ConfigError, match=r"after 0\.05 s decode-0 has 1 decoding left"):
            await drain(settings, "decode-0", True, 0.05, print)
