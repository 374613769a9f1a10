"""Real workers over real sockets in this process, with everything around them played by a test.

``harness`` is the way in: it plays controller and gateway, and starts workers. Every wait has a
deadline and ends as soon as a message makes it true.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from common.engine.fake_engine import expected_tokens
from common.errors import ErrorCode
from common.ids import GatewayId, RequestId, new_epoch
from common.messages.codec import Codec
from common.messages.control import (
    Cancel,
    ControllerToWorker,
    CopyPrefix,
    Heartbeat,
    HeartbeatAnswered,
    KVIndexEvents,
    MigrateDecode,
    PeerJoined,
    PeerLeft,
    PlaceDecode,
    PlaceRequest,
    RequestFinished,
    WorkerAccepted,
    WorkerHello,
    WorkerToController,
)
from common.messages.fields import PairStatus, PeerInfo, PhaseRecord, Role
from common.messages.tokens import StreamFailed, TokensGenerated, WorkerToGateway
from common.sampling import FinishReason, SamplingParams
from common.transport.channels import CONTROL, TOKENS
from common.transport.sockets import Context, Identity, RouterHub, new_context
from common.worker.payload import pack_ids
from tests.support.board import Board, HarnessError
from tests.support.running_worker import VOCAB_SIZE, RunningWorker, Surroundings, WorkerOptions

M = TypeVar("M")

HEARTBEAT_SECONDS = 0.02
QUEUED_SECONDS = 0.25
"""How long every request waits in the played controller, as it says."""
GATEWAY = GatewayId("gateway-0")


@dataclass(slots=True)
class Stream:
    """What a gateway got of one request; tokens by choice and index, so that repeats show."""

    tokens: dict[int, dict[int, int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    failure: StreamFailed | None = None
    phases: list[PhaseRecord] = field(default_factory=list)

    def token_ids(self, choice: int) -> list[int]:
        """Return a choice's tokens in order. HarnessError when one is missing."""
        got = self.tokens.get(choice, {})
        if sorted(got) != list(range(len(got))):
            raise HarnessError(f"choice {choice} has tokens {sorted(got)}")
        return [got[index] for index in range(len(got))]


