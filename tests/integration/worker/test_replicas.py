"""Hot prefixes that the real controller has real workers copy ahead of need."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from common.config.settings import Settings
from common.errors import ErrorCode
from common.ids import GatewayId, RequestId, WorkerId, new_epoch
from common.messages.admin import OrderDrain
from common.messages.codec import Codec
from common.messages.control import GatewayAccepted, RequestFinished, SubmitRequest
from common.messages.fields import Role
from common.messages.tokens import TokensGenerated, WorkerToGateway
from common.sampling import SamplingParams
from common.transport.channels import TOKENS
from common.transport.sockets import Context, Identity, RouterHub, new_context
from common.worker.payload import pack_ids
from services.cli.admin import give_order
from services.controller.effects import CoreEvent
from services.controller.policy.prefix_heat import HOT_USES
from services.controller.server import ControllerServer
from tests.integration.controller.test_server import Peer, as_gateway
from tests.support.board import Board
from tests.support.running_worker import LAYOUT, RunningWorker, Surroundings, WorkerOptions
from tests.support.worker_harness import expected
from tests.unit.controller.cluster import gateway_hello

GREEDY = SamplingParams(seed=1, max_tokens=3, temperature=0)
NUM_BLOCKS = 10
SHARED = tuple(range(100, 100 + NUM_BLOCKS * LAYOUT.block_size))
ENOUGH = int(HOT_USES) + 1


class WatchedController(ControllerServer):
    """A controller that posts on a board whenever something has happened to it."""

    board: Board

    def _handle(self, event: CoreEvent) -> None:
        super()._handle(event)
        self.board.post()

    def num_copies(self, event: str) -> int:
        """Return how many copies ahead of need were ordered, held or failed."""
        name = "flowpath_cluster_replicas_total"
        return int(self.metrics.registry.get_sample_value(name, {"event": event}) or 0)

    async def counted(self, event: str, count: int = 1) -> None:
        await self.board.wait_for(f"{event} {count}", lambda: self.num_copies(event) == count)


class HotCluster:
    """A controller, workers d0, p0 and p1, and a gateway that asks for prompts that begin alike."""

    def __init__(self, settings: Settings, context: Context, stack: AsyncExitStack) -> None:
        self.settings = settings
        self.controller = WatchedController(settings, "elsewhere")
        self.controller.board = Board()
        self._context = context
        self._stack = stack
        self._folder = settings.run_dir
        self._tokens: dict[RequestId, dict[int, int]] = {}
        codec: Codec[WorkerToGateway] = Codec(WorkerToGateway)
        identity = Identity(GatewayId("g"), new_epoch())
        endpoint = f"ipc://{self._folder}/g"
        self.hub: RouterHub[WorkerToGateway, WorkerToGateway] = RouterHub(
            context, TOKENS, endpoint, identity, codec, codec
        )

    async def greet(self, gateway: Peer) -> None:
        self._gateway = gateway
        gateway.say(replace(gateway_hello(), tokens_endpoint=f"ipc://{self._folder}/g"))
        await gateway.hear(GatewayAccepted)

    async def take_tokens(self) -> None:
        async for received in self.hub.received():
            if isinstance(received.message, TokensGenerated):
                for delta in received.message.deltas:
                    tokens = self._tokens.setdefault(delta.request_id, {})
                    for index, token in enumerate(delta.tokens, delta.index):
                        assert tokens.setdefault(index, token.token_id) == token.token_id
            self.controller.board.post()

    async def start(self, name: str, role: Role) -> tuple[RunningWorker, AsyncExitStack]:
        """Start a worker; the stack that is returned ends it."""
        board = self.controller.board
        around = Surroundings(self._context, board, self._folder, self.settings.control_address)
        worker = RunningWorker(around, name, role, WorkerOptions())
        life = await self._stack.enter_async_context(AsyncExitStack())
        await life.enter_async_context(worker.running())

        def has_beaten() -> bool:
            record = self.controller.core.members.worker_named(name)
            return record is not None and record.load is not None

        await board.wait_for(f"{name} beats", has_beaten)
        return worker, life

    async def ask(self, number: int) -> None:
        """Ask for one more prompt that begins like the others, and check its answer."""
        prompt = (*SHARED, *range(number, number + 12))
        request_id = RequestId(f"r{number}")
        submit = SubmitRequest(request_id=request_id, params=GREEDY, num_prompt_tokens=len(prompt))
        self._gateway.say(submit, (pack_ids(prompt),))
        finished, _ = await self._gateway.hear(RequestFinished)
        assert finished == RequestFinished(request_id=request_id, was_cancelled=False)
        answer = dict(enumerate(expected(prompt, GREEDY)))
        await self.controller.board.wait_for(
            f"the tokens of {request_id}: {self._tokens}",
            lambda: self._tokens.get(request_id) == answer,
        )

    async def ask_first(self) -> None:
        """Ask once, until the controller knows that all workers have what is shared."""
        await self.ask(0)
        core = self.controller.core
        await self.controller.board.wait_for(
            "all tell of their blocks",
            lambda: all(
                core.prefixes.index.num_blocks_of(worker.key) >= NUM_BLOCKS
                for worker in core.members.workers.values()
            ),
        )


@asynccontextmanager
async def hot_cluster(folder: Path) -> AsyncIterator[HotCluster]:
    folder.chmod(0o700)
    settings = Settings(
        port=1,
        roles="manual",
        run_dir=folder,
        log_dir=folder / "log",
        heartbeat_seconds=0.02,
        death_seconds=60,
        hot_replicas=2,
    )
    context = new_context()
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        cluster = HotCluster(settings, context, stack)
        tasks.create_task(cluster.controller.serve())
        stack.callback(cluster.controller.stop)
        tasks.create_task(cluster.take_tokens())
        stack.callback(cluster.hub.close)
        await cluster.greet(await stack.enter_async_context(as_gateway(settings)))
        yield cluster
    context.destroy(linger=0)


def num_computed(worker: RunningWorker) -> int:
    """Return how many tokens a worker has computed."""
    registry = worker.hybrid.metrics.registry
    return int(registry.get_sample_value("flowpath_engine_step_tokens_sum") or 0)


def has_prefix(worker: RunningWorker) -> bool:
    return worker.blocks.match(SHARED, len(SHARED)) == len(SHARED)


async def test_a_hot_prefix_is_at_a_second_worker_before_any_request_is(tmp_path: Path) -> None:
    async with hot_cluster(tmp_path) as cluster:
        await cluster.start("d0", Role.DECODE)
        first, _ = await cluster.start("p0", Role.PREFILL)
        await cluster.ask_first()
        second, _ = await cluster.start("p1", Role.PREFILL)
        for number in range(1, ENOUGH):
            await cluster.ask(number)
        await cluster.controller.counted("held")
        assert has_prefix(second)
        assert num_computed(second) == 0
        await first.idle()
        await second.idle()
        await give_order(cluster.settings, OrderDrain(worker_id=WorkerId("p0"), is_draining=True))
        before = num_computed(first)
        await cluster.ask(50)
        assert num_computed(first) == before
        assert num_computed(second) == 12
        assert (
            cluster.controller.num_copies("ordered"),
            cluster.controller.num_copies("failed"),
        ) == (1, 0)


async def test_a_target_that_refuses_a_copy_serves_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hot_cluster(tmp_path) as cluster:
        holder, _ = await cluster.start("d0", Role.DECODE)
        first, _ = await cluster.start("p0", Role.PREFILL)
        await cluster.ask_first()
        second, _ = await cluster.start("p1", Role.PREFILL)
        with monkeypatch.context() as patch:
            refusal = (ErrorCode.NO_ROOM, "its books are being audited")
            patch.setattr(second.hybrid.availability, "why_refuse", lambda: refusal)
            for number in range(1, ENOUGH):
                await cluster.ask(number)
            await cluster.controller.counted("failed")
        assert not has_prefix(second)
        for worker in (holder, first, second):
            await worker.idle()
        await give_order(cluster.settings, OrderDrain(worker_id=WorkerId("p0"), is_draining=True))
        await cluster.ask(50)
        assert cluster.controller.num_copies("ordered") == 1


async def test_a_target_that_dies_under_a_copy_takes_nothing_along(tmp_path: Path) -> None:
    async with hot_cluster(tmp_path) as cluster:
        holder, _ = await cluster.start("d0", Role.DECODE)
        first, _ = await cluster.start("p0", Role.PREFILL)
        await cluster.ask_first()
        _, second_life = await cluster.start("p1", Role.PREFILL)
        holder.writes.hold()  # it only writes what is copied, and is the one that does
        for number in range(1, ENOUGH):
            await cluster.ask(number)
        await holder.writes.arrived(1)
        await second_life.aclose()
        third, _ = await cluster.start("p2", Role.PREFILL)  # p1 is to be told, and is not reached
        holder.writes.open()
        await cluster.controller.counted("failed")
        await cluster.ask(50)
        await cluster.controller.counted("held")
        assert has_prefix(third)
        for worker in (holder, first, third):
            await worker.idle()
