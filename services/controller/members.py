"""Who is in the cluster: workers and gateways by incarnation, and which incarnations are dead."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from common.ids import WorkerId
from common.messages.control import GatewayHello, WorkerHello
from common.messages.fields import (
    MAX_INCARNATIONS,
    KVCounts,
    Mode,
    PairStatus,
    PeerInfo,
    Role,
    WorkerIncarnation,
    WorkerLoad,
    WorkerRates,
    WorkerState,
    WorkerTotals,
)
from common.scheduler.decode_cost import DecodeCost
from services.controller.effects import Effect, Note, PeerKey
from services.controller.policy.cluster_view import ClusterView
from services.controller.policy.estimates import Objectives
from services.controller.policy.views import Incarnation, Pairing, WorkerView

MAX_DEAD_KEPT = 4096
AHEAD_SECONDS = 0.5
"""How much computing a worker is given ahead, by the rate that it measured."""
AHEAD_STEPS = 2
"""The same in steps of its whole token budget; the larger counts."""

Process = tuple[str, int]
"""A process of the cluster: its ``host_id()`` and its id there."""


@dataclass(slots=True)
class Changes:
    """What changed in the records of one cluster: they all write here, so that nobody need look.

    ``num_standing`` counts changes of what decides who can serve. ``stale`` are the records whose
    view policies have not been shown since they changed.
    """

    num_standing: int = 0
    stale: "dict[int, WorkerRecord]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the order of this number, counted since the worker was accepted, has it do."""

    number: int
    num_tokens: int
    num_reads: int


