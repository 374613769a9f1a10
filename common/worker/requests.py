"""The requests of one worker: orders about them, the scheduler's effects, and their handoffs.

Decisions are the scheduler's and the machines'; here their effects are carried out, in order,
before the next event is looked at.
"""

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import assert_never

import structlog

from common.errors import ErrorCode, RemoteProtocolError
from common.handoff.events import HandedOver, Outcome, PrefillFinished
from common.ids import RequestId, WorkerId
from common.messages.control import (
    Cancel,
    DecodeRefused,
    DecodeStarted,
    PlaceDecode,
    PlaceRequest,
    PrefillRefused,
    RequestFailed,
    RequestFinished,
)
from common.messages.handoff import Reserve
from common.scheduler.effects import (
    CopyBlocks,
    DecodeBegan,
    DecodeFrozen,
    Effect,
    EmitTokens,
    Preempted,
    PrefillStarted,
    PromptComputed,
    PromptProgressed,
    RequestBroke,
    RequestEnded,
    RoomForPrefix,
    StopHandoff,
    SwapIn,
    SwapOut,
)
from common.scheduler.request import NewRequest, RequestPhase
from common.telemetry.metrics import WorkerMetrics
from common.worker.availability import Availability, Refusal
from common.worker.consequences import EndCancelled, EndFailed, PlaceElsewhere, consequence_of
from common.worker.incoming import TakenOver
from common.worker.measures import note_handoff_end
from common.worker.migrations import Migrations
from common.worker.outgoing import HandoffEnd, HandoffKind, Outgoing
from common.worker.parts import Channels, WorkerParts
from common.worker.payload import unpack_prompt
from common.worker.phases import PhaseLedger
from common.worker.prefixes import PrefixCopies
from common.worker.route import Route

log = structlog.get_logger()


