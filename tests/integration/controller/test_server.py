"""The real controller over real ZeroMQ, with a fake worker and gateway on the other ends."""

import asyncio
import os
import platform
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from common.config.host import host_id
from common.config.load import save_settings
from common.config.settings import Settings
from common.errors import ConfigError
from common.ids import Epoch, RequestId, WorkerId
from common.messages.admin import OrderDrain, OrderRole, OrderRoles, RoleControl
from common.messages.codec import Codec, Received
from common.messages.control import (
    Cancel,
    CancelRequest,
    ClusterState,
    ControllerToGateway,
    ControllerToWorker,
    DecodeStarted,
    GatewayAccepted,
    GatewayHeartbeat,
    GatewayToController,
    Goodbye,
    HeartbeatAnswered,
    HelloRefused,
    HelloRequested,
    KVIndexEvents,
    KVIndexRequested,
    PeerJoined,
    PeerLeft,
    PlaceRequest,
    RequestFailed,
    RequestFinished,
    RequestPlaced,
    RoleSwitched,
    SetDraining,
    SwitchRole,
    WorkerAccepted,
    WorkerToController,
)
from common.messages.fields import Role
from common.transport.channels import CONTROL
from common.transport.sockets import DealerLink, Identity, new_context
from services.cli.admin import ask_status, give_order
from services.controller.server import ControllerServer
from tests.unit.controller.cluster import gateway_hello, heartbeat, submit, worker_hello

DEADLINE_SECONDS = 30.0
DEATH_SECONDS = 60.0
"""Silence that no test waits for: a busy machine may leave anybody alone for some seconds."""
Message = TypeVar("Message")


