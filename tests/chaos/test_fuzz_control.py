"""100 000 messages of peers that were let in and are broken: no crash, no hang, nothing kept.

Controller, prefill worker, decode worker and gateway run here as they are, over real sockets, with
a fake engine. The fuzzing peers have names and epochs of their own and send what any side of any
conversation may say: as it should be, with fields of other values, with bytes in disorder, with
payloads of wrong sizes. Half-right ones register, submit, pair and reserve before they go wrong.
"""

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import msgpack
import psutil
import pytest
import structlog
import zmq

from common.config.settings import Settings
from common.ids import Epoch, GatewayId, RequestId, WorkerId, new_epoch
from common.messages import admin, control, handoff, tokens
from common.messages.admin import OrderDrain, OrderRoles, RoleControl
from common.messages.codec import Codec, Envelope
from common.messages.control import GatewayHello
from common.messages.fields import Role
from common.sampling import SamplingParams
from common.transport.sockets import Context, new_context
from services.cli.admin import give_order
from services.controller.server import ControllerServer
from services.gateway.backend import ServedModel, TokenDelta
from services.gateway.cluster import ClusterBackend
from tests.support.board import Board
from tests.support.message_builders import DIRECTIONS, an_example, members
from tests.support.running_worker import (
    LAYOUT,
    MODEL,
    VOCAB_SIZE,
    RunningWorker,
    Surroundings,
    WorkerOptions,
)
from tests.support.worker_harness import expected

pytestmark = pytest.mark.chaos

NUM_MESSAGES = 100_000
NUM_PEERS = 4
"""Fuzzing peers of each socket at a time."""
LIFE = 250
"""Messages after which a peer begins anew with another epoch: one that goes too wrong is fenced."""
BURST = 50
WAIT_SECONDS = 20.0
MAX_GROWTH_BYTES = 128 * 2**20
GREEDY = SamplingParams(seed=1, max_tokens=20, temperature=0)
PROMPT = tuple(range(100, 161))
TCP = WorkerOptions(transport="tcp", lease_seconds=1.0)
FORBIDDEN_EVENTS = ("quarantined", "step_failed", "library_log", "cannot_serve")
ILLEGAL = "is illegal in phase"
LAST_WORD = "unknown message 'LastWord "
"""Stands in the log with its sender when everything that was sent before has been looked at."""

Message = Any  # Any: the classes of the catalogue have no common type
Value = Any  # Any: of every type, that is the point

ENDPOINTS = (
    *("ipc:///nowhere", "ipc://", "ipc:///" + "x" * 200, "tcp://10.0.0.1:1", "inproc://x"),
    *("tcp://[bad:1?key=" + "0" * 64, "tcp://127.0.0.1:1?key=" + "0" * 64, "tcp://?key=0"),
)
ODD_VALUES: tuple[Value, ...] = (
    *(None, True, -1, 0, 1, 127, 2**31, 2**53, 2**64 - 1, 1e308, float("nan"), float("inf")),
    *("", "x" * 300, "prefill-0", "decode-0", "gateway-0", "r0", b"", b"\xff" * 32, [], {}),
    *([0] * 70, [[1, 2]], {"a": 1}, {1: 2}, MODEL, *ENDPOINTS),
)
EVERY_MESSAGE = tuple(
    message
    for directions in DIRECTIONS.values()
    for union in directions.values()
    for message in members(union)
)
RIGHT_ONES = {
    "control": (*members(control.WorkerToController), *members(control.GatewayToController)),
    "handoff": members(handoff.PrefillToDecode),
    "tokens": members(tokens.WorkerToGateway),
    "admin": members(admin.CliToController),
}