class Harness:
    """The controller and the gateway, and the workers and peers of one test."""

    def __init__(self, folder: Path, context: Context, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.context = context
        self.board = Board()
        self.is_answering = True
        self.told: list[tuple[str, WorkerToController]] = []
        self.heartbeats: dict[str, list[Heartbeat]] = {}
        self.streams: dict[RequestId, Stream] = {}
        self.index: dict[str, list[tuple[KVIndexEvents, tuple[bytes, ...]]]] = {}
        self._stack = stack
        self._peers: dict[str, PeerInfo] = {}
        self._registered: set[str] = set()
        self._tokens_endpoint = f"ipc://{folder}/g"
        self._control: RouterHub[ControllerToWorker, WorkerToController] = RouterHub(
            context,
            CONTROL,
            f"ipc://{folder}/c",
            Identity("controller", new_epoch()),
            Codec(ControllerToWorker),
            Codec(WorkerToController),
        )
        codec: Codec[WorkerToGateway] = Codec(WorkerToGateway)
        self._tokens: RouterHub[WorkerToGateway, WorkerToGateway] = RouterHub(
            context, TOKENS, self._tokens_endpoint, Identity(GATEWAY, new_epoch()), codec, codec
        )

    def close(self) -> None:
        """Close both hubs."""
        self._control.close()
        self._tokens.close()

    # ---- the controller --------------------------------------------------------------------------

    async def play_controller(self) -> None:
        """Register who says hello, and note what is told."""
        async for received in self._control.received():
            sender = received.envelope.sender
            match received.message:
                case WorkerHello(peer=peer):
                    accepted = WorkerAccepted(
                        role=peer.role,
                        role_generation=1,
                        heartbeat_seconds=HEARTBEAT_SECONDS,
                        peers=tuple(self._peers.values()),
                    )
                    self._peers[sender] = peer
                    self._registered.add(sender)
                    self.order(sender, accepted)
                    for other in self._registered - {sender}:
                        self.order(other, PeerJoined(peer=peer))
                case Heartbeat():
                    self.heartbeats.setdefault(sender, []).append(received.message)
                    if self.is_answering:
                        answer = HeartbeatAnswered(sequence=received.envelope.sequence)
                        # A dead worker's heartbeats may still come.
                        self._control.try_send((sender, received.envelope.epoch), answer, "test")
                case KVIndexEvents():
                    self.index.setdefault(sender, []).append((received.message, received.payload))
                case _:
                    self.told.append((sender, received.message))
            self.board.post()

    def tell_role(self, worker: str, role: Role) -> PeerInfo:
        """Tell every other worker that this one has another role now."""
        peer = replace(self._peers[worker], role=role)
        self._peers[worker] = peer
        for other in self._registered - {worker}:
            self.order(other, PeerJoined(peer=peer))
        return peer

    def introduce(self, peer: PeerInfo) -> None:
        """Add a scripted peer, which no worker pairs with before it is told of it."""
        self._peers[peer.worker_id] = peer

    def order(
        self, worker: str, message: ControllerToWorker, payload: tuple[bytes, ...] = ()
    ) -> None:
        """Send an order to a worker."""
        peer = self._peers[worker]
        if not self._control.try_send((worker, peer.epoch), message, "test", payload):
            raise HarnessError(f"{worker} is not connected")

    def place(
        self,
        request: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        prefill: str = "prefill",
        decode: str | None = "decode",
        num_prefix_tokens: int = 0,
        num_stored_tokens: int = 0,
    ) -> None:
        """Order a prefill; ``decode`` None lets the same worker decode."""
        self.streams[RequestId(request)] = Stream()
        message = PlaceRequest(
            request_id=RequestId(request),
            gateway_id=GATEWAY,
            tokens_endpoint=self._tokens_endpoint,
            params=params,
            num_prompt_tokens=len(prompt),
            decode=None if decode is None else self._peers[decode],
            queued_seconds=QUEUED_SECONDS,
            num_prefix_tokens=num_prefix_tokens,
            num_stored_tokens=num_stored_tokens,
        )
        self.order(prefill, message, (pack_ids(prompt),))

    def place_decode(self, request: str, decode: str, *, prefill: str = "prefill") -> None:
        """Order another decode side."""
        message = PlaceDecode(request_id=RequestId(request), decode=self._peers[decode])
        self.order(prefill, message)

    def cancel(self, request: str, *workers: str, choice: int | None = None) -> None:
        """Cancel a request, or one choice of it, on workers."""
        for worker in workers:
            cancel = Cancel(request_id=RequestId(request), choice=choice, reason="test")
            self.order(worker, cancel)

    def migrate(self, request: str, source: str, target: str) -> None:
        """Order a running decode to another worker."""
        decode = self._peers[target]
        self.order(source, MigrateDecode(request_id=RequestId(request), decode=decode))

    def copy_prefix(
        self,
        request: str,
        tokens: Sequence[int],
        source: str,
        target: str,
        num_stored_tokens: int = 0,
    ) -> None:
        """Order a worker to copy a prefix to another one, and to load so much of it before."""
        message = CopyPrefix(
            request_id=RequestId(request),
            target=self._peers[target],
            num_tokens=len(tokens),
            num_stored_tokens=num_stored_tokens,
        )
        self.order(source, message, (pack_ids(tokens),))

    async def orders_taken(self, worker: str) -> None:
        """Wait until a worker has taken every order so far: they are taken one by one."""
        self.cancel("nobody's", worker)
        await self.heard(worker, RequestFinished, "nobody's")

    def bury(self, worker: str, *mourners: str) -> None:
        """Tell workers that another one died."""
        peer = self._peers[worker]
        for mourner in mourners:
            left = PeerLeft(worker_id=peer.worker_id, epoch=peer.epoch, reason="died")
            self.order(mourner, left)

    async def heard(self, worker: str, kind: type[M], request: str | None = None) -> M:
        """Wait for a worker's report on a request, or on itself, and take it."""

        def find() -> WorkerToController | None:
            for sender, message in self.told:
                about = getattr(message, "request_id", None)
                if sender == worker and isinstance(message, kind) and about == request:
                    return message
            return None

        await self.board.wait_for(
            f"{worker}: {kind.__name__} of {request}; told: {self.told}", lambda: find() is not None
        )
        message = find()
        assert isinstance(message, kind)
        self.told = [entry for entry in self.told if entry[1] is not message]
        return message

    # ---- the gateway -----------------------------------------------------------------------------

    async def play_gateway(self) -> None:
        """Take tokens."""
        async for received in self._tokens.received():
            match received.message:
                case TokensGenerated(deltas=deltas):
                    for delta in deltas:
                        stream = self.streams[delta.request_id]
                        choice = stream.tokens.setdefault(delta.choice, {})
                        for place, token in enumerate(delta.tokens, delta.index):
                            if choice.setdefault(place, token.token_id) != token.token_id:
                                raise HarnessError(f"token {place} of {delta} differs")
                        stream.phases += delta.phases
                        if delta.finish_reason is not None:
                            stream.finished[delta.choice] = delta.finish_reason
                case StreamFailed(request_id=request_id):
                    self.streams[request_id].failure = received.message
            self.board.post()

    def streams_of(self, request: str) -> Stream:
        """Expect tokens of a request that a scripted peer places."""
        return self.streams.setdefault(RequestId(request), Stream())

    async def answer(self, request: str, num_choices: int = 1) -> Stream:
        """Wait until every choice of a request has finished."""
        stream = self.streams[RequestId(request)]
        await self.board.wait_for(
            f"all choices of {request}: {stream}", lambda: len(stream.finished) == num_choices
        )
        return stream

    async def failure(self, request: str) -> ErrorCode:
        """Wait until a worker has told the gateway that a request failed."""
        stream = self.streams[RequestId(request)]
        await self.board.wait_for(f"the failure of {request}", lambda: stream.failure is not None)
        assert stream.failure is not None
        return stream.failure.code

    async def told_of_pair(
        self, prefill: str, decode: str, *, is_broken: bool = True
    ) -> PairStatus:
        """Wait until a worker's heartbeats say that a pair works, or does not, and return that."""

        def find() -> PairStatus | None:
            beats = self.heartbeats[prefill]
            found = [pair for pair in beats[-1].pairs if pair.worker_id == decode]
            is_there = bool(found) and bool(found[0].reason or found[0].transport)
            return found[0] if is_there and bool(found[0].reason) == is_broken else None

        await self.board.wait_for(f"{prefill} tells of {decode}", lambda: find() is not None)
        pair = find()
        assert pair is not None
        return pair

    # ---- workers ---------------------------------------------------------------------------------

    async def start_worker(
        self, name: str, role: Role, options: WorkerOptions | None = None
    ) -> RunningWorker:
        """Start a worker and wait until it is registered."""
        around = Surroundings(self.context, self.board, self.folder, self._control.endpoint)
        worker = RunningWorker(around, name, role, options or WorkerOptions())
        await self._stack.enter_async_context(worker.running())
        await self.board.wait_for(f"{name} beats", lambda: name in self.heartbeats)
        return worker

    async def pair(
        self, prefill: WorkerOptions | None = None, decode: WorkerOptions | None = None
    ) -> tuple[RunningWorker, RunningWorker]:
        """Start one worker of each role."""
        target = await self.start_worker("decode", Role.DECODE, decode)
        return await self.start_worker("prefill", Role.PREFILL, prefill), target


def expected(prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> list[int]:
    """Return the tokens of a choice when nothing goes wrong."""
    return expected_tokens(prompt, params, choice, VOCAB_SIZE)


@asynccontextmanager
async def harness(folder: Path) -> AsyncIterator[Harness]:
    """Play controller and gateway as long as the block; its workers end with it."""
    context = new_context()
    try:
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
            played = Harness(folder, context, stack)
            try:
                tasks.create_task(played.play_controller())
                tasks.create_task(played.play_gateway())
                async with stack:
                    yield played
            finally:
                played.close()
    finally:
        context.destroy(linger=0)
