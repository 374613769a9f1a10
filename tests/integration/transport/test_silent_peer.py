"""A cable that swallows everything: nobody is told, and what is sent next still arrives."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.ids import Epoch
from common.messages.codec import Codec
from common.messages.control import (
    ControllerToWorker,
    Goodbye,
    HeartbeatAnswered,
    WorkerToController,
)
from common.transport import sockets
from common.transport.channels import CONTROL
from common.transport.security import Keys, make_keys, split_key, with_key
from common.transport.sockets import DealerLink, Identity, RouterHub, new_context

DEADLINE_SECONDS = 10.0
Up: Codec[WorkerToController] = Codec(WorkerToController)
Down: Codec[ControllerToWorker] = Codec(ControllerToWorker)
WORKER = ("worker-0", Epoch(7))


class Cable:
    """A TCP relay. After ``swallow`` its present connections stay open and carry nothing."""

    def __init__(self, port: int) -> None:
        self.num_connections = 0
        self._target = port
        self._swallowed: set[int] = set()
        self._relays: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Relay as long as the block; yields the port."""
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for relay in self._relays:
                relay.cancel()
            await asyncio.gather(*self._relays, return_exceptions=True)

    def swallow(self) -> None:
        self._swallowed = set(range(self.num_connections + 1))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        self.num_connections += 1
        number = self.num_connections
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if number not in self._swallowed:
                    target.write(data)

        try:
            await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
        except (ConnectionError, asyncio.CancelledError):
            pass  # one end went: that of the test, or the one that gave the other up
        finally:
            for end in (writer, far_writer):
                end.transport.abort()


Ends = tuple[
    RouterHub[ControllerToWorker, WorkerToController],
    DealerLink[WorkerToController, ControllerToWorker],
    Cable,
]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "PING_MILLISECONDS", 50)
    monkeypatch.setattr(sockets, "MAX_SILENCE_MILLISECONDS", 250)


@pytest.fixture
async def ends(tmp_path: Path, _impatient: None) -> AsyncIterator[Ends]:
    make_keys(tmp_path / "keys")
    context = new_context(Keys.load(tmp_path / "keys"))
    hub = RouterHub[ControllerToWorker, WorkerToController](
        context, CONTROL, "tcp://127.0.0.1:0", Identity("controller", Epoch(1)), Down, Up
    )
    address, key = split_key(hub.endpoint)
    assert key is not None
    cable = Cable(int(address.rpartition(":")[2]))
    async with cable.serving() as port:
        endpoint = with_key(f"tcp://127.0.0.1:{port}", key)
        link = DealerLink[WorkerToController, ControllerToWorker](
            context, CONTROL, endpoint, Identity(*WORKER), Up, Down
        )
        yield hub, link, cable
        link.close()
        hub.close()
        context.destroy(linger=0)


async def test_a_connection_that_went_silent_is_made_anew(ends: Ends) -> None:
    hub, link, cable = ends
    async with asyncio.timeout(DEADLINE_SECONDS):
        link.try_send(Goodbye(reason="before"), "test")
        received = hub.received()
        assert (await anext(received)).message == Goodbye(reason="before")
        assert cable.num_connections == 1
        cable.swallow()
        link.try_send(Goodbye(reason="lost, or late"), "test")
        while cable.num_connections < 2:
            await asyncio.sleep(0.01)
        link.try_send(Goodbye(reason="after"), "test")
        while (await anext(received)).message != Goodbye(reason="after"):
            pass
        assert hub.try_send(WORKER, HeartbeatAnswered(sequence=3), "test")
        assert (await anext(link.received())).message == HeartbeatAnswered(sequence=3)


async def test_a_connection_with_nothing_to_say_is_kept(ends: Ends) -> None:
    hub, link, cable = ends
    link.try_send(Goodbye(reason="before"), "test")
    async with asyncio.timeout(DEADLINE_SECONDS):
        await anext(hub.received())
    never = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4 * sockets.MAX_SILENCE_MILLISECONDS / 1000):
            await never.wait()
    assert cable.num_connections == 1
