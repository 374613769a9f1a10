"""Token links to gateways over real sockets: how long one that nobody uses is kept."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.errors import ErrorCode
from common.ids import GatewayId, RequestId, new_epoch
from common.messages.codec import Codec
from common.messages.tokens import StreamFailed, TokenDelta, TokensGenerated, WorkerToGateway
from common.sampling import SampledToken
from common.transport.channels import TOKENS
from common.transport.sockets import Context, DealerLink, Identity, RouterHub, new_context
from common.worker.emitter import IDLE_SECONDS, MAX_ENDPOINTS_KEPT, TokenEmitter

CODEC: Codec[WorkerToGateway] = Codec(WorkerToGateway)
G, OTHER = GatewayId("g"), GatewayId("other")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def context() -> Iterator[Context]:
    context = new_context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def emitter(context: Context, clock: Clock) -> AsyncIterator[TokenEmitter]:
    identity = Identity("d0", new_epoch())
    emitter = TokenEmitter(
        lambda endpoint: DealerLink.to_peer(context, TOKENS, endpoint, identity, CODEC, CODEC),
        clock,
    )
    yield emitter
    emitter.close(0.0)


@asynccontextmanager
async def gateway(context: Context, endpoint: str) -> AsyncIterator[asyncio.Queue[WorkerToGateway]]:
    """Listen as a gateway, and yield what comes."""
    heard: asyncio.Queue[WorkerToGateway] = asyncio.Queue()
    hub: RouterHub[WorkerToGateway, WorkerToGateway] = RouterHub(
        context, TOKENS, endpoint, Identity("g", new_epoch()), CODEC, CODEC
    )

    async def listen() -> None:
        async for received in hub.received():
            heard.put_nowait(received.message)

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(10):
        tasks.create_task(listen())
        try:
            yield heard
        finally:
            hub.close()


def delta(index: int) -> TokenDelta:
    return TokenDelta(
        request_id=RequestId("r"), choice=0, index=index, tokens=(SampledToken(token_id=index),)
    )


def endpoint(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}"


async def test_links_to_gateways_that_left_are_closed_when_another_is_opened(
    tmp_path: Path, emitter: TokenEmitter, clock: Clock
) -> None:
    for number in range(20):
        emitter.open(GatewayId(f"gone-{number}"), endpoint(tmp_path, f"gone-{number}"))
    assert emitter.num_links == 20
    clock.now += IDLE_SECONDS
    emitter.open(G, endpoint(tmp_path, "g"))
    assert emitter.num_links == 1


async def test_a_link_in_use_is_kept(
    tmp_path: Path, context: Context, emitter: TokenEmitter, clock: Clock
) -> None:
    async with gateway(context, endpoint(tmp_path, "g")) as heard:
        emitter.open(G, endpoint(tmp_path, "g"))
        for index in range(3):
            clock.now += 0.9 * IDLE_SECONDS
            emitter.add(G, delta(index))
            assert emitter.flush() == []
            emitter.open(OTHER, endpoint(tmp_path, "other"))
            assert emitter.num_links == 2
            assert await heard.get() == TokensGenerated(deltas=(delta(index),))


async def test_a_request_that_waited_longer_than_its_link_was_kept_loses_nothing(
    tmp_path: Path, context: Context, emitter: TokenEmitter, clock: Clock
) -> None:
    async with gateway(context, endpoint(tmp_path, "g")) as heard:
        emitter.open(G, endpoint(tmp_path, "g"))
        for index in range(2):
            clock.now += 2 * IDLE_SECONDS
            emitter.open(OTHER, endpoint(tmp_path, "other"))
            assert emitter.num_links == 1
            emitter.add(G, delta(index))
            assert emitter.flush() == []
            assert emitter.num_links == 2
            assert await heard.get() == TokensGenerated(deltas=(delta(index),))


async def test_no_more_endpoints_than_that_are_remembered(
    tmp_path: Path, emitter: TokenEmitter, clock: Clock
) -> None:
    for number in range(MAX_ENDPOINTS_KEPT + 2):
        emitter.open(GatewayId(f"gone-{number}"), endpoint(tmp_path, f"gone-{number}"))
        clock.now += IDLE_SECONDS
    emitter.add(GatewayId("gone-0"), delta(0))
    assert emitter.flush() == ["r"]
    emitter.fail(GatewayId("gone-0"), RequestId("r"), ErrorCode.INTERNAL, "told to nobody")
    assert emitter.num_links == 1


async def test_a_failure_reaches_a_gateway_whose_link_was_closed(
    tmp_path: Path, context: Context, emitter: TokenEmitter, clock: Clock
) -> None:
    async with gateway(context, endpoint(tmp_path, "g")) as heard:
        emitter.open(G, endpoint(tmp_path, "g"))
        clock.now += IDLE_SECONDS
        emitter.open(OTHER, endpoint(tmp_path, "other"))
        emitter.fail(G, RequestId("r"), ErrorCode.INTERNAL, "broke")
        assert isinstance(await heard.get(), StreamFailed)
