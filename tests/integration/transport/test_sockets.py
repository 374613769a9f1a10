"""Both socket classes over real ZeroMQ, in one event loop, on ipc and inproc."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import pytest
import zmq

from common.errors import ConfigError, RemoteProtocolError
from common.ids import Epoch
from common.messages.codec import Codec, Envelope, Received
from common.messages.control import (
    ControllerToWorker,
    Goodbye,
    HeartbeatAnswered,
    WorkerToController,
)
from common.transport import sockets
from common.transport.channels import CONTROL, Channel
from common.transport.sockets import (
    MAX_IPC_PATH_BYTES,
    Context,
    DealerLink,
    Identity,
    RouterHub,
    new_context,
    routing_id,
)

DEADLINE_SECONDS = 10.0
TINY = replace(CONTROL, name="tiny", high_water_mark=4)
WORKER = ("worker-0", Epoch(7))

Up: Codec[WorkerToController] = Codec(WorkerToController)
Down: Codec[ControllerToWorker] = Codec(ControllerToWorker)
T = TypeVar("T")
Hub = RouterHub[ControllerToWorker, WorkerToController]
Link = DealerLink[WorkerToController, ControllerToWorker]


class Net:
    """Makes sockets of one context and closes what is left of them."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.open: list[Hub | Link] = []

    def hub(self, endpoint: str, channel: Channel = CONTROL) -> Hub:
        hub: Hub = RouterHub(
            self.context, channel, endpoint, Identity("controller", Epoch(1)), Down, Up
        )
        self.open.append(hub)
        return hub

    def link(
        self,
        endpoint: str,
        channel: Channel = CONTROL,
        peer: tuple[str, Epoch] = WORKER,
        outgoing: Codec[Any] = Up,  # Any: some tests send what the hub does not know
    ) -> Link:
        link: Link = DealerLink(self.context, channel, endpoint, Identity(*peer), outgoing, Down)
        self.open.append(link)
        return link

    def close(self) -> None:
        for item in self.open:
            item.close()
        self.context.destroy(linger=0)


@pytest.fixture
def new_net() -> Iterator[Callable[[], Net]]:
    made: list[Net] = []

    def make() -> Net:
        made.append(Net(new_context()))
        return made[-1]

    yield make
    for net in made:
        net.close()


@pytest.fixture
def net(new_net: Callable[[], Net]) -> Net:
    return new_net()


