"""The gateway's side of the cluster: submits to the controller, takes tokens from workers."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import numpy as np
import structlog

from common.errors import ErrorCode, RemoteProtocolError, RequestError
from common.ids import Epoch, GatewayId, RequestId, WorkerId, new_epoch
from common.messages.codec import Codec, Envelope
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
    HelloRefused,
    HelloRequested,
    RequestFailed,
    RequestFinished,
    RequestPlaced,
    RequestQueued,
    RequestRefused,
    SubmitRequest,
)
from common.messages.tokens import StreamFailed, TokensGenerated, WorkerToGateway
from common.messages.tokens import TokenDelta as WireDelta
from common.sampling import SamplingParams
from common.transport.channels import CONTROL, TOKENS
from common.transport.hello import RefusedHello
from common.transport.sockets import Context, DealerLink, Identity, RouterHub
from services.gateway.attempts import Attempt, Attempts
from services.gateway.backend import ServedModel
from services.gateway.strays import Strays
from services.gateway.submission import POLL_SECONDS, SILENCE_SECONDS, ClusterSubmission
from services.gateway.whereabouts import Incarnation

log = structlog.get_logger()

HELLO_RETRY_SECONDS = 0.5
DELTAS_PER_TURN = 16
"""Deltas of one message after which what they woke is written."""


class ClusterBackend:
    """The cluster, reached over the control and tokens channels (see ``Backend``).

    ``run`` serves both channels; it must run in the loop in which requests are submitted.
    """

    def __init__(
        self,
        context: Context,
        gateway_id: GatewayId,
        model: ServedModel,
        control_endpoint: str,
        tokens_endpoint: str,
        hello: GatewayHello,
        request_timeout_seconds: float,
    ) -> None:
        self.model = model
        self.gateway_id = gateway_id
        self.max_resumes = 0
        """How often a request that loses its workers is placed again, to go on elsewhere."""
        self.request_timeout_seconds = request_timeout_seconds
        self._context = context
        self._control_endpoint = control_endpoint
        self._hello = hello
        self._identity = Identity(gateway_id, hello.epoch)
        self._control = self._connect()
        tokens: Codec[WorkerToGateway] = Codec(WorkerToGateway)
        self._tokens: RouterHub[WorkerToGateway, WorkerToGateway] = RouterHub(
            context, TOKENS, tokens_endpoint, self._identity, tokens, tokens
        )
        # On TCP the port is known only now.
        self._hello = replace(hello, tokens_endpoint=self._tokens.endpoint)
        self._submissions: dict[RequestId, ClusterSubmission] = {}
        self._state: ClusterState | None = None
        self._controller_epoch: Epoch | None = None
        self._epochs: dict[str, Epoch] = {}
        self._strays = Strays()
        self._heard_at = monotonic()
        self._heartbeat_seconds = HELLO_RETRY_SECONDS
        self._is_registered = False
        self._refusal = RefusedHello("gateway")
        self._is_draining = False

    def _connect(self) -> DealerLink[GatewayToController, ControllerToGateway]:
        return DealerLink(
            self._context,
            CONTROL,
            self._control_endpoint,
            self._identity,
            Codec(GatewayToController),
            Codec(ControllerToGateway),
        )

    # ---- what the HTTP half asks -----------------------------------------------------------------

    async def submit(
        self, request_id: RequestId, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> ClusterSubmission:
        """Hand a request to the cluster; raises ``RequestError`` when it is refused."""
        is_ready, reason = self.readiness()
        if not is_ready and self.controller_silence_seconds > SILENCE_SECONDS:
            raise RequestError(ErrorCode.NO_WORKER, reason, retry_after_seconds=POLL_SECONDS)
        attempts = Attempts(request_id, prompt_token_ids, params)
        submission = ClusterSubmission(self, attempts)
        self._submissions[request_id] = submission
        try:
            if self._state is None:
                submission.hold()
            elif not self.send(attempts.first):
                full = "the controller takes no messages"
                submission.refuse(
                    RequestError(ErrorCode.NO_WORKER, full, retry_after_seconds=POLL_SECONDS)
                )
            await submission.wait_taken_in()
        except BaseException:
            await submission.aclose()
            raise
        return submission

    def adopt(self, owner: ClusterSubmission, attempt: Attempt, error: RequestError) -> None:
        """Give what comes for an attempt, which goes on after an error, to its owner."""
        log.warning(
            "request_resumed",
            request_id=owner.request_id,
            resumed_request_id=attempt.request_id,
            choices=list(attempt.choices),
            num_drawn=attempt.params.num_drawn,
            num_resumes=attempt.num_resumes,
            reason=error.message,
        )
        self._submissions[attempt.request_id] = owner

    def send(self, attempt: Attempt) -> bool:
        """Hand an attempt in; False when the controller takes no messages."""
        message = SubmitRequest(
            request_id=attempt.request_id,
            params=attempt.params,
            num_prompt_tokens=len(attempt.prompt),
        )
        payload = np.asarray(attempt.prompt, dtype="<i4").tobytes()
        return self._control.try_send(message, attempt.request_id, (payload,))

    def readiness(self) -> tuple[bool, str]:
        """Whether requests can be served now, and the reason when they cannot."""
        if self._state is None:
            return False, "the controller has not answered yet"
        if self.controller_silence_seconds > max(2.0, 10 * self._heartbeat_seconds):
            silence = round(self.controller_silence_seconds, 1)
            return False, f"the controller has been silent for {silence} s"
        return self._state.is_ready, self._state.reason

    @property
    def max_request_tokens(self) -> int:
        """Tokens that one choice may have for the workers' KV pools; 0 while not known."""
        return 0 if self._state is None else self._state.max_request_tokens

    @property
    def controller_silence_seconds(self) -> float:
        """Time since the controller was last heard from."""
        return monotonic() - self._heard_at

    def cancel(self, request_id: RequestId, choice: int | None, reason: str) -> None:
        """Tell the controller that a request, or one choice of it, is no longer wanted."""
        log.info("cancelling", request_id=request_id, choice=choice, reason=reason)
        message = CancelRequest(request_id=request_id, choice=choice, reason=reason)
        if not self._control.try_send(message, request_id):
            log.error("control_queue_full", request_id=request_id)

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that has ended; what was under way for it is ignored."""
        self._submissions.pop(request_id, None)
        self._strays.note(request_id, monotonic())

    @property
    def living_workers(self) -> frozenset[Incarnation] | None:
        """The workers that live; None while the controller does not know them all."""
        if self._state is None or not self._state.has_all_workers:
            return None
        return frozenset(self._epochs.items())

    # ---- channels --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve both channels until cancelled. Raises ConfigError when the cluster refuses us."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive_tokens(), name="tokens")
            tasks.create_task(self._beat(), name="heartbeat")
            tasks.create_task(self._receive_control(), name="control")
            tasks.create_task(self._watch_deadlines(), name="deadlines")

    def drain(self) -> None:
        """Tell the controller from now on that this gateway takes no new requests."""
        self._is_draining = True

    def close(self, linger_seconds: float) -> None:
        """Say goodbye and close the sockets."""
        self._control.try_send(Goodbye(reason="shut down"), "stop")
        self._control.close(linger_seconds)
        self._tokens.close()

    async def _beat(self) -> None:
        while True:
            if self._is_registered:
                beat = GatewayHeartbeat(
                    num_streams=len(self._submissions), is_draining=self._is_draining
                )
                self._control.try_send(beat, "heartbeat")
            else:
                self._control.try_send(self._hello, "start")
            await asyncio.sleep(self._heartbeat_seconds)

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            now = monotonic()
            for submission in list(self._submissions.values()):
                submission.check_deadlines(now)

    async def _receive_control(self) -> None:
        while True:
            link = self._control
            async for received in link.received():
                self._heard_at = monotonic()
                self._note_controller(received.envelope)
                self._on_control(received.message)
                if self._control is not link:
                    break

    def _note_controller(self, envelope: Envelope) -> None:
        """Say hello to a controller that we have not heard before, whatever its first word is.

        Our requests are no concern of it. Cancels of them are, so that it has the hello first.
        """
        before, self._controller_epoch = self._controller_epoch, envelope.epoch
        if before in (None, envelope.epoch):
            return
        self._say_hello("new controller")
        told = "the controller was started anew and does not know the request"
        error = RequestError(ErrorCode.NO_WORKER, told, retry_after_seconds=POLL_SECONDS)
        for owner in self._owners():
            owner.orphan(error)

    def _say_hello(self, cause: str) -> None:
        self._is_registered = False
        self._state = None
        self._control.try_send(self._hello, cause)

    def _owners(self) -> list[ClusterSubmission]:
        return list({id(owner): owner for owner in self._submissions.values()}.values())

    def _on_control(self, message: ControllerToGateway) -> None:
        match message:
            case GatewayAccepted():
                if not self._is_registered:
                    log.info("registered")
                self._is_registered = True
                self._refusal.accepted()
                self._heartbeat_seconds = message.heartbeat_seconds
            case HelloRefused():
                self._refusal.refused(message)
            case HelloRequested():
                if message.epoch == self._hello.epoch:
                    self._be_strange()
            case Fenced():
                if message.epoch == self._hello.epoch:
                    self._begin_anew(message.message)
            case ClusterState():
                self._state = message
                self._epochs = {one.worker_id: Epoch(one.epoch) for one in message.workers}
            case (
                RequestQueued()
                | RequestPlaced()
                | RequestRefused()
                | RequestFinished()
                | RequestFailed()
            ):
                self._on_request(message)

    def _on_request(
        self,
        message: RequestQueued | RequestPlaced | RequestRefused | RequestFinished | RequestFailed,
    ) -> None:
        submission = self._submissions.get(message.request_id)
        if submission is None:
            return
        match message:
            case RequestQueued():
                submission.queued(message.request_id)
            case RequestPlaced(prefill_worker=prefill, decode_worker=decode):
                workers = self._incarnation(prefill), self._incarnation(decode)
                submission.placed(message.request_id, *workers)
            case RequestRefused(code=code, message=told, retry_after_seconds=seconds):
                error = RequestError(code, told, retry_after_seconds=seconds)
                submission.refused(message.request_id, error)
            case RequestFinished():
                submission.ended(message.request_id)
            case RequestFailed():
                self._failed(message.request_id, message.code, message.message)

    def _incarnation(self, worker_id: WorkerId) -> Incarnation | None:
        epoch = self._epochs.get(worker_id)
        return None if epoch is None else (worker_id, epoch)

    def _failed(self, request_id: RequestId, code: ErrorCode, message: str) -> None:
        submission = self._submissions.get(request_id)
        if submission is not None:
            log.warning("stream_failed", request_id=request_id, code=code, reason=message)
            submission.failed(request_id, RequestError(code, message))

    def _begin_anew(self, reason: str) -> None:
        """The controller took us for dead and cancelled our requests: come back as a new epoch."""
        log.warning("fenced", reason=reason)
        epoch = new_epoch()
        self._hello = replace(self._hello, epoch=epoch)
        self._identity.epoch = epoch
        self._control.close()
        self._control = self._connect()
        self._say_hello("fenced")
        self._cancelled_by_controller(f"the gateway was fenced: {reason}")

    def _be_strange(self) -> None:
        """The controller does not know us: it is a new one, or has long forgotten our death."""
        was_known = self._is_registered
        self._say_hello("hello requested")
        if was_known:
            self._cancelled_by_controller("the controller has forgotten the gateway")

    def _cancelled_by_controller(self, told: str) -> None:
        error = RequestError(ErrorCode.NO_WORKER, told, retry_after_seconds=POLL_SECONDS)
        for owner in self._owners():
            owner.fenced(error)

    async def _receive_tokens(self) -> None:
        async for received in self._tokens.received():
            match received.message:
                case TokensGenerated():
                    sender = received.envelope.sender, received.envelope.epoch
                    await self._take_all(received.message.deltas, sender)
                case StreamFailed():
                    failed = received.message
                    self._failed(failed.request_id, failed.code, failed.message)

    async def _take_all(self, deltas: Sequence[WireDelta], sender: Incarnation) -> None:
        """Give each stream its tokens; a burst in turns, so that the first ones leave early."""
        for number, delta in enumerate(deltas, start=1):
            submission = self._submissions.get(delta.request_id)
            if submission is None:
                self._end_stray(delta.request_id)
                continue
            try:
                submission.take(delta, sender)
            except RemoteProtocolError as error:
                log.warning("tokens_refused", request_id=delta.request_id, reason=str(error))
                submission.give_up(delta.request_id, RequestError(ErrorCode.INTERNAL, str(error)))
            if number % DELTAS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _end_stray(self, request_id: RequestId) -> None:
        """Have a decode ended that nobody listens to, once the controller would pass that on."""
        now = monotonic()
        if self._is_registered and self._strays.is_due(request_id, now):
            self._strays.note(request_id, now)
            self.cancel(request_id, None, "the gateway does not know the request")