class Peer:
    """One end of the control channel; what comes is kept until it is asked for."""

    def __init__(self, link: DealerLink[object, object], inbox: asyncio.Queue[Received[object]]):
        self.link = link
        self._inbox = inbox

    def say(self, message: object, payload: tuple[bytes, ...] = ()) -> None:
        assert self.link.try_send(message, "test", payload)

    async def hear(self, kind: type[Message]) -> tuple[Message, tuple[bytes, ...]]:
        """Return the next message of a kind; others are passed over."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                received = await self._inbox.get()
                if isinstance(received.message, kind):
                    return received.message, received.payload


@asynccontextmanager
async def connected(
    settings: Settings, name: str, epoch: Epoch, outgoing: object, incoming: object
) -> AsyncIterator[Peer]:
    context = new_context()
    link: DealerLink[object, object] = DealerLink(
        context,
        CONTROL,
        settings.control_address,
        Identity(name, epoch),
        Codec(outgoing),  # type: ignore[arg-type]  # a union
        Codec(incoming),  # type: ignore[arg-type]  # a union
    )
    inbox: asyncio.Queue[Received[object]] = asyncio.Queue()

    async def receive() -> None:
        async for received in link.received():
            inbox.put_nowait(received)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(receive())
        try:
            yield Peer(link, inbox)
        finally:
            link.close()
    context.destroy(linger=0)


def as_worker(settings: Settings, name: str, epoch: int = 1):  # type: ignore[no-untyped-def]
    return connected(settings, name, Epoch(epoch), WorkerToController, ControllerToWorker)


def as_gateway(settings: Settings, name: str = "g", epoch: int = 1):  # type: ignore[no-untyped-def]
    return connected(settings, name, Epoch(epoch), GatewayToController, ControllerToGateway)


@asynccontextmanager
async def controller(settings: Settings) -> AsyncIterator[ControllerServer]:
    server = ControllerServer(settings, host_id())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def settings(short_dir: Path) -> Settings:
    return Settings(
        port=1,
        roles="manual",
        death_seconds=DEATH_SECONDS,
        run_dir=short_dir,
        log_dir=short_dir / "log",
    )


@pytest.fixture
def short_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    folder.chmod(0o700)
    return folder


async def test_a_request_goes_through_placement_decode_and_end(settings: Settings) -> None:
    prompt = bytes(256)
    async with (
        controller(settings),
        as_worker(settings, "p0") as prefill,
        as_worker(settings, "d0") as decode,
        as_gateway(settings) as gateway,
    ):
        prefill.say(worker_hello("p0", Role.PREFILL, host="there"))
        await prefill.hear(WorkerAccepted)
        decode.say(worker_hello("d0", Role.DECODE, host="there"))
        accepted, _ = await decode.hear(WorkerAccepted)
        assert [peer.worker_id for peer in accepted.peers] == ["p0"]
        decode.say(heartbeat())
        await decode.hear(HeartbeatAnswered)
        gateway.say(gateway_hello(pid=os.getpid()))
        await gateway.hear(GatewayAccepted)
        gateway.say(GatewayHeartbeat(num_streams=0))
        state, _ = await gateway.hear(ClusterState)
        assert state.is_ready

        gateway.say(submit("r", 64), (prompt,))
        placed, payload = await prefill.hear(PlaceRequest)
        assert payload == (prompt,)
        assert placed.decode is not None
        assert placed.decode.worker_id == "d0"
        told, _ = await gateway.hear(RequestPlaced)
        assert (told.prefill_worker, told.decode_worker) == ("p0", "d0")

        decode.say(DecodeStarted(request_id=RequestId("r")))
        gateway.say(CancelRequest(request_id=RequestId("r"), choice=0, reason="stop string"))
        cancel, _ = await decode.hear(Cancel)
        assert cancel.choice == 0
        report = await ask_status(settings, DEADLINE_SECONDS)
        assert report is not None
        assert report.num_requests == 1
        assert [(w.id, w.kv is not None) for w in report.workers] == [("d0", True), ("p0", False)]
        decode.say(RequestFinished(request_id=RequestId("r"), was_cancelled=False))
        await until(lambda: ask_num_requests(settings), 0)


async def ask_num_requests(settings: Settings) -> int:
    report = await ask_status(settings, DEADLINE_SECONDS)
    return -1 if report is None else report.num_requests


async def until(ask: Callable[[], object], expected: object) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await ask() != expected:  # type: ignore[misc]  # a coroutine
            await asyncio.sleep(0.01)


async def test_a_killed_worker_is_known_everywhere_long_before_its_silence_would_tell(
    settings: Settings,
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    async with (
        controller(settings),
        as_worker(settings, "p0") as prefill,
        as_worker(settings, "d0") as decode,
        as_gateway(settings) as gateway,
    ):
        mine = host_id()
        prefill.say(worker_hello("p0", Role.PREFILL, pid=os.getpid(), host=mine))
        await prefill.hear(WorkerAccepted)
        decode.say(worker_hello("d0", Role.DECODE, pid=child.pid, host=mine))
        await decode.hear(WorkerAccepted)
        gateway.say(gateway_hello(pid=os.getpid()))
        await gateway.hear(GatewayAccepted)
        gateway.say(submit("r", 64), (bytes(256),))
        await prefill.hear(PlaceRequest)
        child.kill()
        left, _ = await prefill.hear(PeerLeft)
        assert left.worker_id == "d0"
        failed, _ = await gateway.hear(RequestFailed)
        assert (failed.request_id, failed.code) == ("r", "worker_died")
        await prefill.hear(Cancel)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()


async def test_a_name_is_its_process_s_until_that_is_killed_and_then_free_at_once(
    settings: Settings,
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = host_id()
    async with (
        controller(settings),
        as_worker(settings, "d0", 1) as first,
        as_worker(settings, "d0", 2) as second,
    ):
        first.say(worker_hello("d0", Role.DECODE, 1, pid=child.pid, host=mine))
        await first.hear(WorkerAccepted)
        claim = worker_hello("d0", Role.DECODE, 2, pid=os.getpid(), host=mine)
        second.say(claim)
        refused, _ = await second.hear(HelloRefused)
        assert f"taken by {platform.node()} pid {child.pid}" in refused.message
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody reaped it
        second.say(claim)
        await second.hear(WorkerAccepted)  # at once: silence would take longer than the deadline
    child.wait()
    assert child.stdin is not None
    child.stdin.close()


async def test_a_restarted_controller_gets_its_members_back_with_the_same_epochs(
    settings: Settings,
) -> None:
    async with as_worker(settings, "p0", 7) as worker, as_gateway(settings, "g", 9) as gateway:
        async with controller(settings):
            worker.say(worker_hello("p0", Role.PREFILL, 7, host="there"))
            await worker.hear(WorkerAccepted)
            gateway.say(gateway_hello("g", 9, pid=os.getpid()))
            await gateway.hear(GatewayAccepted)
        async with controller(settings) as restarted:
            worker.say(heartbeat())
            asked, _ = await worker.hear(HelloRequested)
            assert asked.epoch == 7
            worker.say(worker_hello("p0", Role.PREFILL, 7, host="there"))
            await worker.hear(WorkerAccepted)
            gateway.say(GatewayHeartbeat(num_streams=1))
            await gateway.hear(HelloRequested)
            gateway.say(gateway_hello("g", 9, pid=os.getpid()))
            await gateway.hear(GatewayAccepted)
            assert list(restarted.core.members.workers) == [("p0", 7)]
            assert list(restarted.core.members.gateways) == [("g", 9)]


async def test_a_restarted_controller_places_requests_as_soon_as_its_members_are_back(
    settings: Settings,
) -> None:
    settings = settings.model_copy(update={"policy": "prefix_aware"})
    hashes = bytes(range(16))
    async with (
        as_worker(settings, "p0") as prefill,
        as_worker(settings, "d0") as decode,
        as_gateway(settings) as gateway,
    ):
        members = (
            (prefill, heartbeat(index_sequence=3), worker_hello("p0", Role.PREFILL, host="there")),
            (decode, heartbeat(), worker_hello("d0", Role.DECODE, host="there")),
            (gateway, GatewayHeartbeat(num_streams=0), gateway_hello(pid=os.getpid())),
        )
        async with controller(settings) as restarted:
            for peer, beat, hello in members:
                peer.say(beat)
                await peer.hear(HelloRequested)
                peer.say(hello)
            await prefill.hear(WorkerAccepted)
            prefill.say(heartbeat(index_sequence=3))
            await prefill.hear(KVIndexRequested)
            prefill.say(KVIndexEvents(sequence=4, is_snapshot=True), (hashes, b""))
            await gateway.hear(GatewayAccepted)
            await decode.hear(WorkerAccepted)
            gateway.say(submit("r", 64), (bytes(256),))
            await prefill.hear(PlaceRequest)
            assert restarted.core.prefixes.index.num_blocks == 1


async def test_the_operator_s_orders_reach_the_workers_over_the_admin_channel(
    settings: Settings,
) -> None:
    async with (
        controller(settings) as server,
        as_worker(settings, "d0") as first,
        as_worker(settings, "d1") as second,
    ):
        for peer, name in ((first, "d0"), (second, "d1")):
            peer.say(worker_hello(name, Role.DECODE, host="there"))
            await peer.hear(WorkerAccepted)
        done = await give_order(settings, OrderRole(worker_id=WorkerId("d0"), role=Role.PREFILL))
        assert done == "d0 becomes prefill"
        order, _ = await first.hear(SwitchRole)
        joined, _ = await second.hear(PeerJoined)
        assert (joined.peer.worker_id, joined.peer.role) == ("d0", order.role)
        first.say(RoleSwitched(role=order.role, role_generation=order.role_generation))
        await until(lambda: ask_roles(settings), {"d0": "prefill", "d1": "decode"})
        with pytest.raises(ConfigError, match="d1 is the last ready decode worker"):
            await give_order(settings, OrderDrain(worker_id=WorkerId("d1"), is_draining=True))
        with pytest.raises(ConfigError, match="there is no worker d7; the workers are d0, d1"):
            await give_order(settings, OrderDrain(worker_id=WorkerId("d7"), is_draining=True))
        await give_order(settings, OrderRoles(control=RoleControl.AUTO))
        assert server.core.roles.control is RoleControl.AUTO


async def test_orders_outlive_the_controller_and_end_with_the_cluster(settings: Settings) -> None:
    settings = settings.model_copy(update={"roles": "auto"})
    async with as_worker(settings, "d0") as first, as_worker(settings, "d1") as second:

        async def join() -> None:
            for peer, name in ((first, "d0"), (second, "d1")):
                peer.say(worker_hello(name, Role.DECODE, host="there"))
                await peer.hear(WorkerAccepted)

        async with controller(settings):
            await join()
            await give_order(settings, OrderRoles(control=RoleControl.MANUAL))
            await give_order(settings, OrderDrain(worker_id=WorkerId("d0"), is_draining=True))
            await first.hear(SetDraining)
        async with controller(settings) as restarted:
            assert restarted.core.roles.control is RoleControl.MANUAL
            first.say(heartbeat())
            await first.hear(HelloRequested)
            await join()
            assert await first.hear(SetDraining) == (SetDraining(is_draining=True), ())
            for peer in (first, second):
                peer.say(Goodbye(reason="shut down"))
            await until(lambda: ask_roles(settings), {})
        async with controller(settings) as anew:
            assert anew.core.roles.control is RoleControl.AUTO


async def ask_roles(settings: Settings) -> dict[str, str]:
    report = await ask_status(settings, DEADLINE_SECONDS)
    return {} if report is None else {w.id: str(w.role) for w in report.workers}


async def test_the_operator_gets_no_answer_without_a_controller(settings: Settings) -> None:
    assert await ask_status(settings, 0.05) is None


def start(settings: Settings) -> subprocess.Popen[str]:
    save_settings(settings, settings.run_dir / "settings.json")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "services.controller"),
            *("--settings", str(settings.run_dir / "settings.json")),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )


async def test_the_process_ends_cleanly_at_sigterm_and_refuses_a_second_one(
    settings: Settings,
) -> None:
    process = start(settings)
    assert process.stderr is not None
    assert await ask_status(settings, DEADLINE_SECONDS) is not None
    second = start(settings)
    _, told = await asyncio.to_thread(second.communicate, timeout=DEADLINE_SECONDS)
    assert second.returncode == 2
    assert f"another controller (process {process.pid}) is running" in told
    assert await ask_status(settings, DEADLINE_SECONDS) is not None
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, DEADLINE_SECONDS) == 0
    process.stderr.close()
    left = [path for path in settings.run_dir.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    assert left == []
    events = (settings.log_dir / "controller.jsonl").read_text().splitlines()
    assert '"event": "controller_started"' in events[0]
    assert '"event": "controller_stopped"' in events[-1]