@dataclass(slots=True)
class WorkerRecord:
    """One live incarnation of a worker.

    ``peer`` says how others reach it, with the role that it was told to have; ``held_role`` is the
    role that it says it has. ``role_told_at`` is when it was told one that it has not confirmed.
    ``help`` is the role whose work it may do beside its own; ``stands_in`` says that it does both
    since nobody else has the other.

    ``kv`` and ``load`` are its last heartbeat's. ``assignments`` are the orders that had not come
    to it then, ``assigned_tokens`` and ``assigned_reads`` the prompt tokens and the tokens to read
    from the store in them. ``replaced_blocks`` are the blocks of refused decodes that were placed
    here again since. ``placed_blocks`` are those of requests whose decode was placed here and has
    not started: reserved already, or soon; ``num_placed`` are those requests. ``pairs`` are a
    prefill worker's with decode workers; ``pairings``, ``link_rates`` and ``troubles`` are the
    same by incarnation. ``changes`` hears of them all.
    """

    hello: WorkerHello
    peer: PeerInfo
    held_role: Role
    role_generation: int
    last_seen: float
    role_told_at: float | None = None
    help: Role | None = None
    stands_in: bool = False
    kv: KVCounts | None = None
    load: WorkerLoad | None = None
    mode: Mode = Mode.BALANCED
    rates: WorkerRates | None = None
    totals: WorkerTotals | None = None
    is_suspect: bool = False
    is_draining: bool = False
    is_drain_ordered: bool = False
    drain_told_at: float = 0.0
    is_quarantined: bool = False
    num_orders: int = 0
    assignments: deque[Assignment] = field(default_factory=deque)
    assigned_tokens: int = 0
    assigned_reads: int = 0
    replaced_blocks: int = 0
    placed_blocks: int = 0
    num_placed: int = 0
    pairs: tuple[PairStatus, ...] = ()
    pairings: Mapping[Incarnation, Pairing] = field(default_factory=dict)
    link_rates: Mapping[Incarnation, float] = field(default_factory=dict)
    troubles: Mapping[PeerKey, str] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)

    @classmethod
    def of(cls, hello: WorkerHello, role_generation: int, now: float) -> "WorkerRecord":
        """Take a worker in as its hello says."""
        return cls(hello, hello.peer, hello.peer.role, role_generation, now)

    def __setattr__(self, name: str, value: object) -> None:
        changes: Changes | None = getattr(self, "changes", None)  # it is the last to be set
        if changes is not None:
            if name in _STANDING and getattr(self, name) != value:
                changes.num_standing += 1
            if name not in _UNSEEN:
                changes.stale[id(self)] = self
        object.__setattr__(self, name, value)

    @property
    def role(self) -> Role:
        """What it was told to serve."""
        return self.peer.role

    @property
    def key(self) -> Incarnation:
        """Its incarnation."""
        return (self.peer.worker_id, self.peer.epoch)

    @property
    def process(self) -> Process:
        """Which process it is."""
        return (self.peer.host, self.peer.pid)

    @property
    def state(self) -> WorkerState:
        """The worst of what is known."""
        if self.is_quarantined:
            return WorkerState.QUARANTINED
        if self.is_suspect:
            return WorkerState.SUSPECT
        is_draining = self.is_draining or self.is_drain_ordered
        return WorkerState.DRAINING if is_draining else WorkerState.READY

    def state_note(self, before: WorkerState, cause: str) -> list[Effect]:
        """Return the note of a state that is not what it was before."""
        if self.state is before:
            return []
        facts = (("worker", self.peer.worker_id), ("before", before), ("state", self.state))
        return [Note("worker_state_changed", cause, facts=facts, level="warning")]

    def accepted(self) -> None:
        """It was told that it is accepted, and counts its orders anew."""
        self.num_orders = 0
        self.assignments.clear()
        self.assigned_tokens = self.assigned_reads = 0

    def assign(self, num_tokens: int, num_reads: int) -> None:
        """Note an order to compute so much of a prompt, and to read so much from the store."""
        self.num_orders += 1
        self.assignments.append(Assignment(self.num_orders, num_tokens, num_reads))
        self.assigned_tokens += num_tokens
        self.assigned_reads += num_reads

    def has_come(self, num_orders: int) -> None:
        """So many orders were known to it when it told its load, which counts what they ask for."""
        while self.assignments and self.assignments[0].number <= num_orders:
            assignment = self.assignments.popleft()
            self.assigned_tokens -= assignment.num_tokens
            self.assigned_reads -= assignment.num_reads

    @property
    def can_take_prompt(self) -> bool:
        """Whether it is to get another prompt now.

        A prompt is bound to a worker late: the worker gets it when it has little left to compute,
        and always when it has nothing. Until then the controller can still choose another one. One
        that decodes computes prompts beside, in small steps: there time alone counts.
        """
        uncomputed = self.load.uncomputed_tokens if self.load else 0
        rate = self.rates.prefill_tokens_per_second if self.rates else 0.0
        steps = 0 if self.role is Role.DECODE and rate else AHEAD_STEPS
        ahead = max(steps * self.hello.max_num_batched_tokens, AHEAD_SECONDS * rate, 1)
        return uncomputed + self.assigned_tokens < ahead

    def has_room_now(self, num_blocks: int) -> bool:
        """Whether a reservation made now would find room, as far as is known.

        Other than in ``view``, requests whose prefill has not asked for room yet do not count.
        """
        held = self.kv.referenced + self.kv.in_transfer if self.kv else 0
        return self.hello.num_blocks - held - self.replaced_blocks >= num_blocks

    def view(self) -> WorkerView:
        """What placement sees. In-transfer blocks and placed ones are largely the same ones."""
        in_transfer = self.kv.in_transfer if self.kv else 0
        referenced = self.kv.referenced if self.kv else 0
        uncomputed = self.load.uncomputed_tokens if self.load else 0
        rates = self.rates
        return WorkerView(
            worker_id=self.peer.worker_id,
            epoch=self.peer.epoch,
            role=self.role,
            uncomputed_tokens=uncomputed + self.assigned_tokens,
            total_blocks=self.hello.num_blocks,
            used_blocks=referenced + max(in_transfer, self.placed_blocks),
            pairings=self.pairings,
            may_prefill=self.stands_in or self.help is Role.PREFILL,
            may_decode=self.stands_in or self.help is Role.DECODE,
            can_take_prompt=self.can_take_prompt,
            is_draining=self.is_draining or self.is_drain_ordered,
            has_heartbeat=self.load is not None,
            num_decoding=self.load.num_decoding if self.load else 0,
            num_decode_tokens=self.load.num_decode_tokens if self.load else 0,
            num_unfinished=self.num_placed + (self.load.num_decoding if self.load else 0),
            max_num_seqs=self.hello.max_num_seqs,
            max_num_batched_tokens=self.hello.max_num_batched_tokens,
            block_bytes=self.hello.block_bytes,
            prefill_rate=rates.prefill_tokens_per_second if rates else 0.0,
            decode_step_seconds=rates.decode_step_seconds if rates else 0.0,
            decode_rate=rates.decode_tokens_per_second if rates else 0.0,
            decode_cost=_decode_cost(rates),
            link_rates=self.link_rates,
            devices=frozenset(self.hello.devices),
            host=self.peer.host,
            has_store=self.hello.has_store,
            read_queue_tokens=(self.load.read_queue_tokens if self.load else 0)
            + self.assigned_reads,
            read_rate=rates.read_tokens_per_second if rates else 0.0,
        )

    def take_pairs(self, pairs: tuple[PairStatus, ...]) -> None:
        """Note how the pairs of this prefill worker stand."""
        self.pairs = pairs
        self.link_rates = {
            (pair.worker_id, pair.epoch): pair.bytes_per_second
            for pair in pairs
            if pair.bytes_per_second
        }
        self.pairings = {(pair.worker_id, pair.epoch): _pairing(pair) for pair in pairs}
        self.troubles = {(pair.worker_id, pair.epoch): pair.reason for pair in pairs}

    def trouble_with(self, decode: PeerKey) -> str:
        """Say why this worker cannot hand over to a decode worker; empty when it may."""
        return self.troubles.get(decode, "")