class WorkerRequests:
    """Keeps the routes of all requests. ``wake`` is set when there may be something to compute."""

    def __init__(
        self,
        parts: WorkerParts,
        availability: Availability,
        metrics: WorkerMetrics,
        wake: asyncio.Event,
    ) -> None:
        self._id = parts.worker_id
        self._ledger = PhaseLedger(parts.worker_id)
        self._blocks = parts.blocks
        self._scheduler = parts.scheduler
        self._own_pool = parts.own_pool
        self._host_blocks = parts.host_blocks
        self._availability = availability
        self._metrics = metrics
        self._wake = wake
        self._routes: dict[RequestId, Route] = {}
        self.migrations = Migrations(parts, self._ledger, self.execute, wake)
        self.prefixes = PrefixCopies(parts, self._ledger, wake)

    def attach(self, channels: Channels) -> None:
        """Join to the channels; they call back, so they come second."""
        self._control = channels.control
        self._emitter = channels.emitter
        self._inbound = channels.inbound
        self._outbound = channels.outbound
        self.migrations.attach(channels)
        self.prefixes.attach(channels)

    # ---- orders ----------------------------------------------------------------------------------

    def registered(self) -> None:
        """Report again what waits for another decode side: the controller may be a new one."""
        for request_id, route in self._routes.items():
            route.is_known = False
            if route.refused is not None:
                self._control.send(route.refused, request_id)

    def place(self, order: PlaceRequest, payload: tuple[bytes, ...]) -> None:
        """Prefill a request, or refuse it by name."""
        request_id = order.request_id
        if request_id in self._routes:
            log.info("repeat_ignored", request_id=request_id)
            return
        if self._scheduler.find(request_id) is not None:
            # We decode it for another worker, or its last step here has not ended yet.
            self._metrics.refusals.labels(ErrorCode.INTERNAL).inc()
            message = f"{self._id} still has a request of this id"
            self._report_failed(request_id, ErrorCode.INTERNAL, message)
            return
        if (refusal := self._availability.why_refuse()) is not None:
            self._refuse(request_id, refusal)
            return
        try:
            prompt = unpack_prompt(payload, order.num_prompt_tokens, order.params.num_drawn)
        except RemoteProtocolError as error:
            self._report_failed(request_id, ErrorCode.INTERNAL, str(error))
            return
        # A request of one token ends with its prefill and needs no decode side.
        is_remote = order.decode is not None and order.params.num_left > 1
        now = monotonic()
        self._routes[request_id] = Route(order.decode, now)
        self._ledger.received(request_id, order.params.choices, order.queued_seconds, now)
        num_awaited = self.prefixes.await_prefix(order, prompt, now)
        self._emitter.open(order.gateway_id, order.tokens_endpoint)
        log.info(
            "request_received",
            request_id=request_id,
            num_prompt_tokens=len(prompt),
            decode_worker=order.decode.worker_id if order.decode else self._id,
            num_prefix_tokens=order.num_prefix_tokens,
            num_stored_tokens=order.num_stored_tokens,
        )
        new = NewRequest(request_id, order.gateway_id, order.tokens_endpoint, order.params, prompt)
        self.execute(self._scheduler.add(new, is_remote=is_remote, num_awaited_tokens=num_awaited))

    def give_back(self) -> None:
        """Refuse what waits here and has not begun: another worker can have it sooner.

        But not what an earlier controller placed: the present one could place it nowhere.
        """
        refusal = self._availability.why_refuse()
        assert refusal is not None, "only who takes nothing in gives back what it has"
        for request_id, route in list(self._routes.items()):
            if route.is_known and self._scheduler.withdraw(request_id):
                self._forget(request_id)
                self._refuse(request_id, refusal)

    def _refuse(self, request_id: RequestId, refusal: Refusal) -> None:
        code, message = refusal
        log.info("prefill_refused", request_id=request_id, code=code, reason=message)
        self._metrics.refusals.labels(code).inc()
        refused = PrefillRefused(request_id=request_id, code=code, message=message)
        self._control.send(refused, request_id)

    def place_decode(self, order: PlaceDecode) -> None:
        """Let another worker, or this one, decode what was refused elsewhere."""
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

    def placement_unknown(self, request_id: RequestId) -> None:
        """Fail what waits for a decode side that nobody will name."""
        route = self._routes.get(request_id)
        if route is not None and route.refused is not None:
            message = "the controller was started anew while the request waited for a decode worker"
            self.fail(request_id, ErrorCode.NO_WORKER, message)

    def cancel(self, order: Cancel) -> None:
        """End a request or one choice of it, wherever it stands here."""
        log.info(
            "cancel_received",
            request_id=order.request_id,
            choice=order.choice,
            reason=order.reason,
        )
        if order.choice is not None:
            self._ledger.choice_cancelled(order.request_id, order.choice)
        effects = self._scheduler.cancel(order.request_id, order.choice)
        if effects is not None:
            self.execute(effects)
        elif not self._inbound.cancel(order.request_id, order.choice) and order.choice is None:
            # Nothing of it is here (any more): the controller need not wait for us.
            self.prefixes.forget(order.request_id)
            finished = RequestFinished(request_id=order.request_id, was_cancelled=True)
            self._control.send(finished, order.request_id)

    # ---- effects ---------------------------------------------------------------------------------

    def execute(self, effects: Iterable[Effect], started_at: float | None = None) -> None:
        """Carry effects out in order, then send the tokens they hold.

        ``started_at`` is when the step that they come from began.
        """
        now = monotonic()
        began = now if started_at is None else started_at
        for effect in effects:
            self._execute_one(effect, began, now)
        for request_id in self._emitter.flush():
            message = "the gateway does not take tokens"
            self.fail(request_id, ErrorCode.INTERNAL, message)

    def _execute_one(  # noqa: C901, PLR0912  # one case per effect
        self, effect: Effect, began: float, now: float
    ) -> None:
        match effect:
            case EmitTokens(gateway_id, delta):
                self._emitter.add(gateway_id, self._ledger.attach(delta, began, now))
            case PrefillStarted(request_id, num_cached_tokens):
                self._prefill_started(request_id, num_cached_tokens, now)
            case RoomForPrefix(request_id):
                self.prefixes.load_now(request_id)
            case PromptProgressed(request_id, num_blocks):
                self._outbound.progress(request_id, num_blocks)
            case PromptComputed(request_id):
                self._prompt_computed(effect)
            case DecodeBegan(request_id):
                self._ledger.decode_began(request_id, now)
                self._control.send(DecodeStarted(request_id=request_id), request_id)
            case CopyBlocks(pairs):
                self._own_pool.write([src for src, _ in pairs], [dst for _, dst in pairs])
            case SwapOut(_, _, pairs):
                self._host_blocks.swap_out(pairs)
            case SwapIn(_, _, pairs):
                self._host_blocks.swap_in(pairs)
            case DecodeFrozen(request_id):
                self.migrations.still(request_id)
            case StopHandoff(request_id, reason):
                self.migrations.request_over(request_id)
                self._outbound.stop(request_id, reason)
            case Preempted(request_id, choice, num_tokens):
                self._metrics.preemptions.inc()
                log.info("preempted", request_id=request_id, choice=choice, num_tokens=num_tokens)
            case RequestEnded(request_id, was_cancelled):
                self._forget(request_id)
                log.info("request_ended", request_id=request_id, was_cancelled=was_cancelled)
                finished = RequestFinished(request_id=request_id, was_cancelled=was_cancelled)
                self._control.send(finished, request_id)
            case RequestBroke(request_id, gateway_id, code, message):
                self._forget(request_id)
                log.error("request_failed", request_id=request_id, code=code, reason=message)
                self._metrics.failures.labels(code).inc()
                self._emitter.fail(gateway_id, request_id, code, message)
                self._report_failed(request_id, code, message)
            case _:
                assert_never(effect)

    def _forget(self, request_id: RequestId) -> None:
        self._routes.pop(request_id, None)
        self._ledger.forget(request_id)
        self.prefixes.forget(request_id)
        self.migrations.request_over(request_id)

    def _report_failed(self, request_id: RequestId, code: ErrorCode, message: str) -> None:
        failed = RequestFailed(request_id=request_id, code=code, message=message[:4096])
        self._control.send(failed, request_id)

    def fail(self, request_id: RequestId, code: ErrorCode, message: str) -> None:
        """End a request with an error."""
        self.execute(self._scheduler.fail(request_id, code, message))

    def _prefill_started(self, request_id: RequestId, num_cached_tokens: int, now: float) -> None:
        log.info("prefill_started", request_id=request_id, num_cached_tokens=num_cached_tokens)
        if self._scheduler.load(num_sending=0, num_receiving=0).num_waiting == 0:
            self._control.beat_soon()  # the next prompt is to come in time
        request = self._scheduler.find(request_id)
        if request is None:
            return
        self._metrics.prefix_queries.inc(len(request.new.prompt))
        self._metrics.prefix_hits.inc(num_cached_tokens)
        num_tokens = len(request.new.prompt) - num_cached_tokens
        self._ledger.prefill_started(request_id, num_tokens, now)
        route = self._routes.get(request_id)
        if route is not None:
            self._metrics.queue_seconds.observe(now - route.received_at)
        if request.is_remote:
            self._begin_handoff(request_id)

    # ---- handoffs --------------------------------------------------------------------------------

    def _begin_handoff(self, request_id: RequestId) -> None:
        route = self._routes[request_id]
        request = self._scheduler.find(request_id)
        assert request is not None, "its prefill has just started or is whole"
        assert route.decode is not None, "a remote request has a decode side"
        self._scheduler.open_handoff(request_id)
        outgoing = Outgoing(
            kind=HandoffKind.PROMPT,
            request_id=request_id,
            gateway_id=request.new.gateway_id,
            tokens_endpoint=request.new.tokens_endpoint,
            params=request.new.params,
            prompt=request.new.prompt,
            owner=request.lead.owner,
            block_ids=request.lead.block_table,
            live_choices=lambda: request.live_choices,
        )
        self._outbound.begin(outgoing, route.decode)
        num_blocks = request.lead.num_computed // self._scheduler.block_size
        if num_blocks:
            self._outbound.progress(request_id, num_blocks)
        if route.computed is not None:
            self._finish_handoff(request_id, route)

    def _prompt_computed(self, computed: PromptComputed) -> None:
        route = self._routes[computed.request_id]
        route.computed = computed
        route.computed_at = self._ledger.done_at(computed.request_id, monotonic())
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

    def on_handoff_ended(self, end: HandoffEnd) -> None:
        """Draw the consequence of a handoff from here that ended."""
        note_handoff_end(self._metrics, end.outcome, end.totals)
        match end.outgoing.kind:
            case HandoffKind.PROMPT:
                self._prompt_handoff_ended(end.outgoing.request_id, end.worker_id, end.outcome)
            case HandoffKind.DECODE:
                self.migrations.ended(end)
            case HandoffKind.PREFIX:
                self.prefixes.sent(end)

    def _prompt_handoff_ended(
        self, request_id: RequestId, decode_worker: WorkerId, outcome: Outcome
    ) -> None:
        was_accepted = isinstance(outcome, HandedOver)
        self.execute(self._scheduler.close_handoff(request_id, was_accepted=was_accepted))
        request = self._scheduler.find(request_id)
        if was_accepted:
            self._forget(request_id)
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
                self.fail(request_id, code, message)

    def on_taken_over(self, taken: TakenOver) -> None:
        """Decode a request whose KV arrived and is right."""
        request_id = taken.new.request_id
        self._metrics.handoff_seconds.observe(monotonic() - taken.done_at)
        if not taken.first_tokens:
            # Every choice was cancelled on its way; the request is ours all the same.
            self._control.send(DecodeStarted(request_id=request_id), request_id)
            self._blocks.release(taken.owner)
            self.on_dropped(request_id)
            return
        self._emitter.open(taken.new.gateway_id, taken.new.tokens_endpoint)
        self._ledger.taken_over(
            request_id,
            tuple(first.choice for first in taken.first_tokens),
            taken.done_at,
            is_migration=taken.is_migration,
            phases=taken.phases,
        )
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

    def why_refuse_reservation(self, reserve: Reserve) -> Refusal | None:
        """Say why a reservation is not taken now, if so. A prefix is for a request of ours."""
        refusal = self._availability.why_refuse()
        if reserve.is_prefix:
            return refusal
        if refusal is None and self._scheduler.find(reserve.request_id) is not None:
            return ErrorCode.INTERNAL, f"{self._id} still has a request of this id"
        if refusal is None and not self._scheduler.can_reserve():
            return ErrorCode.NO_ROOM, f"{self._id} has preempted sequences waiting for room"
        return refusal
