"""The supervisor with real but trivial children."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.config.load import save_settings
from common.config.settings import Settings
from services.cli.supervisor import supervisor as supervisor_module
from services.cli.supervisor.plan import ProcessSpec, Stage
from services.cli.supervisor.supervisor import Supervisor

CHILD = "tests.unit.cli.trivial_child"
DEADLINE_SECONDS = 60.0


class Told:
    """The operator's lines; one can be waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._came = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._came.set()

    async def until(self, part: str) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not any(part in line for line in self.lines):
                self._came.clear()
                await self._came.wait()


def make(tmp_path: Path, told: Told, *children: tuple[str, Stage]) -> Supervisor:
    settings = Settings(port=1, run_dir=tmp_path, drain_seconds=0)
    save_settings(settings, tmp_path / "settings.json")
    specs = [ProcessSpec(name, CHILD, stage, "child") for name, stage in children]
    return Supervisor(settings, specs, tmp_path / "settings.json", told)


async def until_running(supervisor: Supervisor, *names: str) -> None:
    """Wait until the children wait for their stop."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not all(
            (kept := supervisor._kept.get(name)) is not None and kept.child and kept.child.output
            for name in names
        ):
            await asyncio.sleep(0.01)


async def test_children_end_stage_by_stage_and_the_exit_code_is_0(tmp_path: Path) -> None:
    told = Told()
    stages = (("c", Stage.CONTROLLER), ("w", Stage.WORKER), ("g", Stage.GATEWAY))
    supervisor = make(tmp_path, told, *stages)
    ended: list[str] = []
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run())
        await until_running(supervisor, "c", "w", "g")
        watches = [
            tasks.create_task(_note_end(name, supervisor._kept[name].ended, ended))
            for name, _ in stages
        ]
        supervisor.stop()
        assert await run == 0
        await asyncio.gather(*watches)
    assert ended == ["g", "w", "c"]


async def _note_end(name: str, event: asyncio.Event, ended: list[str]) -> None:
    await event.wait()
    ended.append(name)


async def test_a_killed_child_is_started_again_and_told(tmp_path: Path) -> None:
    told = Told()
    supervisor = make(tmp_path, told, ("w", Stage.WORKER))
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run())
        await until_running(supervisor, "w")
        first = supervisor._kept["w"].child
        assert first is not None
        first.send(signal.SIGKILL)
        await told.until("w ended (signal 9: w runs); starting it again in 0.25 s")
        while supervisor._kept["w"].child is first:
            await asyncio.sleep(0.01)
        await until_running(supervisor, "w")
        supervisor.stop()
        assert await run == 0


async def test_a_child_with_a_wrong_setting_ends_all_with_code_2_and_its_message(
    tmp_path: Path,
) -> None:
    told = Told()
    supervisor = make(tmp_path, told, ("wrong", Stage.WORKER), ("c", Stage.CONTROLLER))
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await supervisor.run() == 2
    assert "wrong cannot start:\nflowpath child: pool.bin is missing" in told.lines


async def test_a_child_that_never_gets_up_is_given_up_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_FAILED_STARTS", 2)
    told = Told()
    supervisor = make(tmp_path, told, ("crash", Stage.WORKER))
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await supervisor.run() == 1
    assert told.lines[-1] == "crash cannot start:\nexit code 3"


async def test_a_second_stop_kills(tmp_path: Path) -> None:
    told = Told()
    supervisor = make(tmp_path, told, ("stubborn", Stage.WORKER))
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run())
        await until_running(supervisor, "stubborn")
        supervisor.stop()
        supervisor.stop()
        assert await run == 0
    assert "killing" in told.lines


async def test_a_child_that_does_not_end_in_time_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "STAGE_GRACE_SECONDS", 0.05)
    told = Told()
    supervisor = make(tmp_path, told, ("stubborn", Stage.WORKER))
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run())
        await until_running(supervisor, "stubborn")
        supervisor.stop()
        assert await run == 0
    assert "stubborn did not end in 0.05 s: killing" in told.lines


def late(name: str) -> ProcessSpec:
    return ProcessSpec(name, CHILD, Stage.WORKER, "child", is_elastic=True)


async def test_a_worker_is_added_while_others_run_and_ends_with_them_in_its_stage(
    tmp_path: Path,
) -> None:
    supervisor = make(tmp_path, Told(), ("w", Stage.WORKER), ("c", Stage.CONTROLLER))
    assert not supervisor.try_add(late("early")), "nothing runs yet"
    ended: list[str] = []
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run())
        await until_running(supervisor, "w", "c")
        assert supervisor.try_add(late("w2"))
        assert not supervisor.try_add(late("w2"))
        assert not supervisor.try_add(late("c")), "a name is one process's"
        await until_running(supervisor, "w2")
        assert supervisor.worker_names == ("w", "w2")
        watches = [
            tasks.create_task(_note_end(name, kept.ended, ended))
            for name, kept in supervisor._kept.items()
        ]
        supervisor.stop()
        assert not supervisor.try_add(late("w3"))
        assert await run == 0
        await asyncio.gather(*watches)
    assert ended[-1] == "c"
    assert supervisor.worker_names == ()


async def test_a_removed_worker_ends_in_order_is_not_started_again_and_frees_its_name(
    tmp_path: Path,
) -> None:
    told = Told()
    supervisor = make(tmp_path, told, ("w", Stage.WORKER))
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run())
        await until_running(supervisor, "w")
        first = supervisor._kept["w"]
        supervisor.remove("w")
        supervisor.remove("w")
        supervisor.remove("nobody")
        assert supervisor.worker_names == ("w",), "it is there until it has ended"
        assert not supervisor.try_add(late("w"))
        await first.ended.wait()
        assert supervisor.worker_names == ()
        assert supervisor.try_add(late("w"))
        await until_running(supervisor, "w")
        supervisor.stop()
        assert await run == 0
    assert not [line for line in told.lines if "starting it again" in line]


async def test_a_removed_worker_that_does_not_end_in_time_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "STAGE_GRACE_SECONDS", 0.05)
    told = Told()
    supervisor = make(tmp_path, told, ("stubborn", Stage.WORKER))
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run())
        await until_running(supervisor, "stubborn")
        kept = supervisor._kept["stubborn"]
        supervisor.remove("stubborn")
        await kept.ended.wait()
        supervisor.stop()
        assert await run == 0
    assert "stubborn did not end in 0.05 s: killing" in told.lines


@pytest.mark.parametrize("name", ["wrong", "crash"])
async def test_an_added_worker_that_cannot_start_is_let_go_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_FAILED_STARTS", 1)
    told = Told()
    supervisor = make(tmp_path, told, ("w", Stage.WORKER))
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run())
        await until_running(supervisor, "w")
        assert supervisor.try_add(late(name))
        await told.until(f"{name} cannot start")
        assert supervisor.worker_names == ("w",)
        supervisor.stop()
        assert await run == 0


LONELY = """
import asyncio, sys
from pathlib import Path
from tests.unit.cli.test_supervisor import Stage, make, until_running

async def main():
    names = ("real-w", "real-stubborn")
    supervisor = make(Path(sys.argv[1]), print, *((name, Stage.WORKER) for name in names))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run())
        await until_running(supervisor, *names)
        print("pids", *(kept.child.pid for kept in supervisor._kept.values()), flush=True)

asyncio.run(main())
"""


def test_no_child_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    lonely = subprocess.Popen([sys.executable, "-c", LONELY, str(tmp_path)], stdout=subprocess.PIPE)
    assert lonely.stdout is not None
    lines = (line.split() for line in lonely.stdout)
    pids = next(words[1:] for words in lines if words[0] == b"pids")
    children = [psutil.Process(int(pid)) for pid in pids]
    assert len(children) == 2
    lonely.send_signal(signal.SIGKILL)
    lonely.wait()
    lonely.stdout.close()
    gone, alive = psutil.wait_procs(children, timeout=DEADLINE_SECONDS)
    assert len(gone) == 2, alive