class EventCounter:
    """Takes the log, keeps what must not stand in it, and counts the rest."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.faults: list[str] = []
        self.last_words: set[str] = set()

    def __call__(self, _logger: object, level: str, event: structlog.typing.EventDict) -> Message:
        name = str(event["event"])
        self.events[name] += 1
        is_fault = name in FORBIDDEN_EVENTS or "exc_info" in event or level == "critical"
        reason = str(event.get("reason", ""))
        if is_fault or ILLEGAL in reason:
            self.faults.append(str(event))
        if LAST_WORD in reason:
            self.last_words.add(reason.split(LAST_WORD)[1].split(maxsplit=1)[0])
        raise structlog.DropEvent


@pytest.fixture
def logged() -> Iterator[EventCounter]:
    counter = EventCounter()
    structlog.configure(processors=[structlog.stdlib.add_log_level, counter])
    yield counter
    structlog.reset_defaults()


CODECS: dict[type, Codec[Message]] = {message: Codec(message) for message in EVERY_MESSAGE}


class Peer:
    """One incarnation of a fuzzing peer of one socket."""

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, channel: str, name: str, rng: random.Random
    ) -> None:
        self._name = name
        self._epoch = new_epoch()
        self._channel = channel
        self._rng = rng
        self._frames = {message: self._valid(message) for message in EVERY_MESSAGE}
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, f"{name}#{self._epoch:x}".encode())
        self._socket.connect(endpoint)

    def _valid(self, message: type) -> list[bytes]:
        """Return the frames of a message as an honest peer of this name would send it."""
        filled = _plausible(an_example(message), self._name, self._epoch)
        payload: tuple[bytes, ...] = ()
        if message in (control.SubmitRequest, control.PlaceRequest, handoff.Reserve):
            payload = (b"\x07\0\0\0" * filled.num_prompt_tokens,)
        elif message in (handoff.Reserved, handoff.Commit):
            payload = (b"\x01" * 24,)
        envelope = Envelope(self._name, self._epoch, 0, 1, "fuzz")
        return CODECS[message].encode(envelope, filled, payload)

    async def send(self, count: int) -> None:
        """Send so many messages, as fast as they are taken; answers are thrown away."""
        for number in range(count):
            frames = self._first() if number == 0 else self._next()
            while not self._try_send(frames):
                await asyncio.sleep(0.001)
            if number % BURST == 0:
                self._throw_answers_away()
                await asyncio.sleep(0)

    def _first(self) -> list[bytes]:
        """Introduce ourselves, perhaps with an address that is none."""
        rng = self._rng
        first = {
            "control": rng.choice((control.WorkerHello, control.GatewayHello)),
            "handoff": handoff.PairRequest,
        }.get(self._channel)
        if first is None:
            return self._next()
        frames = list(self._frames[first])
        if rng.random() < 0.5:
            header = msgpack.unpackb(frames[0], strict_map_key=False)
            body = header[7].get("peer", header[7])
            for name in ("handoff_endpoint", "tokens_endpoint"):
                if name in body:
                    body[name] = rng.choice(ENDPOINTS)
            frames[0] = msgpack.packb(header)
        return frames

    async def leave(self, logged: EventCounter) -> None:
        """Wait until all that was sent has been looked at, and go."""
        word = f"{self._name}#{self._epoch:x}"
        header = [1, self._name, self._epoch, 0, 1, "fuzz", f"LastWord {word} .", {}]
        assert self._try_send([msgpack.packb(header)]), "it is the only one left to send"
        async with asyncio.timeout(WAIT_SECONDS):
            while word not in logged.last_words:
                self._throw_answers_away()
                await asyncio.sleep(0.001)
        self._socket.close(linger=0)

    def _try_send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _throw_answers_away(self) -> None:
        try:
            while True:
                self._socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            return

    def _next(self) -> list[bytes]:
        rng = self._rng
        of_all = rng.random() < 0.2
        message = rng.choice(EVERY_MESSAGE if of_all else RIGHT_ONES[self._channel])
        if message is control.Goodbye and rng.random() < 0.95:
            message = control.SubmitRequest
        frames = list(self._frames[message])
        if kind_of_id := rng.randrange(3):
            frames[0] = frames[0].replace(b" r0", f" r{kind_of_id}".encode())
        kind = rng.random()
        if kind < 0.2:
            return frames
        if kind < 0.7:
            frames[0] = self._with_other_values(frames[0])
        elif kind < 0.85:
            frames[0] = self._in_disorder(frames[0])
        elif kind < 0.95 and len(frames) > 1:
            frames[1] = rng.randbytes(rng.choice((0, 1, 3, 4, 8, 64, 260)))
        else:
            frames += [rng.randbytes(8) for _ in range(rng.randrange(1, 5))]
            rng.shuffle(frames)
        return frames

    def _with_other_values(self, frame: bytes) -> bytes:
        rng = self._rng
        header = msgpack.unpackb(frame, strict_map_key=False)
        target = header[7]
        while (nested := [v for v in target.values() if isinstance(v, dict) and v]) and (
            rng.random() < 0.5
        ):
            target = rng.choice(nested)
        if target and rng.random() < 0.85:
            target[rng.choice(list(target))] = rng.choice(ODD_VALUES)
        else:
            header[rng.randrange(8)] = rng.choice(ODD_VALUES)
        return bytes(msgpack.packb(header))

    def _in_disorder(self, frame: bytes) -> bytes:
        rng = self._rng
        data = bytearray(frame)
        place = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = rng.randbytes(rng.randrange(1, 5))
            case _:
                data = bytearray(rng.randbytes(rng.randrange(80)))
        return bytes(data)


def _plausible(value: Value, name: str, epoch: Epoch) -> Value:
    """Return an example with the facts of this cluster and this peer, so that it is taken in."""
    if not dataclasses.is_dataclass(value):
        return value
    facts: dict[str, Value] = {
        "worker_id": name,
        "gateway_id": name,
        "epoch": epoch,
        "model_fingerprint": MODEL,
        "dtype": LAYOUT.dtype,
        "layout_fingerprint": LAYOUT.fingerprint(),
        "block_size": LAYOUT.block_size,
        "block_bytes": LAYOUT.block_bytes,
        "transports": ("tcp", "shm"),
        "num_prompt_tokens": 20,
        "max_tokens": 9,
        "num_choices": 2,
        "request_id": RequestId(f"{name} r0"),
    }
    changed = {
        field.name: facts.get(field.name, _plausible(getattr(value, field.name), name, epoch))
        for field in dataclasses.fields(value)
    }
    kind: Any = type(value)  # Any: the checker takes every dataclass for a class of classes
    return kind(**changed)


@dataclass(frozen=True, slots=True)
class Rig:
    """The honest processes."""

    controller: ControllerServer
    workers: tuple[RunningWorker, RunningWorker]
    gateway: ClusterBackend
    endpoints: dict[str, str]
    settings: Settings

    async def answer(self, request: str) -> list[int]:
        """Ask as a client would and return the tokens."""
        submission = await self.gateway.submit(RequestId(request), PROMPT, GREEDY)
        events = [event async for event in submission.events()]
        await submission.aclose()
        return [
            token.token_id
            for event in events
            if isinstance(event, TokenDelta)
            for token in event.tokens
        ]

    async def undo_orders(self) -> None:
        """Take back what an operator may order, and was: roles by hand, and workers drained."""
        await give_order(self.settings, OrderRoles(control=RoleControl.AUTO))
        for worker in self.workers:
            order = OrderDrain(worker_id=WorkerId(worker.name), is_draining=False)
            await give_order(self.settings, order)
        async with asyncio.timeout(WAIT_SECONDS):
            while not self.controller.core.readiness(monotonic())[0]:
                await asyncio.sleep(0.02)

    @property
    def names(self) -> set[str]:
        """Members that the controller knows."""
        members = self.controller.core.members
        return {key[0] for key in (*members.workers, *members.gateways)}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is going on and nothing is held but for the cache."""
        if self.controller.core.book.requests or self.names != {"prefill-0", "decode-0", "g"}:
            return False
        for worker in self.workers:
            counts = worker.blocks.counts()
            if worker.hybrid.is_busy or counts.referenced or counts.in_transfer:
                return False
        return True

    async def idle(self) -> None:
        """Wait for that, then check the books."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not self.is_idle:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            counts = [(worker.name, worker.blocks.counts()) for worker in self.workers]
            pytest.fail(f"not idle: {self.names}, {self.controller.core.book.requests}, {counts}")
        for worker in self.workers:
            worker.blocks.validate()


@asynccontextmanager
async def destroying(context: Context | zmq.Context[Any]) -> AsyncIterator[None]:
    """End a context with the block: what a failure leaves open would fail other tests."""
    try:
        yield
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def running_rig(folder: Path) -> AsyncIterator[Rig]:
    """Run a controller, a prefill and a decode worker and a gateway in this loop."""
    settings = Settings(
        run_dir=folder, log_dir=folder, heartbeat_seconds=0.1, death_seconds=6.0, lease_seconds=1.0
    )
    context = new_context()
    # The workers say that they are processes of this host that do not exist: it is another one.
    controller = ControllerServer(settings, "elsewhere")
    around = Surroundings(context, Board(), folder, settings.control_address)
    endpoints = {
        "control": settings.control_address,
        "admin": settings.admin_endpoint,
        "handoff": f"ipc://{folder}/decode-0",
        "tokens": f"ipc://{folder}/tokens",
    }
    hello = GatewayHello(
        gateway_id=GatewayId("g"),
        epoch=new_epoch(),
        pid=1,
        host="here",
        tokens_endpoint=endpoints["tokens"],
        model_fingerprint=MODEL,
        url="http://here",
    )
    model = ServedModel("fake", folder, 4096, VOCAB_SIZE, (), 0)
    gateway = ClusterBackend(
        context, hello.gateway_id, model, endpoints["control"], endpoints["tokens"], hello, 0.0
    )
    async with destroying(context), AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(controller.serve())
        prefill = RunningWorker(around, "prefill-0", Role.PREFILL, TCP)
        decode = RunningWorker(around, "decode-0", Role.DECODE, TCP)
        for worker in (prefill, decode):
            await stack.enter_async_context(worker.running())
        channels = tasks.create_task(gateway.run())
        rig = Rig(controller, (prefill, decode), gateway, endpoints, settings)
        await rig.idle()
        yield rig
        assert not serving.done(), "the controller went on"
        assert not channels.done(), "the gateway went on"
        channels.cancel()
        await stack.aclose()
        controller.stop()
        gateway.close(0.0)


async def fuzz(
    context: zmq.Context[Any], endpoint: str, channel: str, name: str, logged: EventCounter
) -> None:
    """Send one peer's share of the messages, in many lives."""
    rng = random.Random(name)
    for _ in range(NUM_MESSAGES // (4 * NUM_PEERS * LIFE)):
        peer = Peer(context, endpoint, channel, name, rng)
        await peer.send(LIFE)
        await peer.leave(logged)


async def test_fuzzed_messages_crash_nothing_hang_nothing_and_leak_nothing(
    tmp_path: Path, logged: EventCounter
) -> None:
    fuzzing: zmq.Context[Any] = zmq.Context()
    async with destroying(fuzzing), running_rig(tmp_path) as rig:
        assert await rig.answer("before") == expected(PROMPT, GREEDY)
        await rig.idle()
        rss = psutil.Process().memory_info().rss
        async with asyncio.TaskGroup() as sending:
            for channel, endpoint in rig.endpoints.items():
                for number in range(NUM_PEERS):
                    name = f"{channel}-{number}"
                    sending.create_task(fuzz(fuzzing, endpoint, channel, name, logged))
        await rig.undo_orders()
        await rig.idle()
        assert await rig.answer("after") == expected(PROMPT, GREEDY)
        await rig.idle()
        grown = psutil.Process().memory_info().rss - rss
    assert logged.faults == []
    assert grown < MAX_GROWTH_BYTES, f"{grown / 2**20:.0f} MiB are kept"
    # The peers got far enough for what they did wrong to matter.
    assert len(logged.last_words) == NUM_MESSAGES // LIFE
    for event in ("worker_joined", "gateway_joined", "reserved", "request_received"):
        assert logged.events[event] > 10, logged.events
    for event in ("handoff_protocol_error", "endpoint_unusable", "protocol_violation", "fenced"):
        assert logged.events[event], logged.events
    assert logged.events["message_refused"] > NUM_MESSAGES // 5, logged.events