@pytest.fixture(params=["ipc", "inproc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else f"inproc://{tmp_path.name}"


async def next_of(stream: AsyncIterator[Received[T]]) -> Received[T]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await anext(stream)


async def collect(stream: AsyncIterator[Received[T]], count: int) -> list[Received[T]]:
    return [await next_of(stream) for _ in range(count)]


async def begin(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start work and give it turns enough to come to its wait."""
    task = asyncio.ensure_future(work)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def bye(number: int | str) -> Goodbye:
    return Goodbye(reason=str(number))


async def meet(hub: Hub, link: Link) -> AsyncIterator[Received[WorkerToController]]:
    """Let the hub hear of the link once, so that it can answer."""
    stream = hub.received()
    assert link.try_send(bye("hello"), "test")
    assert (await next_of(stream)).message == bye("hello")
    return stream


# ---- order and addressing ------------------------------------------------------------------------


async def test_messages_arrive_in_order_with_their_payload_and_envelope(
    net: Net, endpoint: str
) -> None:
    hub, link = net.hub(endpoint), net.link(endpoint)
    for number in range(500):
        assert link.try_send(bye(number), f"cause-{number}", (number.to_bytes(4, "little"),))
    received = await collect(hub.received(), 500)
    assert [item.message for item in received] == [bye(number) for number in range(500)]
    assert [int.from_bytes(item.payload[0], "little") for item in received] == list(range(500))
    assert [item.envelope.sequence for item in received] == list(range(1, 501))
    assert received[3].envelope == Envelope("worker-0", Epoch(7), 0, 4, "cause-3")


async def test_answers_reach_the_peer_they_are_for_in_order(net: Net, endpoint: str) -> None:
    hub = net.hub(endpoint)
    peers = [(f"worker-{number}", Epoch(number)) for number in range(3)]
    links = [net.link(endpoint, peer=peer) for peer in peers]
    for link in links:
        link.try_send(bye("hello"), "test")
    await collect(hub.received(), 3)
    for number, (place, peer) in itertools.product(range(100), enumerate(peers)):
        assert hub.try_send(peer, HeartbeatAnswered(sequence=number * 10 + place), "test")
    for place, link in enumerate(links):
        answers = [item.message for item in await collect(link.received(), 100)]
        assert answers == [HeartbeatAnswered(sequence=n * 10 + place) for n in range(100)]


async def test_nothing_is_sent_to_a_peer_that_never_spoke(net: Net, endpoint: str) -> None:
    hub = net.hub(endpoint)
    net.link(endpoint)
    assert not hub.try_send(("stranger", Epoch(1)), HeartbeatAnswered(sequence=1), "test")


async def test_nothing_is_sent_to_another_epoch_of_a_connected_peer(
    net: Net, endpoint: str
) -> None:
    hub, link = net.hub(endpoint), net.link(endpoint)
    await meet(hub, link)
    assert not hub.try_send(("worker-0", Epoch(8)), HeartbeatAnswered(sequence=1), "test")
    assert hub.try_send(WORKER, HeartbeatAnswered(sequence=2), "test")
    assert (await next_of(link.received())).message == HeartbeatAnswered(sequence=2)


async def test_a_link_may_be_made_before_its_binder(net: Net, endpoint: str) -> None:
    link = net.link(endpoint)
    assert link.try_send(bye(1), "test")
    hub = net.hub(endpoint)
    assert (await next_of(hub.received())).message == bye(1)


# ---- what a peer does wrong ----------------------------------------------------------------------


async def test_a_peer_that_claims_another_sender_is_refused_and_the_stream_goes_on(
    net: Net, endpoint: str
) -> None:
    hub, link, honest = (
        net.hub(endpoint),
        net.link(endpoint),
        net.link(endpoint, peer=("w", Epoch(3))),
    )
    refused: list[tuple[bytes, str]] = []
    stream = hub.received(lambda peer, error: refused.append((peer, str(error))))
    for sender, epoch in (("worker-1", 7), ("worker-0", 8)):
        forged = Envelope(sender, Epoch(epoch), 0, 1, "test")
        link._wire.try_send(Up.encode(forged, bye("forged")))
    link.try_send(bye("own name"), "test")
    assert (await next_of(stream)).message == bye("own name")
    honest.try_send(bye("honest"), "test")
    assert (await next_of(stream)).envelope.sender == "w"
    assert [peer for peer, _ in refused] == [routing_id(*WORKER)] * 2
    assert "worker-1#7" in refused[0][1]
    assert "worker-0#8" in refused[1][1]


async def test_a_malformed_message_is_dropped_and_reported_and_the_stream_goes_on(
    net: Net, endpoint: str
) -> None:
    hub, link = net.hub(endpoint), net.link(endpoint)
    refused: list[bytes] = []

    def on_refused(peer: bytes, error: RemoteProtocolError) -> None:
        refused.append(peer)

    stream = hub.received(on_refused)
    for frames in (
        [b"\xc1"],
        [b""],
        [b"x"] * 9,
        Down.encode(Envelope("worker-0", Epoch(7), 0, 1, ""), HeartbeatAnswered(sequence=1)),
    ):
        assert link._wire.try_send(frames)
    link.try_send(bye("well"), "test")
    assert (await next_of(stream)).message == bye("well")
    assert refused == [routing_id(*WORKER)] * 4

    answers = link.received()
    assert hub._wire.try_send([routing_id(*WORKER), b"\xc1 not a header"])
    assert hub.try_send(WORKER, HeartbeatAnswered(sequence=5), "test")
    assert (await next_of(answers)).message == HeartbeatAnswered(sequence=5)


async def test_a_message_over_the_channels_size_never_arrives(net: Net, tmp_path: Path) -> None:
    small = replace(CONTROL, max_message_bytes=1000)
    hub = net.hub(f"ipc://{tmp_path}/s", small)
    link = net.link(f"ipc://{tmp_path}/s", small)
    stream = await meet(hub, link)
    assert link.try_send(bye("big"), "test", (b"x" * 2000,))
    other = net.link(f"ipc://{tmp_path}/s", small, peer=("w", Epoch(3)))
    assert other.try_send(bye("small"), "test")
    assert (await next_of(stream)).message == bye("small")


# ---- bounds --------------------------------------------------------------------------------------


async def test_a_full_queue_is_an_answer_and_not_a_wait(net: Net, endpoint: str) -> None:
    """Nobody binds (ipc), or nobody reads (inproc): only the high-water marks bound the queue."""
    if endpoint.startswith("inproc"):
        net.hub(endpoint, TINY)
    link = net.link(endpoint, TINY)
    started = monotonic()
    outcomes = [link.try_send(bye(number), "test") for number in range(50)]
    assert monotonic() - started < 2.0
    num_queued = outcomes.index(False)
    assert TINY.high_water_mark <= num_queued <= 3 * TINY.high_water_mark
    assert outcomes == [True] * num_queued + [False] * (50 - num_queued)


async def test_what_was_queued_before_a_refusal_arrives_and_nothing_else(
    net: Net, endpoint: str
) -> None:
    hub, link = net.hub(endpoint, TINY), net.link(endpoint, TINY)
    stream = await meet(hub, link)
    queued = [number for number in range(5000) if link.try_send(bye(number), "test")]
    assert len(queued) < 5000
    received = await collect(stream, len(queued))
    assert [item.message for item in received] == [bye(number) for number in queued]
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not link.try_send(bye("room again"), "test"):
            await asyncio.sleep(0)
    assert (await next_of(stream)).message == bye("room again")


async def test_a_hub_with_a_full_queue_refuses_for_that_peer_alone(net: Net, endpoint: str) -> None:
    hub, deaf, keen = (
        net.hub(endpoint, TINY),
        net.link(endpoint, TINY),
        net.link(endpoint, TINY, ("keen", Epoch(1))),
    )
    await meet(hub, deaf)
    await meet(hub, keen)
    outcomes = [
        hub.try_send(WORKER, HeartbeatAnswered(sequence=n), "test", (bytes(200_000),))
        for n in range(100)
    ]
    assert False in outcomes
    assert hub.try_send(("keen", Epoch(1)), HeartbeatAnswered(sequence=1), "test")
    assert (await next_of(keen.received())).message == HeartbeatAnswered(sequence=1)


# ---- wake-ups ------------------------------------------------------------------------------------


async def test_a_message_after_a_burst_and_a_pause_is_noticed_by_its_event(
    net: Net, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the second poll out of the way, only the descriptor's events wake the receivers."""
    monkeypatch.setattr(sockets, "REPOLL_SECONDS", 1e6)
    hub, link = net.hub(endpoint), net.link(endpoint)
    down = link.received()
    up = await meet(hub, link)
    for number in range(20):
        # Sends on both sides swallow edges that announced receives.
        for place in range(sockets.MAX_BURST + 7):
            link.try_send(bye(place), "burst")
            hub.try_send(WORKER, HeartbeatAnswered(sequence=place), "burst")
        await collect(up, sockets.MAX_BURST + 7)
        await collect(down, sockets.MAX_BURST + 7)
        waiting = await begin(next_of(up))
        started = monotonic()
        link.try_send(bye(f"after {number}"), "idle")
        assert (await waiting).message == bye(f"after {number}")
        hub.try_send(WORKER, HeartbeatAnswered(sequence=number), "idle")
        assert (await next_of(down)).message == HeartbeatAnswered(sequence=number)
        assert monotonic() - started < DEADLINE_SECONDS / 2


async def test_a_refused_send_does_not_swallow_the_news_of_a_message(
    net: Net, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "REPOLL_SECONDS", 1e6)
    hub, link = net.hub(endpoint), net.link(endpoint)
    stream = await meet(hub, link)
    for number in range(30):
        waiting = await begin(next_of(stream))
        link.try_send(bye(number), "test")
        for _ in range(200):
            # The hub's sends fail, and look into the socket's mailbox while they do.
            assert not hub.try_send(("nobody", Epoch(1)), HeartbeatAnswered(sequence=1), "test")
        assert (await waiting).message == bye(number)


# ---- ends ----------------------------------------------------------------------------------------


async def test_closing_ends_the_stream_of_the_one_who_waits(net: Net, endpoint: str) -> None:
    hub, link = net.hub(endpoint), net.link(endpoint)

    async def count(stream: AsyncIterator[Received[Any]]) -> int:
        return len([item async for item in stream])

    waiting = [await begin(count(stream)) for stream in (hub.received(), link.received())]
    hub.close()
    link.close()
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await asyncio.gather(*waiting) == [0, 0]
    assert not link.try_send(bye(1), "test")
    assert not hub.try_send(WORKER, HeartbeatAnswered(sequence=1), "test")
    hub.close()
    link.close()


async def test_sending_to_a_peer_that_closed_is_refused_soon(net: Net, endpoint: str) -> None:
    hub, link = net.hub(endpoint), net.link(endpoint)
    await meet(hub, link)
    link.close()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while hub.try_send(WORKER, HeartbeatAnswered(sequence=1), "test"):
            await asyncio.sleep(0)


async def test_what_was_queued_before_an_orderly_close_still_arrives(
    net: Net, endpoint: str
) -> None:
    hub, link = net.hub(endpoint), net.link(endpoint)
    stream = await meet(hub, link)
    for number in range(200):
        assert link.try_send(bye(number), "test")
    link.close(linger_seconds=DEADLINE_SECONDS)
    received = await collect(stream, 200)
    assert received[-1].message == bye(199)


async def test_a_new_incarnation_of_a_peer_is_heard_beside_its_dead_one(
    net: Net, endpoint: str
) -> None:
    hub, old = net.hub(endpoint), net.link(endpoint)
    stream = await meet(hub, old)
    new = net.link(endpoint, peer=("worker-0", Epoch(8)))
    new.try_send(bye("new"), "test")
    assert (await next_of(stream)).envelope.epoch == 8
    assert hub.try_send(("worker-0", Epoch(8)), HeartbeatAnswered(sequence=8), "test")
    assert (await next_of(new.received())).message == HeartbeatAnswered(sequence=8)


async def test_a_link_finds_a_restarted_binder_on_the_same_path(
    new_net: Callable[[], Net], tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    first, second = new_net(), new_net()
    hub, link = first.hub(endpoint), second.link(endpoint)
    await meet(hub, link)
    hub.close()
    first.context.destroy(linger=0)
    third = new_net()
    stream = third.hub(endpoint).received()
    assert link.try_send(bye("again"), "test")
    assert (await next_of(stream)).message == bye("again")


async def test_a_binder_takes_the_place_of_a_dead_ones_socket_file(
    net: Net, tmp_path: Path
) -> None:
    left_behind = tmp_path / "s"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as dead:
        dead.bind(f"ipc://{tmp_path}/other")
        (tmp_path / "other").rename(left_behind)
    assert left_behind.is_socket()
    hub, link = net.hub(f"ipc://{left_behind}"), net.link(f"ipc://{left_behind}")
    await meet(hub, link)


async def test_the_socket_file_is_gone_once_the_hub_is_closed(net: Net, tmp_path: Path) -> None:
    hub = net.hub(f"ipc://{tmp_path}/s")
    assert (tmp_path / "s").is_socket()
    hub.close()
    assert not (tmp_path / "s").exists()


async def test_a_folder_that_is_not_there_is_a_configuration_error(
    net: Net, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot bind control"):
        net.hub(f"ipc://{tmp_path}/no/such/folder")


async def test_a_path_that_is_too_long_is_refused_by_both_sides(net: Net) -> None:
    endpoint = "ipc:///" + "x" * MAX_IPC_PATH_BYTES
    with pytest.raises(ConfigError, match="FLOWPATH_RUN_DIR"):
        net.hub(endpoint)
    with pytest.raises(ConfigError, match="FLOWPATH_RUN_DIR"):
        net.link(endpoint)


async def test_a_context_closes_what_an_error_left_open_before_its_descriptors_go(
    tmp_path: Path,
) -> None:
    context = new_context()
    identity = Identity("controller", Epoch(1))
    hub: Hub = RouterHub(context, CONTROL, f"ipc://{tmp_path}/s", identity, Down, Up)
    receiving = hub.received()
    context.destroy(linger=0)
    with pytest.raises(StopAsyncIteration):
        await anext(receiving)