_STANDING = frozenset(
    (
        *("peer", "stands_in", "help", "troubles"),
        *("is_suspect", "is_draining", "is_drain_ordered", "is_quarantined"),
    )
)
_UNSEEN = frozenset(("last_seen", "changes"))


def _pairing(pair: PairStatus) -> Pairing:
    if pair.reason:
        return Pairing.BROKEN
    return Pairing.WORKS if pair.transport else Pairing.UNKNOWN


@dataclass(slots=True)
class GatewayRecord:
    """One live incarnation of a gateway."""

    hello: GatewayHello
    last_seen: float
    num_streams: int = 0
    is_draining: bool = False

    @property
    def key(self) -> PeerKey:
        """Its incarnation."""
        return (self.hello.gateway_id, self.hello.epoch)

    @property
    def process(self) -> Process:
        """Which process it is."""
        return (self.hello.host, self.hello.pid)


@dataclass(slots=True)
class Members:
    """All live incarnations, in the order of their first hello.

    ``cluster`` are the ready workers as policies see them, as fresh as the last ``view``.
    """

    host: str
    objectives: Objectives = field(default_factory=Objectives)
    workers: dict[PeerKey, WorkerRecord] = field(default_factory=dict)
    gateways: dict[PeerKey, GatewayRecord] = field(default_factory=dict)
    cluster: ClusterView = field(init=False)
    _dead: OrderedDict[PeerKey, str] = field(default_factory=OrderedDict)
    _changes: Changes = field(default_factory=Changes)
    _missing: tuple[int, str] = (-1, "")
    _incarnations: tuple[WorkerIncarnation, ...] | None = None

    def __post_init__(self) -> None:
        self.cluster = ClusterView(objectives=self.objectives)

    def add_worker(self, worker: WorkerRecord) -> None:
        """Take a worker in."""
        self.workers[worker.key] = worker
        self._incarnations = None
        worker.changes = self._changes
        self._changes.stale[id(worker)] = worker
        self._changes.num_standing += 1

    def standing(self) -> int:
        """Return what is another value whenever it may have changed who can serve."""
        return self._changes.num_standing

    def view(self) -> ClusterView:
        """Return the ready workers as they are now."""
        for worker in self._changes.stale.values():
            is_here = self.workers.get(worker.key) is worker
            if is_here and worker.state is WorkerState.READY:
                self.cluster.update(worker.view())
            elif is_here:
                self.cluster.remove(worker.key)
        self._changes.stale.clear()
        return self.cluster

    def remove_worker(self, key: PeerKey, reason: str) -> None:
        """Take a dead worker out and remember it."""
        worker = self.workers.pop(key)
        self._incarnations = None
        self._changes.num_standing += 1
        self.cluster.remove(worker.key)
        self.bury(key, reason)

    def worker_named(self, worker_id: str) -> WorkerRecord | None:
        """Return the live incarnation of a worker."""
        return next((w for key, w in self.workers.items() if key[0] == worker_id), None)

    def gateway_named(self, gateway_id: str) -> GatewayRecord | None:
        """Return the live incarnation of a gateway."""
        return next((g for key, g in self.gateways.items() if key[0] == gateway_id), None)

    def is_member(self, key: PeerKey) -> bool:
        """Whether this incarnation is registered."""
        return key in self.workers or key in self.gateways

    def ready_workers(self) -> Iterator[WorkerRecord]:
        """Yield the workers that may get new work."""
        return (w for w in self.workers.values() if w.state is WorkerState.READY)

    def has_work(self) -> bool:
        """Whether any worker says that it has something to compute."""
        loads = (worker.load for worker in self.workers.values())
        return any(
            load is not None and (load.num_waiting or load.num_prefilling or load.num_decoding)
            for load in loads
        )

    def num_ready(self, role: Role) -> int:
        """Count the ready workers of a role."""
        return sum(worker.role is role for worker in self.ready_workers())

    def num_able(self, role: Role) -> int:
        """Count the ready workers that may do a role's work."""
        return sum(w.role in (role, Role.COMBINED) or w.stands_in for w in self.ready_workers())

    def decoders(self) -> list[WorkerRecord]:
        """Return the workers to which a prefill side may hand a decode over, ready or not."""
        return [
            worker
            for worker in self.workers.values()
            if worker.role is Role.DECODE or worker.stands_in or worker.help is Role.DECODE
        ]

    def max_request_tokens(self) -> int:
        """Tokens of the longest choice, prompt and output, that a ready worker can decode.

        The last token needs no room: nothing is computed after it. 0 when no worker can decode.
        """
        return max(
            (
                worker.hello.num_blocks * worker.hello.block_size + 1
                for worker in self.ready_workers()
                if worker.role is not Role.PREFILL or worker.stands_in
            ),
            default=0,
        )

    def missing_role(self) -> str:
        """Say which role has no ready worker, or which pair does not work, if so."""
        standing = self.standing()
        if self._missing[0] != standing:
            self._missing = (standing, self._find_missing_role())
        return self._missing[1]

    def _find_missing_role(self) -> str:
        missing = [role for role in (Role.PREFILL, Role.DECODE) if not self.num_able(role)]
        if missing:
            return f"no {' and no '.join(missing)} worker is ready"
        if any(w.role is Role.COMBINED or w.stands_in for w in self.ready_workers()):
            return ""
        return self.why_unpaired()

    def why_unpaired(self) -> str:
        """Say why no ready prefill worker can hand over to a ready decode worker, if so."""
        ready = list(self.ready_workers())
        decodes = [worker for worker in ready if worker.role is Role.DECODE]
        told = ""
        for prefill in ready:
            if prefill.role is not Role.PREFILL:
                continue
            for decode in decodes:
                trouble = prefill.trouble_with(decode.key)
                if not trouble:
                    return ""
                told = told or f"{prefill.key[0]} cannot hand over to {decode.key[0]}: {trouble}"
        return told

    def incarnations(self) -> tuple[WorkerIncarnation, ...]:
        """Return the workers that live, as many as a message may hold."""
        if self._incarnations is None:
            keys = islice(self.workers, MAX_INCARNATIONS)
            self._incarnations = tuple(
                WorkerIncarnation(worker_id=WorkerId(name), epoch=epoch) for name, epoch in keys
            )
        return self._incarnations

    def bury(self, key: PeerKey, reason: str) -> None:
        """Remember a dead incarnation; it is fenced when it speaks again."""
        self._dead[key] = reason
        while len(self._dead) > MAX_DEAD_KEPT:
            self._dead.popitem(last=False)

    def death_of(self, key: PeerKey) -> str | None:
        """Return why an incarnation is dead, or None when it is not known to be."""
        return self._dead.get(key)

    def is_local(self, member: WorkerRecord | GatewayRecord) -> bool:
        """Whether the member's process runs where we see its process id."""
        return member.process[0] == self.host

    def local_pids(self) -> frozenset[int]:
        """Return the process ids whose life can be watched here."""
        members: list[WorkerRecord | GatewayRecord]
        members = [*self.workers.values(), *self.gateways.values()]
        return frozenset(one.process[1] for one in members if self.is_local(one))

    def validate(self) -> None:
        """Check that keys and names fit. Raises AssertionError: a bug of ours."""
        for key, worker in self.workers.items():
            assert key == worker.key, key
            assert key not in self._dead, key
            assert worker.assigned_tokens >= 0 <= worker.assigned_reads, key
        for key, gateway in self.gateways.items():
            assert key == gateway.key, key
            assert key not in self._dead, key
        names = [key[0] for key in (*self.workers, *self.gateways)]
        assert len(names) == len(set(names)), names


def _decode_cost(rates: WorkerRates | None) -> DecodeCost:
    if rates is None:
        return DecodeCost()
    return DecodeCost(
        rates.decode_base_seconds, rates.decode_seconds_per_sequence, rates.decode_seconds_per_token
    )
