"""A gateway's controller and workers, played word by word by a test over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from common.errors import ErrorCode
from common.ids import Epoch, GatewayId, RequestId, WorkerId, new_epoch
from common.messages.codec import Codec
from common.messages.control import (
    CancelRequest,
    ClusterState,
    ControllerToGateway,
    Fenced,
    GatewayAccepted,
    GatewayHeartbeat,
    GatewayHello,
    GatewayToController,
    Goodbye,
    HelloRequested,
    RequestPlaced,
    RequestQueued,
    RequestRefused,
    SubmitRequest,
)
from common.messages.fields import PhaseRecord, WorkerIncarnation
from common.messages.tokens import TokenDelta, TokensGenerated, WorkerToGateway
from common.sampling import FinishReason, SampledToken, SamplingParams
from common.transport.channels import CONTROL, TOKENS
from common.transport.sockets import DealerLink, Identity, RouterHub, new_context
from common.worker.payload import unpack_ids
from services.gateway.backend import ServedModel
from services.gateway.cluster import ClusterBackend
from services.gateway.submission import ClusterSubmission
from tests.support.board import Board

GATEWAY = GatewayId("g")
MAX_RESUMES = 3
PARAMS = SamplingParams(seed=1, max_tokens=16)
READY = ClusterState(
    is_ready=True,
    reason="",
    num_prefill=1,
    num_decode=1,
    num_combined=0,
    max_request_tokens=4096,
)


class ScriptedCluster:
    """Registers the gateway, says that all is ready and places what comes by itself."""

    def __init__(self, folder: Path) -> None:
        self.context = new_context()
        self.got: list[GatewayToController] = []
        self.submitted: dict[RequestId, tuple[SubmitRequest, list[int]]] = {}
        self.refusing: list[str] = []
        """Requests that are refused instead of being placed."""
        self.queueing = False
        """Whether requests are queued instead of being placed."""
        self.ignoring = 0
        """So many requests are not answered at all."""
        self.state = READY
        """What is said of the cluster."""
        self.deaf = False
        """Whether hellos are not answered."""
        control, tokens = f"ipc://{folder}/control", f"ipc://{folder}/tokens"
        self._board = Board()
        self._placed: set[RequestId] = set()
        self._identity = Identity("controller", new_epoch())
        self._hub: RouterHub[ControllerToGateway, GatewayToController] = RouterHub(
            self.context,
            CONTROL,
            control,
            self._identity,
            Codec(ControllerToGateway),
            Codec(GatewayToController),
        )
        hello = GatewayHello(
            gateway_id=GATEWAY,
            epoch=new_epoch(),
            pid=1,
            host="here",
            tokens_endpoint=tokens,
            model_fingerprint="0123456789abcdef",
            url="http://here",
        )
        self._gateway: tuple[str, Epoch] = (GATEWAY, hello.epoch)
        model = ServedModel("fake", folder, 4096, 1000, (), 0)
        self.backend = ClusterBackend(
            self.context,
            GATEWAY,
            model,
            control,
            tokens,
            hello,
            request_timeout_seconds=0.0,
        )
        self.backend.max_resumes = MAX_RESUMES
        codec: Codec[WorkerToGateway] = Codec(WorkerToGateway)
        identity = Identity("d0", new_epoch())
        self.worker = WorkerIncarnation(worker_id=WorkerId("d0"), epoch=identity.epoch)
        self._worker = DealerLink(self.context, TOKENS, tokens, identity, codec, codec)

    async def play(self) -> None:
        """Answer until closed."""
        async for received in self._hub.received():
            match received.message:
                case GatewayHello(epoch=epoch):
                    self._gateway = (GATEWAY, Epoch(epoch))
                    if not self.deaf:
                        self.say(GatewayAccepted(heartbeat_seconds=0.05))
                        self.say(self.state)
                case GatewayHeartbeat():
                    self.say(self.state)
                case SubmitRequest(request_id=request_id) as submit:
                    prompt = unpack_ids(received.payload, submit.num_prompt_tokens, 2**31 - 1)
                    self.submitted[request_id] = submit, prompt
                    self._answer(request_id)
                case CancelRequest(request_id=request_id):
                    self._placed.discard(request_id)
                case Goodbye():
                    pass
            self.got.append(received.message)
            self._board.post()

    def _answer(self, request_id: RequestId) -> None:
        if self.ignoring:
            self.ignoring -= 1
        elif request_id in self._placed:
            self.refuse(request_id, ErrorCode.BAD_REQUEST, "this request id is in use")
        elif request_id in self.refusing:
            self.refuse(request_id, ErrorCode.NO_WORKER, "none")
        elif self.queueing:
            self.say(RequestQueued(request_id=request_id))
        else:
            self._placed.add(request_id)
            side = WorkerId("d0")
            self.say(RequestPlaced(request_id=request_id, prefill_worker=side, decode_worker=side))

    def refuse(self, request: str, code: ErrorCode, message: str) -> None:
        """Refuse a request."""
        self.say(RequestRefused(request_id=RequestId(request), code=code, message=message))

    def be_another(self) -> None:
        """Be a controller that was just started, from the next word on."""
        self._identity.epoch = new_epoch()
        self._placed.clear()

    def begin_anew(self) -> None:
        """Be a controller that was just started: the gateway is to say hello again."""
        self.be_another()
        self.say(HelloRequested(epoch=self._gateway[1]))

    def fence(self) -> None:
        """Take the gateway for dead."""
        self.say(Fenced(epoch=self._gateway[1], message="no heartbeat"))

    def say(self, message: ControllerToGateway) -> None:
        """Say something as the controller."""
        assert self._hub.try_send(self._gateway, message, "test")

    def emit(
        self,
        index: int,
        *token_ids: int,
        finish: FinishReason | None = None,
        request: str = "r",
        choice: int = 0,
        phases: tuple[PhaseRecord, ...] = (),
    ) -> None:
        """Send tokens of a request as its worker."""
        delta = TokenDelta(
            request_id=RequestId(request),
            choice=choice,
            index=index,
            tokens=tuple(SampledToken(token_id) for token_id in token_ids),
            finish_reason=finish,
            phases=phases,
        )
        assert self._worker.try_send(TokensGenerated(deltas=(delta,)), "test")

    async def submit(self, num_choices: int = 1, *, name: str = "r") -> ClusterSubmission:
        """Let the gateway submit a request; it has been taken in."""
        params = replace(PARAMS, num_choices=num_choices)
        return await self.backend.submit(RequestId(name), [1, 2], params)

    async def resubmitted(self, request: str) -> tuple[SubmitRequest, list[int]]:
        """Wait until the gateway has submitted this request; return it with its prompt."""
        name = RequestId(request)
        await self._board.wait_for(f"{request} is submitted", lambda: name in self.submitted)
        return self.submitted[name]

    def num_submits(self, request: str) -> int:
        """Return how often the gateway has submitted this request."""
        submits = (message for message in self.got if isinstance(message, SubmitRequest))
        return sum(submit.request_id == request for submit in submits)

    async def hears_submits(self, request: str, count: int) -> None:
        """Wait until the gateway has submitted this request so often."""
        await self._board.wait_for(
            f"{request} is submitted {count} times", lambda: self.num_submits(request) >= count
        )

    def num_cancels(self, request: str) -> int:
        """Return how often the gateway has said that it wants no more of this request."""
        cancels = (message for message in self.got if isinstance(message, CancelRequest))
        return sum(cancel.request_id == request for cancel in cancels)

    async def hears_cancel(self, request: str = "r") -> None:
        """Wait until the gateway wants no more of this request."""
        told = f"a cancel of {request}; got {self.got}"
        await self._board.wait_for(told, lambda: self.num_cancels(request) > 0)

    async def hears_hellos(self, count: int) -> None:
        """Wait until the gateway has said hello so often."""

        def is_told() -> bool:
            return sum(isinstance(message, GatewayHello) for message in self.got) >= count

        await self._board.wait_for(f"{count} hellos", is_told)

    async def tell(self, state: ClusterState) -> None:
        """Say from now on that the cluster is like this; the gateway has taken it."""
        await self.settle()  # it is known now
        self.state = state
        self.say(state)
        await self.settle()

    async def hears_streams(self, count: int) -> None:
        """Wait until the gateway's last heartbeat tells of so many requests."""

        def is_told() -> bool:
            beats = [m.num_streams for m in self.got if isinstance(m, GatewayHeartbeat)]
            return beats[-1:] == [count]

        await self._board.wait_for(f"{count} streams", is_told)

    async def settle(self) -> None:
        """Wait until the gateway has taken everything that the controller said so far."""
        submission = await self.backend.submit(RequestId("marker"), [1], PARAMS)
        await submission.aclose()

    def close(self) -> None:
        """Go silent for good."""
        self._hub.close()
        self._worker.close()
        self.backend.close(0.0)


@asynccontextmanager
async def scripted_cluster(folder: Path) -> AsyncIterator[ScriptedCluster]:
    """Play a cluster around a gateway's backend as long as the block."""
    cluster = ScriptedCluster(folder)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cluster.play())
            channels = tasks.create_task(cluster.backend.run())
            try:
                yield cluster
            finally:
                channels.cancel()
                cluster.close()
    finally:
        cluster.context.destroy(linger=0)
