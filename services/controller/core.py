"""The controller's pure core: one event in, effects out; time comes with the event."""

from typing import assert_never

from common.errors import ErrorCode, RemoteProtocolError
from common.messages.codec import Envelope
from common.messages.control import (
    Cancel,
    CancelRequest,
    ClusterState,
    DecodeRefused,
    DecodeStarted,
    Fenced,
    GatewayAccepted,
    GatewayHeartbeat,
    GatewayHello,
    Goodbye,
    Heartbeat,
    HeartbeatAnswered,
    HelloRefused,
    HelloRequested,
    KVIndexEvents,
    MigrationFailed,
    PeerJoined,
    PeerLeft,
    PlacementUnknown,
    PlaceRequest,
    RequestFailed,
    RequestFinished,
    RoleSwitched,
    SubmitRequest,
    WorkerAccepted,
    WorkerHello,
)
from common.messages.fields import Role
from services.controller.admission import check_gateway, check_name, check_worker
from services.controller.decode_placer import DecodePlacer
from services.controller.dispatcher import Dispatcher, Refusal, refuse
from services.controller.effects import (
    CoreEvent,
    Effect,
    Fact,
    FromPeer,
    MessageReceived,
    Note,
    PeerKey,
    Send,
    SendFailed,
    Tick,
)
from services.controller.lifecycle import RequestLifecycle
from services.controller.limits import ControllerLimits
from services.controller.liveness import Life, life_of
from services.controller.members import GatewayRecord, Members, WorkerRecord
from services.controller.request_book import RequestBook
from services.controller.strangers import LOG_AGAIN_SECONDS, TELL_AGAIN_SECONDS, Strangers


