"""Scaling over a real admin channel: a scripted controller, and scalers that keep what they told.

The last tests start real, trivial processes.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from common.config.host import host_id
from common.config.load import save_settings
from common.config.settings import Settings
from common.ids import WorkerId
from common.messages.admin import AdminRefused, ScalerHello, StartWorker, StopWorker
from common.messages.fields import Role
from services.cli.supervisor import scaler as scaler_module
from services.cli.supervisor.plan import ProcessSpec, Stage
from services.cli.supervisor.scaler import ProcessScaler, Scaler, ScalerLink
from services.cli.supervisor.supervisor import Supervisor
from tests.support.scripted_admin import ScriptedAdmin, scripted_admin
from tests.unit.cli.test_supervisor import CHILD, DEADLINE_SECONDS, Told, until_running

P0, P1, D0 = WorkerId("prefill-0"), WorkerId("prefill-1"), WorkerId("decode-0")
BUDGET = 3
MARKS = itertools.count()


@pytest.fixture(autouse=True)
def _say_hello_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler_module, "HELLO_SECONDS", 0.01)


class Kept:
    """A scaler whose workers run at once, and go on ending until ``end`` is called."""

    backend = "kept"

    def __init__(self, *workers: WorkerId) -> None:
        self.workers = list(workers)
        self.started: list[tuple[WorkerId, Role]] = []
        self.stopped: list[WorkerId] = []
        self.refusal: str | None = None

    def running(self) -> tuple[WorkerId, ...]:
        return tuple(self.workers)

    def start(self, worker_id: WorkerId, role: Role) -> str | None:
        if self.refusal is None:
            self.started.append((worker_id, role))
            self.workers.append(worker_id)
        return self.refusal

    def stop(self, worker_id: WorkerId) -> None:
        self.stopped.append(worker_id)

    def end(self, worker_id: WorkerId) -> None:
        self.workers.remove(worker_id)


def settings_of(folder: Path) -> Settings:
    return Settings(port=1, run_dir=folder, max_workers=BUDGET, drain_seconds=0)


def hello(*running: WorkerId, backend: str = Kept.backend) -> ScalerHello:
    return ScalerHello(backend=backend, host=host_id(), max_workers=BUDGET, running=running)


class Played(NamedTuple):
    """A scripted controller, and the link on which a scaler listens to it."""

    controller: ScriptedAdmin
    link: ScalerLink

    async def settled(self) -> None:
        """Wait until all that was said has been carried out, by what is said last."""
        last = f"mark {next(MARKS)}"
        self.controller.say(AdminRefused(command="ScalerHello", message=last))
        # Looked at again with every hello.
        await self.controller.board.wait_for(last, lambda: self.link._last_refusal == last)


@asynccontextmanager
async def scaling(
    folder: Path, scaler: Scaler, tell: Callable[[str], None] = print
) -> AsyncIterator[Played]:
    """Let a scaler speak with a scripted controller, which has heard of it."""
    settings = settings_of(folder)
    async with scripted_admin(settings, lambda _message: None) as controller:
        link = ScalerLink(settings, scaler, tell)
        run = asyncio.get_running_loop().create_task(link.run())
        try:
            await controller.hears(hello(*scaler.running(), backend=scaler.backend))
            yield Played(controller, link)
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


async def test_a_scaler_says_again_and_again_what_it_keeps(tmp_path: Path) -> None:
    scaler = Kept(P0, D0)
    async with scaling(tmp_path, scaler) as played:
        controller = played.controller
        await controller.board.wait_for("three hellos", lambda: len(controller.got) >= 3)
    assert all(message == hello(P0, D0) for message in controller.got)


async def test_a_worker_is_started_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    scaler, told = Kept(P0, D0), Told()
    async with scaling(tmp_path, scaler, told) as played:
        controller = played.controller
        for _ in range(3):
            controller.say(StartWorker(worker_id=P1, role=Role.PREFILL))
        await controller.hears(hello(P0, D0, P1))
        await played.settled()
    assert scaler.started == [(P1, Role.PREFILL)]
    assert told.lines == ["starting prefill-1 under load (prefill)"]


async def test_no_worker_is_started_above_the_budget_though_one_of_them_is_ending(
    tmp_path: Path,
) -> None:
    more = WorkerId("decode-1")
    scaler = Kept(P0, D0, P1)
    async with scaling(tmp_path, scaler) as played:
        controller = played.controller
        controller.say(StopWorker(worker_id=P1))
        controller.say(StartWorker(worker_id=more, role=Role.DECODE))
        await played.settled()
        assert (scaler.stopped, scaler.started) == ([P1], [])
        scaler.end(P1)
        controller.say(StartWorker(worker_id=more, role=Role.DECODE))
        await controller.hears(hello(P0, D0, more))
    assert scaler.started == [(more, Role.DECODE)]


async def test_a_worker_is_stopped_once_and_its_name_can_be_used_again(tmp_path: Path) -> None:
    scaler, told = Kept(P0, P1), Told()
    async with scaling(tmp_path, scaler, told) as played:
        controller = played.controller
        for _ in range(3):
            controller.say(StopWorker(worker_id=P1))
        controller.say(StopWorker(worker_id=D0))  # unknown here
        controller.say(StartWorker(worker_id=P1, role=Role.PREFILL))  # still ending
        await played.settled()
        assert (scaler.stopped, scaler.started) == ([P1], [])
        scaler.end(P1)
        await controller.hears(hello(P0))
        controller.say(StartWorker(worker_id=P1, role=Role.PREFILL))
        await told.until("starting prefill-1")
        controller.say(StopWorker(worker_id=P1))
        await played.settled()
    assert scaler.stopped == [P1, P1]
    assert told.lines[0] == "stopping prefill-1: load is low"


async def test_a_worker_that_cannot_be_started_is_not_told_as_started(tmp_path: Path) -> None:
    scaler, told = Kept(P0), Told()
    scaler.refusal = "no room"
    async with scaling(tmp_path, scaler, told) as played:
        controller = played.controller
        controller.say(StartWorker(worker_id=P1, role=Role.PREFILL))
        await played.settled()
        scaler.refusal = None
        controller.say(StartWorker(worker_id=P1, role=Role.PREFILL))
        await told.until("starting prefill-1")
    assert len(told.lines) == 1


async def test_a_controller_that_knows_no_scalers_is_spoken_to_on(tmp_path: Path) -> None:
    scaler = Kept(P0)
    async with scaling(tmp_path, scaler) as played:
        controller = played.controller
        controller.say(AdminRefused(command="ScalerHello", message="it is not known here"))
        await played.settled()


async def test_a_controller_that_is_started_anew_is_told_and_obeyed(tmp_path: Path) -> None:
    scaler, settings = Kept(P0, D0), settings_of(tmp_path)
    async with scaling(tmp_path, scaler) as played:
        played.controller.close()
        async with scripted_admin(settings, lambda _message: None) as second:
            await second.hears(hello(P0, D0))
            second.say(StartWorker(worker_id=P1, role=Role.PREFILL))
            await second.hears(hello(P0, D0, P1))
    assert scaler.started == [(P1, Role.PREFILL)]


# ---- processes -----------------------------------------------------------------------------------


def _trivial(name: str, role: Role, *, is_elastic: bool) -> ProcessSpec:
    return ProcessSpec(name, CHILD, Stage.WORKER, role, is_elastic)


def supervisor_of(folder: Path, *names: str) -> Supervisor:
    settings = settings_of(folder)
    save_settings(settings, folder / "settings.json")
    specs = [ProcessSpec(name, CHILD, Stage.WORKER, "worker") for name in names]
    return Supervisor(settings, specs, folder / "settings.json", print)


async def test_processes_come_and_go_as_the_controller_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaler_module, "plan_worker", _trivial)
    supervisor = supervisor_of(tmp_path, P0, D0)
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run())
        scaler = ProcessScaler(supervisor, is_combined=False)
        async with scaling(tmp_path, scaler) as played:
            controller = played.controller
            controller.say(StartWorker(worker_id=P1, role=Role.PREFILL))
            await controller.hears(hello(P0, D0, P1, backend=scaler.backend))
            await until_running(supervisor, P0, P1, D0)
            controller.say(StopWorker(worker_id=P1))
            await controller.board.wait_for(
                "it has ended", lambda: supervisor.worker_names == (P0, D0)
            )
        supervisor.stop()
        assert await run == 0


@pytest.mark.parametrize(
    ("is_combined", "worker", "role", "told"),
    [
        (False, "../prefill-1", Role.PREFILL, "no name"),
        (False, "", Role.PREFILL, "no name"),
        (False, "--id", Role.PREFILL, "no name"),
        (False, "w-1", Role.COMBINED, "no worker of this cluster is started as combined"),
        (True, "w-1", Role.DECODE, "no worker of this cluster is started as decode"),
        (False, P0, Role.PREFILL, "another process has its name"),
    ],
)
async def test_a_process_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, is_combined: bool, worker: str, role: Role, told: str
) -> None:
    scaler = ProcessScaler(supervisor_of(tmp_path, P0), is_combined=is_combined)
    reason = scaler.start(WorkerId(worker), role)
    assert reason is not None
    assert told in reason
    assert scaler.running() == (P0,)
