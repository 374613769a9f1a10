"""The worker: joins scheduler, engine, both halves of the handoff and the control channel.

Everything runs in one event loop, except three kinds of work in threads of their own, with the
GIL released: engine steps, block writes and checksums (one copy thread), and mapping a peer's
pool. Decisions are the scheduler's and the machines'; here their effects are carried out, in
order, before the next event is looked at.
"""

import asyncio
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import suppress
from time import monotonic
from typing import assert_never

import structlog

from common.engine.interface import Engine
from common.errors import ErrorCode, InvariantViolationError, RemoteProtocolError
from common.handoff.events import HandedOver, Outcome, PrefillFinished
from common.ids import RequestId, WorkerId
from common.kv.blocks import BlockManager
from common.messages.control import (
    Cancel,
    CopyPrefix,
    DecodeRefused,
    DecodeStarted,
    Directive,
    Heartbeat,
    KVIndexRequested,
    MigrateDecode,
    PeerJoined,
    PeerLeft,
    PlaceDecode,
    PlacementUnknown,
    PlaceRequest,
    RequestFailed,
    RequestFinished,
    SetDraining,
    SwitchRole,
    WorkerAccepted,
)
from common.messages.fields import Mode, PeerInfo, Role, WorkerRates
from common.messages.handoff import AbortReason
from common.scheduler.effects import (
    CopyBlocks,
    DecodeBegan,
    Effect,
    EmitTokens,
    Preempted,
    PrefillStarted,
    PromptComputed,
    PromptProgressed,
    RequestBroke,
    RequestEnded,
    StopHandoff,
)
from common.scheduler.local import LocalScheduler
from common.scheduler.request import NewRequest, RequestPhase
from common.telemetry.metrics import WorkerMetrics
from common.transfer.backend import PeerLink
from common.worker.consequences import EndCancelled, EndFailed, PlaceElsewhere, consequence_of
from common.worker.control import ControlLink, Order
from common.worker.emitter import TokenEmitter
from common.worker.inbound import InboundHandoffs, TakenOver
from common.worker.measures import StepClock, note_handoff_end, take_heartbeat
from common.worker.outbound import OutboundHandoffs, TransferTotals
from common.worker.payload import unpack_prompt
from common.worker.route import Route
from common.worker.stepping import StepPipeline

log = structlog.get_logger()

TICK_SECONDS = 0.05
REST_SECONDS = 0.5
RENEWALS_PER_LEASE = 4


