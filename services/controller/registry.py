"""Who joins and who leaves: hellos, goodbyes, deaths, and those who are no members."""

from common.errors import ErrorCode
from common.messages.codec import Envelope
from common.messages.control import (
    Fenced,
    GatewayAccepted,
    GatewayHello,
    Goodbye,
    HelloRefused,
    HelloRequested,
    PeerJoined,
    PeerLeft,
    SubmitRequest,
    WorkerAccepted,
    WorkerHello,
)
from services.controller.admission import check_gateway, check_name, check_worker
from services.controller.effects import Effect, Fact, FromPeer, Note, PeerKey, Send
from services.controller.lifecycle import RequestLifecycle
from services.controller.limits import ControllerLimits
from services.controller.liveness import Life, life_of
from services.controller.members import GatewayRecord, Members, WorkerRecord
from services.controller.prefixes import Prefixes
from services.controller.refusal import Refusal, refuse
from services.controller.roles import Roles
from services.controller.strangers import LOG_AGAIN_SECONDS, TELL_AGAIN_SECONDS, Strangers


class Registry:
    """Takes incarnations into ``members`` and out again, and tells everybody concerned."""

    def __init__(
        self,
        members: Members,
        lifecycle: RequestLifecycle,
        roles: Roles,
        prefixes: Prefixes,
        limits: ControllerLimits,
    ) -> None:
        self._members = members
        self._lifecycle = lifecycle
        self._roles = roles
        self._prefixes = prefixes
        self._limits = limits
        self._strangers = Strangers(TELL_AGAIN_SECONDS)
        self._refused = Strangers(LOG_AGAIN_SECONDS)

    # ---- workers ---------------------------------------------------------------------------

    def worker_hello(
        self, key: PeerKey, envelope: Envelope, hello: WorkerHello, cause: str, now: float
    ) -> list[Effect]:
        """Register a worker, or answer one that is registered again, or refuse it."""
        refused = check_worker(self._members, key, hello)
        known = self._members.worker_named(key[0])
        if refused is None and known is not None:
            refused = check_name(known, (hello.peer.host, hello.peer.pid), self._limits, now)
        if refused is not None:
            return self._refuse(key, refused, cause, now)
        effects: list[Effect] = []
        if known is not None and known.key != key:
            told = f"worker {key[0]} was started anew"
            effects += self.lose_worker(known, ErrorCode.WORKER_DIED, told, cause, now)
        worker = self._members.workers.get(key)
        is_new = worker is None
        if worker is None:
            # After a restart of ours the worker keeps the generation that it has.
            worker = WorkerRecord.of(hello, max(1, envelope.role_generation), now)
            self._members.add_worker(worker)
            joined = (
                ("worker", key[0]),
                ("pid", hello.peer.pid),
                ("role", hello.peer.role),
                ("num_blocks", hello.num_blocks),
            )
            effects.append(Note("worker_joined", cause, facts=joined))
            others = [other for other in self._members.workers if other != key]
            effects += [Send(other, PeerJoined(peer=hello.peer), cause) for other in others]
        else:
            generation = max(1, envelope.role_generation)
            effects += self._roles.told(worker, hello.peer.role, generation, cause, now)
        worker.last_seen = now
        accepted = WorkerAccepted(
            role=worker.role,
            role_generation=worker.role_generation,
            heartbeat_seconds=self._limits.heartbeat_seconds,
            peers=tuple(w.peer for other, w in self._members.workers.items() if other != key),
        )
        worker.accepted()
        effects.append(Send(key, accepted, cause))
        return [*effects, *(self._roles.resume_orders(worker, cause, now) if is_new else ())]

    def lose_worker(
        self, worker: WorkerRecord, code: ErrorCode, reason: str, cause: str, now: float
    ) -> list[Effect]:
        """Take a worker out: its requests end by name and the others learn of it."""
        key = worker.key
        return [
            *self.remove_worker(worker, reason, cause),
            *self._lifecycle.worker_gone(key, code, reason, cause, now),
        ]

    def remove_worker(self, worker: WorkerRecord, reason: str, cause: str) -> list[Effect]:
        """Take a worker out and tell the others; what becomes of its requests is not said here."""
        key = worker.key
        self._members.remove_worker(key, reason)
        self._prefixes.drop(key)
        facts: tuple[Fact, ...] = (
            ("worker", key[0]),
            ("pid", worker.peer.pid),
            ("reason", reason),
        )
        left = PeerLeft(worker_id=worker.peer.worker_id, epoch=key[1], reason=reason)
        return [
            Note("worker_left", cause, facts=facts, level="warning"),
            *(Send(other, left, cause) for other in self._members.workers),
        ]

    # ---- gateways --------------------------------------------------------------------------

    def gateway_hello(
        self, key: PeerKey, hello: GatewayHello, cause: str, now: float
    ) -> list[Effect]:
        """Register a gateway, or answer one again, or refuse it."""
        facts: tuple[Fact, ...] = (("gateway", key[0]), ("pid", hello.pid), ("url", hello.url))
        refused = check_gateway(self._members, key, hello)
        known = self._members.gateway_named(key[0])
        if refused is None and known is not None:
            refused = check_name(known, (hello.host, hello.pid), self._limits, now)
        if refused is not None:
            return self._refuse(key, refused, cause, now)
        effects: list[Effect] = []
        if known is not None and known.key != key:
            effects += self.lose_gateway(known, "it was started anew", cause, now)
        if key not in self._members.gateways:
            self._members.gateways[key] = GatewayRecord(hello, now)
            effects.append(Note("gateway_joined", cause, facts=facts))
        accepted = GatewayAccepted(heartbeat_seconds=self._limits.heartbeat_seconds)
        return [*effects, Send(key, accepted, cause)]

    def lose_gateway(
        self, gateway: GatewayRecord, reason: str, cause: str, now: float
    ) -> list[Effect]:
        """Take a gateway out and cancel its requests."""
        key = gateway.key
        del self._members.gateways[key]
        told = f"gateway {key[0]} is gone: {reason}"
        self._members.bury(key, told)
        facts: tuple[Fact, ...] = (("gateway", key[0]), ("reason", reason))
        note = Note("gateway_left", cause, facts=facts, level="warning")
        return [note, *self._lifecycle.gateway_gone(key, told, cause, now)]

    # ---- no members ------------------------------------------------------------------------

    def fence(self, key: PeerKey, reason: str, cause: str, now: float) -> list[Effect]:
        """Tell an incarnation that was declared dead."""
        if not self._strangers.note_if_due(key, now):
            return []
        facts: tuple[Fact, ...] = (("sender", key[0]), ("reason", reason))
        fenced = Fenced(epoch=key[1], message=reason)
        return [Note("fenced", cause, facts=facts, level="warning"), Send(key, fenced, cause)]

    def from_stranger(
        self, key: PeerKey, message: FromPeer, cause: str, now: float
    ) -> list[Effect]:
        """Ask one that is not known for its hello; a request of it is refused."""
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

    # ---- time ------------------------------------------------------------------------------

    def tick(self, gone_pids: frozenset[int], cause: str, now: float) -> list[Effect]:
        """Judge who lives."""
        members, limits = self._members, self._limits
        effects: list[Effect] = []
        for worker in list(members.workers.values()):
            is_local = members.is_local(worker)
            is_gone = is_local and worker.peer.pid in gone_pids
            life = life_of(now - worker.last_seen, limits, is_local=is_local, is_gone=is_gone)
            if life.is_dead:
                told = f"worker {worker.peer.worker_id} died: {life.reason}"
                effects += self.lose_worker(worker, ErrorCode.WORKER_DIED, told, cause, now)
                continue
            before = worker.state
            if worker.is_suspect is not (life is Life.SUSPECT):
                worker.is_suspect = not worker.is_suspect
            effects += worker.state_note(before, cause)
        for gateway in list(members.gateways.values()):
            is_local = members.is_local(gateway)
            is_gone = is_local and gateway.hello.pid in gone_pids
            life = life_of(now - gateway.last_seen, limits, is_local=is_local, is_gone=is_gone)
            if life.is_dead:
                effects += self.lose_gateway(gateway, life.reason, cause, now)
        return effects
