"""The controller's pure core: one event in, effects out; time comes with the event."""

from typing import assert_never

from common.errors import ErrorCode, RemoteProtocolError
from common.messages.admin import OrderDrain, OrderRole, OrderRoles, ScalerHello
from common.messages.codec import Envelope
from common.messages.control import (
    Cancel,
    CancelRequest,
    ClusterState,
    DecodeRefused,
    DecodeStarted,
    GatewayHeartbeat,
    GatewayHello,
    Goodbye,
    Heartbeat,
    KVIndexEvents,
    MigrationFailed,
    PlacementUnknown,
    PlaceRequest,
    PrefillRefused,
    PrefixFound,
    PrefixNotCopied,
    RequestFailed,
    RequestFinished,
    RoleSwitched,
    SubmitRequest,
    WorkerHello,
)
from common.messages.fields import MAX_INCARNATIONS, Role
from services.controller.adaptation import Adaptation
from services.controller.admin_orders import AdminOrders
from services.controller.decode_placer import DecodePlacer
from services.controller.dispatcher import Dispatcher
from services.controller.effects import (
    CoreEvent,
    Effect,
    FromPeer,
    KeepOrders,
    MessageReceived,
    Note,
    OrderReceived,
    PeerKey,
    Send,
    SendFailed,
    Tick,
)
from services.controller.elasticity import Elasticity
from services.controller.heartbeats import Heartbeats
from services.controller.lifecycle import RequestLifecycle
from services.controller.limits import ControllerLimits
from services.controller.look_ups import LookUps
from services.controller.members import GatewayRecord, Members, WorkerRecord
from services.controller.migrations import Migrations
from services.controller.own_time import OwnTime
from services.controller.policy.dualpath.policy import DualPath
from services.controller.policy.estimates import Objectives
from services.controller.policy.policies import make_policy
from services.controller.prefixes import Prefixes
from services.controller.registry import Registry
from services.controller.replicas import Replicas
from services.controller.request_book import RequestBook
from services.controller.roles import Roles
from services.controller.standing_orders import NO_ORDERS, KeptOrders, StandingOrders

RequestReport = (
    PrefillRefused
    | DecodeRefused
    | DecodeStarted
    | RequestFinished
    | RequestFailed
    | MigrationFailed
    | PrefixNotCopied
)