class HybridWorker:
    """One engine's worker, joined to its channels by ``attach``."""

    def __init__(
        self,
        worker_id: WorkerId,
        engine: Engine,
        engine_thread: Executor,
        blocks: BlockManager,
        scheduler: LocalScheduler,
        own_pool: PeerLink,
        lease_seconds: float,
    ) -> None:
        self._id = worker_id
        self._steps = StepPipeline(engine, engine_thread)
        self._blocks = blocks
        self._scheduler = scheduler
        self._own_pool = own_pool
        self._lease_seconds = lease_seconds
        self.metrics = WorkerMetrics()
        self._routes: dict[RequestId, Route] = {}
        self._wake = asyncio.Event()
        self._role: Role | None = None
        self._is_draining = False
        self._is_quarantined = False

    def attach(
        self,
        control: ControlLink,
        emitter: TokenEmitter,
        inbound: InboundHandoffs,
        outbound: OutboundHandoffs,
    ) -> None:
        """Join the worker to its channels; they call back into it, so they come second."""
        self._control = control
        self._emitter = emitter
        self._inbound = inbound
        self._outbound = outbound

    # ---- orders of the controller ----------------------------------------------------------------

    def on_order(self, order: Order, payload: tuple[bytes, ...]) -> None:
        """Carry out one order."""
        match order:
            case WorkerAccepted():
                self._role = order.role
                for request_id, route in self._routes.items():
                    if route.refused is not None:  # told to a controller that is gone, perhaps
                        self._control.send(route.refused, request_id)
                for peer in order.peers:
                    self._pair(peer)
            case PeerJoined():
                self._pair(order.peer)
            case PeerLeft():
                reason = f"left: {order.reason}"
                self._outbound.peer_left(order.worker_id, order.epoch, reason)
                self._inbound.peer_left(order.worker_id, order.epoch, reason)
            case PlaceRequest():
                self._place(order, payload)
            case PlaceDecode():
                self._place_decode(order)
            case PlacementUnknown():
                self._placement_unknown(order.request_id)
            case Cancel():
                self._cancel(order)
            case (
                SwitchRole()
                | Directive()
                | SetDraining()
                | MigrateDecode()
                | CopyPrefix()
                | KVIndexRequested()
            ):
                log.warning("order_ignored", order=type(order).__name__)
            case _:
                assert_never(order)
        self._wake.set()

    def _pair(self, peer: PeerInfo) -> None:
        if self._role is Role.PREFILL and peer.role is Role.DECODE:
            self._outbound.pair(peer)

    def _place(self, order: PlaceRequest, payload: tuple[bytes, ...]) -> None:
        request_id = order.request_id
        if request_id in self._routes:
            log.info("repeat_ignored", request_id=request_id)
            return
        refusal = self.why_refuse()
        if self._scheduler.find(request_id) is not None:
            # We decode it for another worker, or its last step here has not ended yet.
            refusal = ErrorCode.INTERNAL, f"{self._id} still has a request of this id"
        if refusal is not None:
            self.metrics.refusals.labels(refusal[0]).inc()
            self._report_failed(request_id, *refusal)
            return
        try:
            prompt = unpack_prompt(payload, order.num_prompt_tokens, order.params.num_drawn)
        except RemoteProtocolError as error:
            self._report_failed(request_id, ErrorCode.INTERNAL, str(error))
            return
        # A request of one token ends with its prefill and needs no decode side.
        is_remote = order.decode is not None and order.params.num_left > 1
        self._routes[request_id] = Route(order.decode, monotonic())
        self._emitter.open(order.gateway_id, order.tokens_endpoint)
        log.info(
            "request_received",
            request_id=request_id,
            num_prompt_tokens=len(prompt),
            decode_worker=order.decode.worker_id if order.decode else self._id,
        )
        new = NewRequest(request_id, order.gateway_id, order.tokens_endpoint, order.params, prompt)
        self.execute(self._scheduler.add(new, is_remote=is_remote))

    def _place_decode(self, order: PlaceDecode) -> None:
        route = self._routes.get(order.request_id)
        request = self._scheduler.find(order.request_id)
        if route is None or request is None or request.is_handoff_open:
            log.info("order_ignored", request_id=order.request_id, order="PlaceDecode")
            return
        route.decode = order.decode
        route.refused = None
        if order.decode.worker_id == self._id:
            self.execute(self._scheduler.place_locally(order.request_id))
        elif request.is_remote and request.phase in (
            RequestPhase.PREFILLING,
            RequestPhase.SENDING,
        ):
            self._begin_handoff(order.request_id)

    def _placement_unknown(self, request_id: RequestId) -> None:
        route = self._routes.get(request_id)
        if route is not None and route.refused is not None:
            message = "the controller was started anew while the request waited for a decode worker"
            self._break(request_id, ErrorCode.NO_WORKER, message)

    def _cancel(self, order: Cancel) -> None:
        log.info(
            "cancel_received",
            request_id=order.request_id,
            choice=order.choice,
            reason=order.reason,
        )
        effects = self._scheduler.cancel(order.request_id, order.choice)
        if effects is not None:
            self.execute(effects)
        elif not self._inbound.cancel(order.request_id, order.choice) and order.choice is None:
            # Nothing of it is here (any more): the controller need not wait for us.
            finished = RequestFinished(request_id=order.request_id, was_cancelled=True)
            self._control.send(finished, order.request_id)

    # ---- effects ---------------------------------------------------------------------------------

    def execute(self, effects: Iterable[Effect]) -> None:
        """Carry effects out in order, then send the tokens they hold."""
        for effect in effects:
            self._execute_one(effect)
        for request_id in self._emitter.flush():
            message = "the gateway does not take tokens"
            self._break(request_id, ErrorCode.INTERNAL, message)

    def _execute_one(self, effect: Effect) -> None:  # one case per effect
        match effect:
            case EmitTokens(gateway_id, delta):
                self._emitter.add(gateway_id, delta)
            case PrefillStarted(request_id, num_cached_tokens):
                log.info(
                    "prefill_started", request_id=request_id, num_cached_tokens=num_cached_tokens
                )
                self._prefill_started(request_id, num_cached_tokens)
            case PromptProgressed(request_id, num_blocks):
                self._outbound.progress(request_id, num_blocks)
            case PromptComputed(request_id):
                self._prompt_computed(effect)
            case DecodeBegan(request_id):
                self._control.send(DecodeStarted(request_id=request_id), request_id)
            case CopyBlocks(pairs):
                self._own_pool.write([src for src, _ in pairs], [dst for _, dst in pairs])
            case StopHandoff(request_id, reason):
                self._outbound.stop(request_id, reason)
            case Preempted(request_id, choice, num_tokens):
                self.metrics.preemptions.inc()
                log.info("preempted", request_id=request_id, choice=choice, num_tokens=num_tokens)
            case RequestEnded(request_id, was_cancelled):
                self._routes.pop(request_id, None)
                log.info("request_ended", request_id=request_id, was_cancelled=was_cancelled)
                finished = RequestFinished(request_id=request_id, was_cancelled=was_cancelled)
                self._control.send(finished, request_id)
            case RequestBroke(request_id, gateway_id, code, message):
                self._routes.pop(request_id, None)
                log.error("request_failed", request_id=request_id, code=code, reason=message)
                self.metrics.failures.labels(code).inc()
                self._emitter.fail(gateway_id, request_id, code, message)
                self._report_failed(request_id, code, message)
            case _:
                assert_never(effect)

    def _report_failed(self, request_id: RequestId, code: ErrorCode, message: str) -> None:
        failed = RequestFailed(request_id=request_id, code=code, message=message[:4096])
        self._control.send(failed, request_id)

    def _break(self, request_id: RequestId, code: ErrorCode, message: str) -> None:
        self.execute(self._scheduler.fail(request_id, code, message))

    def _prefill_started(self, request_id: RequestId, num_cached_tokens: int) -> None:
        request = self._scheduler.find(request_id)
        if request is None:
            return
        self.metrics.prefix_queries.inc(len(request.new.prompt))
        self.metrics.prefix_hits.inc(num_cached_tokens)
        route = self._routes.get(request_id)
        if route is not None:
            self.metrics.queue_seconds.observe(monotonic() - route.received_at)
        if request.is_remote:
            self._begin_handoff(request_id)

    # ---- handoffs --------------------------------------------------------------------------------

    def _begin_handoff(self, request_id: RequestId) -> None:
        route = self._routes[request_id]
        request = self._scheduler.find(request_id)
        assert request is not None, "its prefill has just started or is whole"
        assert route.decode is not None, "a remote request has a decode side"
        self._scheduler.open_handoff(request_id)
        self._outbound.begin(request, route.decode)
        num_blocks = request.lead.num_computed // self._scheduler.block_size
        if num_blocks:
            self._outbound.progress(request_id, num_blocks)
        if route.computed is not None:
            self._finish_handoff(request_id, route)

    def _prompt_computed(self, computed: PromptComputed) -> None:
        route = self._routes[computed.request_id]
        route.computed = computed
        route.computed_at = monotonic()
        log.info("prefill_finished", request_id=computed.request_id)
        request = self._scheduler.find(computed.request_id)
        if request is not None and request.is_handoff_open:
            self._finish_handoff(computed.request_id, route)

    def _finish_handoff(self, request_id: RequestId, route: Route) -> None:
        computed = route.computed
        assert computed is not None, "called when the prompt is computed"
        finished = PrefillFinished(
            computed.first_tokens, computed.num_cached_tokens, route.computed_at
        )
        self._outbound.finish(request_id, finished)

    def on_handoff_ended(
        self,
        request_id: RequestId,
        decode_worker: WorkerId,
        outcome: Outcome,
        totals: TransferTotals,
    ) -> None:
        """Draw the consequence of a handoff that ended on the prefill side."""
        was_accepted = isinstance(outcome, HandedOver)
        note_handoff_end(self.metrics, outcome, totals)
        self.execute(self._scheduler.close_handoff(request_id, was_accepted=was_accepted))
        request = self._scheduler.find(request_id)
        if was_accepted:
            self._routes.pop(request_id, None)
        elif request is not None and request.phase is not RequestPhase.ENDED:
            self._after_failed_handoff(request_id, decode_worker, outcome)
        self._wake.set()

    def _after_failed_handoff(
        self, request_id: RequestId, decode_worker: WorkerId, outcome: Outcome
    ) -> None:
        match consequence_of(outcome, decode_worker):
            case PlaceElsewhere(code, message):
                refused = DecodeRefused(
                    request_id=request_id,
                    decode_worker=decode_worker,
                    code=code,
                    message=message[:4096],
                )
                self._routes[request_id].refused = refused
                self._control.send(refused, request_id)
            case EndCancelled():
                self.execute(self._scheduler.cancel(request_id, None) or [])
            case EndFailed(code, message):
                self._break(request_id, code, message)

    def on_taken_over(self, taken: TakenOver) -> None:
        """Decode a request whose KV arrived and is right."""
        request_id = taken.new.request_id
        self.metrics.handoff_seconds.observe(taken.seconds_since_prefill)
        if not taken.first_tokens:
            # Every choice was cancelled on its way; the request is ours all the same.
            self._control.send(DecodeStarted(request_id=request_id), request_id)
            self._blocks.release(taken.owner)
            self.on_dropped(request_id)
            return
        self._emitter.open(taken.new.gateway_id, taken.new.tokens_endpoint)
        self.execute(
            self._scheduler.add_decoding(
                taken.new, taken.owner, taken.first_tokens, taken.num_cached_tokens
            )
        )
        self._wake.set()

    def on_dropped(self, request_id: RequestId) -> None:
        """A reservation ended without a decode, and its blocks are free."""
        finished = RequestFinished(request_id=request_id, was_cancelled=True)
        self._control.send(finished, request_id)

    def why_refuse(self) -> tuple[ErrorCode, str] | None:
        """Say why no work is taken in now, if so."""
        if self._is_quarantined:
            return ErrorCode.NO_WORKER, f"{self._id} is quarantined"
        if self._is_draining:
            return ErrorCode.SHUTTING_DOWN, f"{self._id} is shutting down"
        return None

    def why_refuse_reservation(self, request_id: RequestId) -> tuple[ErrorCode, str] | None:
        """Say why no reservation is taken for a request now, if so."""
        refusal = self.why_refuse()
        if refusal is None and self._scheduler.find(request_id) is not None:
            return ErrorCode.INTERNAL, f"{self._id} still has a request of this id"
        if refusal is None and not self._scheduler.can_reserve():
            return ErrorCode.NO_ROOM, f"{self._id} has preempted sequences waiting for room"
        return refusal

    # ---- steps and time --------------------------------------------------------------------------

    async def run_steps(self) -> None:
        """Plan and execute steps for ever."""
        with self._steps:
            clock = StepClock(self.metrics)
            while True:
                self._wake.clear()
                plan, effects = self._scheduler.plan()
                self.execute(effects)
                if plan is None and self._steps.is_idle:
                    self._scheduler.publish()
                    await self._rest()
                    clock.start()
                    continue
                clock.hand_over(plan)
                turn = self._steps.turn(plan)
                self._scheduler.publish()
                for finished in clock.take_over(await turn):
                    self.execute(self._scheduler.finish_step(finished.plan, finished.results))

    async def _rest(self) -> None:
        """Wait for something to do; meanwhile check the books, once nothing has come for a while.

        That takes milliseconds in a large pool, which nobody is to wait for.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_SECONDS):
                await self._wake.wait()
        if not self._wake.is_set() and not self._is_quarantined:
            try:
                self._blocks.validate()
            except InvariantViolationError as error:
                self._is_quarantined = True
                log.critical("quarantined", reason=str(error))
        await self._wake.wait()

    async def tick(self) -> None:
        """Notice and renew leases for ever."""
        renew_at = 0.0
        while True:
            now = monotonic()
            self._outbound.tick(now)
            self._inbound.tick(now)
            if now >= renew_at:
                self._outbound.renew_leases()
                renew_at = now + self._lease_seconds / RENEWALS_PER_LEASE
            await asyncio.sleep(TICK_SECONDS)

    def heartbeat(self) -> Heartbeat:
        """Count what a heartbeat tells."""
        load = self._scheduler.load(
            num_sending=self._outbound.num_open, num_receiving=self._inbound.num_open
        )
        beat = Heartbeat(
            kv=self._blocks.counts(),
            load=load,
            is_draining=self._is_draining,
            is_quarantined=self._is_quarantined,
            pairs=self._outbound.pairs(),
            mode=Mode.BALANCED,
            rates=WorkerRates(
                prefill_tokens_per_second=0.0,
                decode_step_seconds=0.0,
                decode_tokens_per_second=0.0,
            ),
            index_sequence=0,
        )
        take_heartbeat(self.metrics, beat)
        return beat

    # ---- the end ---------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether any request or handoff is left."""
        num_handoffs = self._outbound.num_open + self._inbound.num_open
        return bool(self._scheduler.request_ids()) or num_handoffs > 0

    async def drain(self, seconds: float) -> bool:
        """Take nothing new and wait for what runs; return whether all of it ended in time."""
        self._is_draining = True
        deadline = monotonic() + seconds
        log.info("draining", num_requests=len(self._scheduler.request_ids()), seconds=seconds)
        await self._control.catch_up("draining")  # what was placed here before is refused by name
        while self.is_busy and monotonic() < deadline:  # noqa: ASYNC110  # ends by many causes
            await asyncio.sleep(TICK_SECONDS)
        return not self.is_busy

    def abandon(self, code: ErrorCode, message: str) -> None:
        """End everything with an error: this incarnation is over."""
        for request_id in self._scheduler.request_ids():
            self._break(request_id, code, message)
        self._inbound.stop_all(AbortReason.SHUTTING_DOWN)