class ControllerCore:
    """All state of the controller. ``handle`` is the only mutator.

    ``host`` is our ``host_id()``: process ids of workers with the same one mean something here.
    """

    def __init__(self, limits: ControllerLimits, host: str, now: float) -> None:
        self.members = Members(host)
        self.book = RequestBook(self.members)
        self.started_at = now
        self._limits = limits
        self._dispatcher = Dispatcher(self.members, self.book, limits)
        self._decode_placer = DecodePlacer(self.members, self.book, limits)
        self._lifecycle = RequestLifecycle(self.book, limits, self.members)
        self._strangers = Strangers(TELL_AGAIN_SECONDS)
        self._refused = Strangers(LOG_AGAIN_SECONDS)
        self._progress_at = now

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Take one event and return what to do, in order."""
        if not self.book.requests and not self.members.has_work():
            self._progress_at = now
        match event:
            case MessageReceived(received):
                try:
                    return self._message(received.envelope, received.message, received.payload, now)
                except RemoteProtocolError as error:
                    facts = (("reason", str(error)), ("sender", received.envelope.sender))
                    cause = _cause(received.envelope, received.message)
                    return [Note("protocol_violation", cause, facts=facts, level="error")]
            case SendFailed(send):
                return self._send_failed(send, now)
            case Tick(gone_pids):
                return self._tick(gone_pids, now)

    def readiness(self, now: float) -> tuple[bool, str]:
        """Whether requests can be served now, and why not."""
        if missing := self._dispatcher.missing_role():
            return False, missing
        stalled = now - self._progress_at
        if stalled > self._limits.stall_seconds:
            return False, f"work is pending and no worker moved for {stalled:.0f} s"
        return True, ""

    def validate(self) -> None:
        """Check every sum of the state. Raises AssertionError: a bug of ours."""
        self.members.validate()
        self.book.validate()
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
            if not self._strangers.note_if_due(key, now):
                return []
            fenced = Fenced(epoch=envelope.epoch, message=reason)
            facts: tuple[Fact, ...] = (("sender", key[0]), ("reason", reason))
            return [Note("fenced", cause, facts=facts, level="warning"), Send(key, fenced, cause)]
        if isinstance(message, WorkerHello):
            return self._worker_hello(key, envelope, message, now)
        if isinstance(message, GatewayHello):
            return self._gateway_hello(key, message, cause, now)
        if (worker := self.members.workers.get(key)) is not None:
            worker.last_seen = now
            return self._from_worker(worker, envelope, message, now)
        if (gateway := self.members.gateways.get(key)) is not None:
            gateway.last_seen = now
            return self._from_gateway(gateway, envelope, message, payload, now)
        return self._from_stranger(key, message, cause, now)

    def _from_worker(
        self, worker: WorkerRecord, envelope: Envelope, message: FromPeer, now: float
    ) -> list[Effect]:
        key, cause = worker.key, _cause(envelope, message)
        match message:
            case Heartbeat():
                return self._heartbeat(worker, message, envelope, now)
            case DecodeRefused() if message.request_id not in self.book.requests:
                unknown = PlacementUnknown(request_id=message.request_id)
                note = Note("placement_unknown", cause, message.request_id)
                return [note, Send(key, unknown, cause)]
            case DecodeRefused():
                return self._decode_placer.decode_refused(key, message, cause, now)
            case DecodeStarted():
                return self._lifecycle.decode_started(key, message, cause, now)
            case RequestFinished():
                effects = self._lifecycle.finished(key, message, cause, now)
                return [*effects, *self._place_waiting(cause, now)]
            case RequestFailed():
                return self._request_failed(worker, message, cause, now)
            case KVIndexEvents() | RoleSwitched() | MigrationFailed():
                return []
            case Goodbye(reason=reason):
                told = f"worker {key[0]} left: {reason}"
                effects = self._lose_worker(worker, ErrorCode.SHUTTING_DOWN, told, cause, now)
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
                return self._dispatcher.submit(gateway, message, payload, cause, now)
            case CancelRequest() if message.request_id not in self.book.requests:
                return self._cancel_everywhere(message, cause)
            case CancelRequest():
                return self._lifecycle.cancel(key, message, cause, now)
            case Goodbye(reason=reason):
                return self._lose_gateway(gateway, f"it left: {reason}", cause, now)
            case (
                WorkerHello()
                | GatewayHello()
                | Heartbeat()
                | DecodeRefused()
                | DecodeStarted()
                | RequestFinished()
                | RequestFailed()
                | KVIndexEvents()
                | RoleSwitched()
                | MigrationFailed()
            ):
                raise RemoteProtocolError(f"gateway {key[0]} sent {type(message).__name__}")
            case _:
                assert_never(message)

    def _request_failed(
        self, worker: WorkerRecord, message: RequestFailed, cause: str, now: float
    ) -> list[Effect]:
        """Place a request elsewhere that the worker did not take in; another one has failed."""
        before = worker.state
        effects = self._dispatcher.place_refused(worker, message, cause, now)
        return [
            *_state_changed(worker, before, cause),
            *(effects or self._lifecycle.failed(worker.key, message, cause, now)),
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

    def _from_stranger(
        self, key: PeerKey, message: FromPeer, cause: str, now: float
    ) -> list[Effect]:
        facts: tuple[Fact, ...] = (("sender", key[0]),)
        effects: list[Effect] = []
        if isinstance(message, SubmitRequest):
            told = "the controller was just started and does not know this gateway yet"
            refusal = Refusal(ErrorCode.NO_WORKER, told, self._limits.retry_after_seconds)
            effects += refuse(key, message.request_id, refusal, cause)
        if not isinstance(message, Goodbye) and self._strangers.note_if_due(key, now):
            effects += [
                Note("hello_requested", cause, facts=facts),
                Send(key, HelloRequested(epoch=key[1]), cause),
            ]
        return effects

    def _refuse(self, key: PeerKey, refused: HelloRefused, cause: str, now: float) -> list[Effect]:
        """Refuse a hello each time it comes, and log it once in a while."""
        effects: list[Effect] = [Send(key, refused, cause)]
        if self._refused.note_if_due(key, now):
            facts: tuple[Fact, ...] = (("sender", key[0]), ("reason", refused.message))
            effects.insert(0, Note("hello_refused", cause, facts=facts, level="error"))
        return effects

    # ---- workers ---------------------------------------------------------------------------

    def _worker_hello(
        self, key: PeerKey, envelope: Envelope, hello: WorkerHello, now: float
    ) -> list[Effect]:
        cause = _cause(envelope, hello)
        refused = check_worker(self.members, key, hello)
        known = self.members.worker_named(key[0])
        if refused is None and known is not None:
            refused = check_name(known, (hello.peer.host, hello.peer.pid), self._limits, now)
        if refused is not None:
            return self._refuse(key, refused, cause, now)
        effects: list[Effect] = []
        if known is not None and known.key != key:
            told = f"worker {key[0]} was started anew"
            effects += self._lose_worker(known, ErrorCode.WORKER_DIED, told, cause, now)
        worker = self.members.workers.get(key)
        if worker is None:
            # After a restart of ours the worker keeps the generation that it has.
            worker = WorkerRecord(hello, max(1, envelope.role_generation), now)
            self.members.workers[key] = worker
            joined = (
                ("worker", key[0]),
                ("pid", hello.peer.pid),
                ("role", hello.peer.role),
                ("num_blocks", hello.num_blocks),
            )
            effects.append(Note("worker_joined", cause, facts=joined))
            others = [other for other in self.members.workers if other != key]
            effects += [Send(other, PeerJoined(peer=hello.peer), cause) for other in others]
        worker.last_seen = now
        accepted = WorkerAccepted(
            role=worker.peer.role,
            role_generation=worker.role_generation,
            heartbeat_seconds=self._limits.heartbeat_seconds,
            peers=tuple(w.peer for other, w in self.members.workers.items() if other != key),
        )
        effects.append(Send(key, accepted, cause))
        return [*effects, *self._place_waiting(cause, now)]

    def _heartbeat(
        self, worker: WorkerRecord, heartbeat: Heartbeat, envelope: Envelope, now: float
    ) -> list[Effect]:
        cause = _cause(envelope, heartbeat)
        before = worker.state
        if worker.load is None or worker.load.num_steps != heartbeat.load.num_steps:
            self._progress_at = now
        worker.kv = heartbeat.kv
        worker.load = heartbeat.load
        worker.mode = heartbeat.mode
        worker.rates = heartbeat.rates
        worker.assigned_tokens = 0
        worker.replaced_blocks = 0
        worker.is_draining = heartbeat.is_draining
        worker.is_quarantined = heartbeat.is_quarantined
        worker.is_suspect = False
        pairs = _pairs_changed(worker, heartbeat, cause)
        worker.take_pairs(heartbeat.pairs)
        answer = Send(worker.key, HeartbeatAnswered(sequence=envelope.sequence), cause)
        return [
            answer,
            *pairs,
            *_state_changed(worker, before, cause),
            *self._place_waiting(cause, now),
        ]

    def _lose_worker(
        self, worker: WorkerRecord, code: ErrorCode, reason: str, cause: str, now: float
    ) -> list[Effect]:
        """Take a worker out: its requests end by name and the others learn of it."""
        key = worker.key
        return [
            *self._remove_worker(worker, reason, cause),
            *self._lifecycle.worker_gone(key, code, reason, cause, now),
        ]

    def _remove_worker(self, worker: WorkerRecord, reason: str, cause: str) -> list[Effect]:
        key = worker.key
        del self.members.workers[key]
        self.members.bury(key, reason)
        facts: tuple[Fact, ...] = (
            ("worker", key[0]),
            ("pid", worker.peer.pid),
            ("reason", reason),
        )
        left = PeerLeft(worker_id=worker.peer.worker_id, epoch=key[1], reason=reason)
        return [
            Note("worker_left", cause, facts=facts, level="warning"),
            *(Send(other, left, cause) for other in self.members.workers),
        ]

    # ---- gateways --------------------------------------------------------------------------

    def _gateway_hello(
        self, key: PeerKey, hello: GatewayHello, cause: str, now: float
    ) -> list[Effect]:
        facts: tuple[Fact, ...] = (("gateway", key[0]), ("pid", hello.pid), ("url", hello.url))
        refused = check_gateway(self.members, key, hello)
        known = self.members.gateway_named(key[0])
        if refused is None and known is not None:
            refused = check_name(known, (hello.host, hello.pid), self._limits, now)
        if refused is not None:
            return self._refuse(key, refused, cause, now)
        effects: list[Effect] = []
        if known is not None and known.key != key:
            effects += self._lose_gateway(known, "it was started anew", cause, now)
        if key not in self.members.gateways:
            self.members.gateways[key] = GatewayRecord(hello, now)
            effects.append(Note("gateway_joined", cause, facts=facts))
        accepted = GatewayAccepted(heartbeat_seconds=self._limits.heartbeat_seconds)
        return [*effects, Send(key, accepted, cause)]

    def _lose_gateway(
        self, gateway: GatewayRecord, reason: str, cause: str, now: float
    ) -> list[Effect]:
        key = gateway.key
        del self.members.gateways[key]
        told = f"gateway {key[0]} is gone: {reason}"
        self.members.bury(key, told)
        facts: tuple[Fact, ...] = (("gateway", key[0]), ("reason", reason))
        note = Note("gateway_left", cause, facts=facts, level="warning")
        return [note, *self._lifecycle.gateway_gone(key, told, cause, now)]

    def _cluster_state(self, now: float) -> ClusterState:
        is_ready, reason = self.readiness(now)
        return ClusterState(
            is_ready=is_ready,
            reason=reason,
            num_prefill=self.members.num_ready(Role.PREFILL),
            num_decode=self.members.num_ready(Role.DECODE),
            num_combined=self.members.num_ready(Role.COMBINED),
            max_request_tokens=self.members.max_request_tokens(),
        )

    # ---- time and failures -----------------------------------------------------------------

    def _tick(self, gone_pids: frozenset[int], now: float) -> list[Effect]:
        cause = "tick"
        effects: list[Effect] = []
        for worker in list(self.members.workers.values()):
            is_local = self.members.is_local(worker)
            is_gone = is_local and worker.peer.pid in gone_pids
            life = life_of(now - worker.last_seen, self._limits, is_local=is_local, is_gone=is_gone)
            if life.is_dead:
                told = f"worker {worker.peer.worker_id} died: {life.reason}"
                effects += self._lose_worker(worker, ErrorCode.WORKER_DIED, told, cause, now)
            else:
                before = worker.state
                worker.is_suspect = life is Life.SUSPECT
                effects += _state_changed(worker, before, cause)
        for gateway in list(self.members.gateways.values()):
            is_local = self.members.is_local(gateway)
            is_gone = is_local and gateway.hello.pid in gone_pids
            life = life_of(
                now - gateway.last_seen, self._limits, is_local=is_local, is_gone=is_gone
            )
            if life.is_dead:
                effects += self._lose_gateway(gateway, life.reason, cause, now)
        effects += self._lifecycle.tick(cause, now)
        return [*effects, *self._place_waiting(cause, now)]

    def _place_waiting(self, cause: str, now: float) -> list[Effect]:
        """Place what waits: decodes that hold a prefill side's blocks before prompts."""
        decodes = self._decode_placer.retry_waiting(cause, now)
        return [*decodes, *self._dispatcher.dispatch_queued(cause, now)]

    def _send_failed(self, send: Send, now: float) -> list[Effect]:
        """Take a peer that cannot be reached for dead; what was for it goes elsewhere or ends."""
        cause, key = send.cause, send.peer
        worker = self.members.workers.get(key)
        told = f"worker {key[0]} was not reached with {type(send.message).__name__}"
        effects = [] if worker is None else self._remove_worker(worker, told, cause)
        if isinstance(send.message, PlaceRequest):
            effects += self._dispatcher.place_failed(send.message, cause, now)
        effects += self._lifecycle.worker_gone(key, ErrorCode.WORKER_DIED, told, cause, now)
        if (gateway := self.members.gateways.get(key)) is not None:
            told = f"it was not reached with {type(send.message).__name__}"
            effects += self._lose_gateway(gateway, told, cause, now)
        return [*effects, *self._place_waiting(cause, now)]


def _state_changed(worker: WorkerRecord, before: str, cause: str) -> list[Effect]:
    if worker.state == before:
        return []
    facts = (("worker", worker.peer.worker_id), ("before", before), ("state", worker.state))
    return [Note("worker_state_changed", cause, facts=facts, level="warning")]


def _pairs_changed(worker: WorkerRecord, heartbeat: Heartbeat, cause: str) -> list[Effect]:
    """Note each pair that stops or begins to work."""
    return [
        Note(
            "pair_broken" if pair.reason else "pair_mended",
            cause,
            facts=(("prefill", worker.key[0]), ("decode", pair.worker_id), ("reason", pair.reason)),
            level="warning" if pair.reason else "info",
        )
        for pair in heartbeat.pairs
        if bool(pair.reason) != bool(worker.trouble_with((pair.worker_id, pair.epoch)))
    ]


def _cause(envelope: Envelope, message: FromPeer) -> str:
    return f"{type(message).__name__} {envelope.sender}/{envelope.sequence}"