class ControllerCore:
    """All state of the controller. ``handle`` is the only mutator.

    ``host`` is our ``host_id()``: process ids of workers with the same one mean something here.
    Everything behind ``handle`` has the controller's own time, in which its pauses do not count.
    """

    def __init__(
        self, limits: ControllerLimits, host: str, now: float, kept: KeptOrders = NO_ORDERS
    ) -> None:
        """``kept`` are the orders that an earlier controller had to keep."""
        policy = make_policy(limits.policy, preset=limits.dualpath_preset)
        self.policy = policy.name
        self.started_at = now
        self.own_time = OwnTime(limits, now)
        self.members = Members(host, Objectives(limits.ttft_seconds, limits.tpot_seconds))
        self.book = RequestBook(self.members)
        self._orders = StandingOrders(limits.role_control, kept)
        self.roles = Roles(self.members, self._orders)
        self.prefixes = Prefixes(self.members, is_used=policy.uses_prefixes)
        self.elasticity = Elasticity(self.members, self.book, self.roles, limits)
        self._limits = limits
        self._look_ups = LookUps(self.members, self.book)
        self._dispatcher = Dispatcher(
            *(self.members, self.book, limits, policy, self.prefixes, self._look_ups),
            self.elasticity,
        )
        self._decode_placer = DecodePlacer(self.members, self.book, limits)
        self._lifecycle = RequestLifecycle(self.book, limits, self.members)
        self._migrations = Migrations(self.members, self.book)
        self._replicas = Replicas(self.members, self.prefixes, limits.hot_replicas)
        self._registry = Registry(self.members, self._lifecycle, self.roles, self.prefixes, limits)
        self._heartbeats = Heartbeats(self.members, self.roles, self.prefixes, now)
        self._admin_orders = AdminOrders(self.members, self.roles, self.elasticity, self._orders)
        self._adaptation: Adaptation | None = None
        if isinstance(policy, DualPath) and policy.is_adaptive:
            self._adaptation = Adaptation(self.members, policy, now)
        self._round_at = now

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Take one event and return what to do, in order."""
        stood = self.own_time.take(now)
        effects = self._handle(event, self.own_time.at(now))
        if (kept := self._orders.take_news()) is not None:
            effects = [KeepOrders(kept), *effects]  # before an answer says that it is done
        if stood < self.own_time.max_step_seconds:
            return effects
        facts = (("seconds", round(stood, 3)), ("reason", "the controller did not run"))
        return [Note("stood_still", "clock", facts=facts, level="warning"), *effects]

    def _handle(self, event: CoreEvent, now: float) -> list[Effect]:
        if not self.book.requests and not self.members.has_work():
            self._heartbeats.note_idle(now)
        match event:
            case MessageReceived(received):
                try:
                    return self._message(received.envelope, received.message, received.payload, now)
                except RemoteProtocolError as error:
                    facts = (("reason", str(error)), ("sender", received.envelope.sender))
                    cause = _cause(received.envelope, received.message)
                    return [Note("protocol_violation", cause, facts=facts, level="error")]
            case OrderReceived(sender, order, cause):
                return self._order(sender, order, cause, now)
            case SendFailed(send):
                return self._send_failed(send, now)
            case Tick(gone_pids):
                return self._tick(gone_pids, now)

    def readiness(self, now: float) -> tuple[bool, str]:
        """Whether requests can be served now, and why not; ``now`` is own time."""
        if missing := self.members.missing_role():
            return False, missing
        stalled = self._heartbeats.stalled_seconds(now)
        if stalled > self._limits.stall_seconds:
            return False, f"work is pending and no worker moved for {stalled:.0f} s"
        return True, ""

    def validate(self) -> None:
        """Check every sum of the state. Raises AssertionError: a bug of ours."""
        self.members.validate()
        self.book.validate()
        self._replicas.validate()
        for record in self.book.requests.values():
            is_orphan = record.gateway not in self.members.gateways
            assert not is_orphan or record.cancelled_at is not None, record.request_id

    # ---- messages --------------------------------------------------------------------------

    def _message(
        self, envelope: Envelope, message: FromPeer, payload: tuple[bytes, ...], now: float
    ) -> list[Effect]:
        key: PeerKey = (envelope.sender, envelope.epoch)
        cause = _cause(envelope, message)
        if (reason := self.members.death_of(key)) is not None:
            return self._registry.fence(key, reason, cause, now)
        if isinstance(message, WorkerHello):
            effects = self._registry.worker_hello(key, envelope, message, cause, now)
            return [*effects, *self._place_waiting(cause, now)]
        if isinstance(message, GatewayHello):
            return self._registry.gateway_hello(key, message, cause, now)
        if (worker := self.members.workers.get(key)) is not None:
            worker.last_seen = now
            return self._from_worker(worker, envelope, message, payload, now)
        if (gateway := self.members.gateways.get(key)) is not None:
            gateway.last_seen = now
            return self._from_gateway(gateway, envelope, message, payload, now)
        return self._registry.from_stranger(key, message, cause, now)

    def _from_worker(
        self,
        worker: WorkerRecord,
        envelope: Envelope,
        message: FromPeer,
        payload: tuple[bytes, ...],
        now: float,
    ) -> list[Effect]:
        key, cause = worker.key, _cause(envelope, message)
        match message:
            case Heartbeat():
                effects = self._heartbeats.take(worker, message, envelope, cause, now)
                return [*effects, *self._place_waiting(cause, now)]
            case KVIndexEvents():
                return self.prefixes.take(worker, message, payload, cause, now)
            case RoleSwitched():
                effects = self.roles.switched(worker, message, cause, now)
                return [*effects, *self._place_waiting(cause, now)]
            case (
                PrefillRefused()
                | DecodeRefused()
                | DecodeStarted()
                | RequestFinished()
                | RequestFailed()
                | MigrationFailed()
                | PrefixNotCopied()
            ):
                return self._about_request(worker, message, cause, now)
            case PrefixFound():
                effects = self._look_ups.found(key, message, cause, now)
                return [*effects, *self._place_waiting(cause, now)]
            case Goodbye(reason=reason):
                told = f"worker {key[0]} left: {reason}"
                code = ErrorCode.SHUTTING_DOWN
                effects = self._registry.lose_worker(worker, code, told, cause, now)
                effects += self.roles.end_orders(worker.peer.worker_id, "it left", cause)
                return [*effects, *self._place_waiting(cause, now)]
            case (
                WorkerHello()
                | GatewayHello()
                | GatewayHeartbeat()
                | SubmitRequest()
                | CancelRequest()
            ):
                raise RemoteProtocolError(f"worker {key[0]} sent {type(message).__name__}")
            case _:
                assert_never(message)

    def _about_request(
        self, worker: WorkerRecord, message: RequestReport, cause: str, now: float
    ) -> list[Effect]:
        key = worker.key
        match message:
            case DecodeRefused() if message.request_id not in self.book.requests:
                unknown = PlacementUnknown(request_id=message.request_id)
                note = Note("placement_unknown", cause, message.request_id)
                return [note, Send(key, unknown, cause)]
            case DecodeRefused():
                return self._decode_placer.decode_refused(key, message, cause, now)
            case DecodeStarted():
                return self._lifecycle.decode_started(key, message, cause, now)
            case MigrationFailed():
                return self._lifecycle.migration_failed(key, message, cause, now)
            case PrefixNotCopied():
                effects = self._replicas.not_copied(key, message, cause)
                return effects or self._lifecycle.prefix_not_copied(key, message, cause, now)
            case RequestFinished():
                effects = self._lifecycle.finished(key, message, cause, now)
                return [*effects, *self._place_waiting(cause, now)]
            case PrefillRefused():
                return self._prefill_refused(worker, message, cause, now)
            case RequestFailed():
                effects = self._lifecycle.failed(key, message, cause, now)
                return [*effects, *self._place_waiting(cause, now)]

    def _from_gateway(
        self,
        gateway: GatewayRecord,
        envelope: Envelope,
        message: FromPeer,
        payload: tuple[bytes, ...],
        now: float,
    ) -> list[Effect]:
        key, cause = gateway.key, _cause(envelope, message)
        match message:
            case GatewayHeartbeat():
                gateway.num_streams = message.num_streams
                gateway.is_draining = message.is_draining
                return [Send(key, self._cluster_state(now), cause)]
            case SubmitRequest():
                effects = self._dispatcher.submit(gateway, message, payload, cause, now)
                self._replicas.submitted(self.book.requests.get(message.request_id), now)
                return effects
            case CancelRequest() if message.request_id not in self.book.requests:
                return self._cancel_everywhere(message, cause)
            case CancelRequest():
                return self._lifecycle.cancel(key, message, cause, now)
            case Goodbye(reason=reason):
                return self._registry.lose_gateway(gateway, f"it left: {reason}", cause, now)
            case (
                WorkerHello()
                | GatewayHello()
                | Heartbeat()
                | PrefillRefused()
                | DecodeRefused()
                | DecodeStarted()
                | RequestFinished()
                | RequestFailed()
                | KVIndexEvents()
                | RoleSwitched()
                | MigrationFailed()
                | PrefixFound()
                | PrefixNotCopied()
            ):
                raise RemoteProtocolError(f"gateway {key[0]} sent {type(message).__name__}")
            case _:
                assert_never(message)

    def _prefill_refused(
        self, worker: WorkerRecord, message: PrefillRefused, cause: str, now: float
    ) -> list[Effect]:
        """Place a request elsewhere that the worker did not begin, or let it fail."""
        before = worker.state
        effects = self._dispatcher.prefill_refused(worker, message, cause, now)
        failed = RequestFailed(
            request_id=message.request_id, code=message.code, message=message.message
        )
        return [
            *worker.state_note(before, cause),
            *(effects or self._lifecycle.failed(worker.key, failed, cause, now)),
            *self._place_waiting(cause, now),
        ]

    def _cancel_everywhere(self, message: CancelRequest, cause: str) -> list[Effect]:
        """Cancel what has no record: it ended, or an earlier controller placed it."""
        cancel = Cancel(
            request_id=message.request_id,
            choice=message.choice,
            reason=message.reason or "cancelled",
        )
        note = Note("cancel_of_unknown", cause, message.request_id)
        return [note, *(Send(worker, cancel, cause) for worker in self.members.workers)]

    def _cluster_state(self, now: float) -> ClusterState:
        is_ready, reason = self.readiness(now)
        return ClusterState(
            is_ready=is_ready,
            reason=reason,
            num_prefill=self.members.num_ready(Role.PREFILL),
            num_decode=self.members.num_ready(Role.DECODE),
            num_combined=self.members.num_ready(Role.COMBINED),
            max_request_tokens=self.members.max_request_tokens(),
            workers=self.members.incarnations(),
            has_all_workers=self._has_all_workers(now),
        )

    def _has_all_workers(self, now: float) -> bool:
        """Whether every worker that lives has said hello, and all of them can be told of."""
        is_settled = now - self.started_at > self._limits.settle_seconds
        return is_settled and len(self.members.workers) <= MAX_INCARNATIONS

    def _order(
        self,
        sender: PeerKey,
        order: OrderRole | OrderRoles | OrderDrain | ScalerHello,
        cause: str,
        now: float,
    ) -> list[Effect]:
        if isinstance(order, ScalerHello):
            return self.elasticity.scaler_hello(sender, order, cause, now)
        effects = self._admin_orders.take(sender, order, cause, now)
        return [*effects, *self._place_waiting(cause, now)]

    # ---- time and failures -----------------------------------------------------------------

    def _tick(self, gone_pids: frozenset[int], now: float) -> list[Effect]:
        cause = "tick"
        effects = self._registry.tick(gone_pids, cause, now)
        effects += self._lifecycle.tick(cause, now)
        if now - self._round_at >= self._limits.heartbeat_seconds:
            self._round_at = now
            effects += self.elasticity.take_round(cause, now)
            effects += self._migrations.take_round(cause, now)
            effects += self._replicas.take_round(cause, now)
            if self._adaptation is not None:
                effects += self._adaptation.take_round(cause, now)
        return [*effects, *self._place_waiting(cause, now)]

    def _place_waiting(self, cause: str, now: float) -> list[Effect]:
        """Place what waits: decodes that hold a prefill side's blocks before prompts."""
        return [
            *self.roles.stand_in(cause),
            *self._look_ups.end_late(cause, now),
            *self._decode_placer.retry_waiting(cause, now),
            *self._dispatcher.dispatch_queued(cause, now),
        ]

    def _send_failed(self, send: Send, now: float) -> list[Effect]:
        """Take a peer that cannot be reached for dead; what was for it goes elsewhere or ends."""
        cause, key = send.cause, send.peer
        worker = self.members.workers.get(key)
        told = f"worker {key[0]} was not reached with {type(send.message).__name__}"
        effects = [] if worker is None else self._registry.remove_worker(worker, told, cause)
        if isinstance(send.message, PlaceRequest):
            effects += self._dispatcher.place_failed(send.message, cause, now)
        effects += self._lifecycle.worker_gone(key, ErrorCode.WORKER_DIED, told, cause, now)
        if (gateway := self.members.gateways.get(key)) is not None:
            told = f"it was not reached with {type(send.message).__name__}"
            effects += self._registry.lose_gateway(gateway, told, cause, now)
        return [*effects, *self._place_waiting(cause, now)]


def _cause(envelope: Envelope, message: FromPeer) -> str:
    return f"{type(message).__name__} {envelope.sender}/{envelope.sequence}"
