"""The worker: joins scheduler, engine, both halves of the handoff and the control channel.

Everything runs in one event loop, except three kinds of work in threads of their own, with the
GIL released: engine steps, block writes and checksums (one copy thread), and mapping a peer's
pool.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import assert_never

import structlog

from common.engine.failure import EngineBroken
from common.errors import ErrorCode, InvariantViolationError
from common.messages.control import (
    Cancel,
    CopyPrefix,
    Directive,
    Heartbeat,
    KVIndexRequested,
    LookUpPrefix,
    MigrateDecode,
    PeerJoined,
    PeerLeft,
    PlaceDecode,
    PlacementUnknown,
    PlaceRequest,
    PrefixUnavailable,
    RoleSwitched,
    SetDraining,
    SwitchRole,
    WorkerAccepted,
)
from common.messages.fields import Role
from common.messages.handoff import AbortReason
from common.telemetry.metrics import WorkerMetrics
from common.worker.availability import Availability
from common.worker.compute_meter import ComputeMeter
from common.worker.control import News, Order
from common.worker.index_reports import IndexReports
from common.worker.known_peers import KnownPeers
from common.worker.measures import StepClock, take_heartbeat, take_totals
from common.worker.parts import Channels, WorkerParts
from common.worker.requests import WorkerRequests
from common.worker.stepping import StepPipeline
from common.worker.stored_blocks import tell_found

log = structlog.get_logger()

TICK_SECONDS = 0.05
REST_SECONDS = 0.5
RENEWALS_PER_LEASE = 4


class HybridWorker:
    """One engine's worker, joined to its channels by ``attach``."""

    def __init__(self, parts: WorkerParts) -> None:
        self._steps = StepPipeline(parts.engine, parts.engine_thread, parts.slow_down)
        self._blocks = parts.blocks
        self._scheduler = parts.scheduler
        self._stored = parts.stored
        self._compactor = parts.compactor
        self._lease_seconds = parts.lease_seconds
        self._why_broken = parts.why_broken
        self._index = IndexReports(parts.blocks)
        self._wake = asyncio.Event()
        self._peers = KnownPeers()
        self._num_orders = 0
        self.metrics = WorkerMetrics()
        self._clock = StepClock(self.metrics)
        self._computed = ComputeMeter(self.metrics.compute, parts.model)
        self.availability = Availability(parts.worker_id)
        self.requests = WorkerRequests(parts, self.availability, self.metrics, self._wake)

    def attach(self, channels: Channels) -> None:
        """Join the worker to its channels; they call back into it, so they come second."""
        self._control = channels.control
        self._inbound = channels.inbound
        self._outbound = channels.outbound
        self._own = channels.own
        if self._stored is not None:
            self._stored.attach(channels.control, self.metrics.store, self._wake)
        self.requests.attach(channels)

    # ---- orders of the controller ----------------------------------------------------------------

    def on_order(  # noqa: C901, PLR0912  # one case per order
        self, order: Order, payload: tuple[bytes, ...]
    ) -> None:
        """Carry out one order."""
        if isinstance(order, PlaceRequest | CopyPrefix):
            self._num_orders += 1
        match order:
            case WorkerAccepted():
                self._num_orders = 0
                self._scheduler.direct(None, 0)  # a controller that was started anew knows of none
                self._own.take(order.role, order.role_generation)
                self._peers.replace(order.peers)
                self.requests.registered()
                self._pair()
            case PeerJoined():
                self._peers.add(order.peer)
                self._pair()
            case PeerLeft():
                reason = f"left: {order.reason}"
                self._peers.discard(order.worker_id, order.epoch)
                self._outbound.peer_left(order.worker_id, order.epoch, reason)
                self._inbound.peer_left(order.worker_id, order.epoch, reason)
            case PlaceRequest():
                self.requests.place(order, payload)
            case PlaceDecode():
                self.requests.place_decode(order)
            case PlacementUnknown():
                self.requests.placement_unknown(order.request_id)
            case Cancel():
                self.requests.cancel(order)
            case SwitchRole():
                self._switch_role(order)
            case SetDraining():
                self._set_draining(is_draining=order.is_draining)
            case Directive():
                self._scheduler.direct(order.mode, order.num_steps)
            case MigrateDecode():
                self.requests.migrations.order(order)
            case CopyPrefix():
                self.requests.prefixes.send(order, payload)
            case KVIndexRequested():
                self._index.request_snapshot()
                self._control.beat_soon()
            case PrefixUnavailable():
                self.requests.prefixes.unavailable(order)
            case LookUpPrefix():
                self._look_up(order, payload)
            case _:
                assert_never(order)
        self._wake.set()

    def _look_up(self, order: LookUpPrefix, payload: tuple[bytes, ...]) -> None:
        if self._stored is None:
            tell_found(self._control, order.request_id, 0)
        else:
            self._stored.look_up(order, payload)

    def _pair(self) -> None:
        """Pair with those that the roles call for; others are paired with when they are named."""
        if self._own.role is Role.PREFILL:
            for peer in self._peers.of_role(Role.DECODE):
                self._outbound.pair(peer)

    def _switch_role(self, order: SwitchRole) -> None:
        before = self._own.role
        if self._own.switch(order):
            log.info(
                "role_switched",
                before=before,
                role=order.role,
                role_generation=order.role_generation,
                num_requests=len(self._scheduler.request_ids()),
            )
            self._pair()
        else:
            log.info("stale_order_ignored", order="SwitchRole", generation=order.role_generation)
        switched = RoleSwitched(role=self._own.role, role_generation=self._own.generation)
        self._control.send(switched, "role")

    def _set_draining(self, *, is_draining: bool) -> None:
        if is_draining is not self.availability.is_ordered_to_drain:
            log.info("drain_ordered" if is_draining else "drain_undone")
        self.availability.is_ordered_to_drain = is_draining
        if is_draining:
            self.requests.give_back()
        self._control.beat_soon()

    # ---- steps and time --------------------------------------------------------------------------

    async def run_steps(self) -> None:
        """Plan and execute steps for ever."""
        with self._steps:
            clock = self._clock
            clock.start()
            while True:
                self._wake.clear()
                plan, effects = self._scheduler.plan()
                self.requests.execute(effects)
                if plan is None and self._steps.is_idle:
                    self._publish()
                    await self._rest()
                    clock.start()
                    continue
                clock.hand_over(plan)
                turn = self._steps.turn(plan)
                self._publish()
                for timed in clock.take_over(await turn):
                    finished = timed.step
                    self._scheduler.note_step(timed.seconds, finished.plan)
                    attention_seconds = self._scheduler.attention_seconds(finished.plan)
                    self._computed.note(finished, attention_seconds)
                    effects = self._scheduler.finish_step(finished.plan, finished.results)
                    self.requests.execute(effects, timed.started_at)

    def _publish(self) -> None:
        """Make what was computed findable here, and keep it where there is a store."""
        self._scheduler.publish()
        if computed := self._scheduler.take_computed():
            assert self._stored is not None, "only with a store computed blocks are held for it"
            self._stored.kept.keep(computed)

    async def serve_store(self) -> None:
        """Do what is asked of the store for ever; nothing where there is none."""
        if self._stored is not None:
            await self._stored.serve()

    async def _rest(self) -> None:
        """Wait for something to do; once nothing has come for a while, check the books and tidy.

        That takes milliseconds in a large pool, which nobody is to wait for.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_SECONDS):
                await self._wake.wait()
        if not self._wake.is_set() and not self.availability.is_quarantined:
            try:
                self._blocks.validate()
            except InvariantViolationError as error:
                self.availability.is_quarantined = True
                log.critical("quarantined", reason=str(error))
            else:
                await self._compact()
        await self._wake.wait()

    async def _compact(self) -> None:
        """Bring free memory together, round by round, until there is something to do."""
        while self._compactor is not None and not self._wake.is_set():
            if not (num_moved := self._compactor.move_some()):
                return
            self.metrics.relocated.inc(num_moved)
            await asyncio.sleep(0)  # others have their turn

    async def tick(self) -> None:
        """Notice and renew leases for ever; EngineBroken when the engine has lost a rank."""
        renew_at = 0.0
        while True:
            now = monotonic()
            if (reason := self._why_broken()) is not None:
                raise EngineBroken(reason)
            self._outbound.tick(now)
            self._inbound.tick(now)
            self.requests.prefixes.tick(now)
            if now >= renew_at:
                self._outbound.renew_leases()
                renew_at = now + self._lease_seconds / RENEWALS_PER_LEASE
            await asyncio.sleep(TICK_SECONDS)

    def news(self) -> list[News]:
        """Return what a heartbeat sends: changes of the prefix index, if any, and itself."""
        report = self._index.take()
        changes: list[News] = [] if report is None else [report]
        return [*changes, (self.heartbeat(), ())]

    def heartbeat(self) -> Heartbeat:
        """Count what a heartbeat tells."""
        load = self._scheduler.load(
            num_sending=self._outbound.num_open, num_receiving=self._inbound.num_open
        )
        rates = self._scheduler.rates()
        if self._stored is not None:
            self._stored.measure()
            prefixes = self._stored.prefixes
            load = replace(load, read_queue_tokens=prefixes.queue_tokens)
            rates = replace(rates, read_tokens_per_second=prefixes.tokens_per_second)
        beat = Heartbeat(
            kv=self._blocks.counts(),
            load=load,
            is_draining=self.availability.is_draining,
            is_quarantined=self.availability.is_quarantined,
            pairs=self._outbound.pairs(),
            mode=self._scheduler.mode,
            rates=rates,
            index_sequence=self._index.sequence,
            num_orders=self._num_orders,
            totals=take_totals(self.metrics, self._clock),
        )
        take_heartbeat(self.metrics, beat)
        self.metrics.quota_error.set(self._scheduler.quota_error)
        return beat

    # ---- the end ---------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether any request or handoff is left."""
        num_handoffs = self._outbound.num_open + self._inbound.num_open
        is_storing = self._stored is not None and self._stored.is_busy
        return bool(self._scheduler.request_ids()) or num_handoffs > 0 or is_storing

    async def drain(self, seconds: float) -> bool:
        """Take nothing new and wait for what runs; return whether all of it ended in time."""
        self.availability.is_shutting_down = True
        if self._stored is not None:
            self._stored.stop_preloading()
        deadline = monotonic() + seconds
        log.info("draining", num_requests=len(self._scheduler.request_ids()), seconds=seconds)
        await self._control.catch_up("draining")  # what was placed here before is refused by name
        while self.is_busy and monotonic() < deadline:  # noqa: ASYNC110  # ends by many causes
            await asyncio.sleep(TICK_SECONDS)
        return not self.is_busy

    def abandon(self, code: ErrorCode, message: str) -> None:
        """End everything with an error: this incarnation is over."""
        for request_id in self._scheduler.request_ids():
            self.requests.fail(request_id, code, message)
        self._inbound.stop_all(AbortReason.SHUTTING_DOWN)
