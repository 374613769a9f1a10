"""Who may use a link next: model traffic first, KV traffic what is left and a floor.

Theory of operation (papers: DualPath 4.3; priorities and a weighted rest, as InfiniBand arbitrates
its virtual lanes). A transfer waits as a *ticket* and passes in *quanta*. The link carries one
quantum at a time, each for as long as its bytes take at the link's rate. Whenever it is free and
somebody waits, the next quantum begins:

- one of ``MODEL`` while such a ticket waits, else one of ``KV``, in the order of the offers;
- but while both wait, every quantum of ``MODEL`` credits ``KV`` with its share, ``KV_FLOOR``, and
  once that pays for the quantum at the head of ``KV``, it is next.

So a quantum of ``MODEL`` waits for at most one of ``KV``, and ``KV`` gets at least its share.
The link is a token bucket of ``burst_bytes``: while idle it saves up so much time, which makes up
for the gaps between a caller's transfers. In no span pass more bytes than rate x time, and a burst.
Nobody need call in time: what waits passes on the link's own time line, which is caught up with.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

KV_FLOOR = 0.01
"""The share of a link that KV traffic gets however much model traffic there is."""


class TrafficClass(StrEnum):
    """What bytes are moved for."""

    MODEL = "model"
    """A step waits for them: exchanges between ranks, activations, weights."""
    KV = "kv"
    """Blocks of KV: only their own request waits for them."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One transfer's place in the queue of its class; only the arbiter changes it.

    ``passed_at`` is the moment at which its last byte has passed, None while bytes of it wait.
    """

    traffic_class: TrafficClass
    waiting_bytes: int
    offered_at: float
    passed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Quantum:
    """Bytes of one ticket that the link carries from ``begins_at`` until ``ends_at``."""

    ticket: Ticket
    num_bytes: int
    begins_at: float
    ends_at: float


class LinkArbiter:
    """One link of a fixed rate. Time is an argument, in seconds, and never runs backwards."""

    def __init__(self, bytes_per_second: float, quantum_bytes: int, burst_bytes: int) -> None:
        if bytes_per_second <= 0 or quantum_bytes < 1 or burst_bytes < 0:
            raise ValueError(
                f"a link of {bytes_per_second} B/s with quanta of {quantum_bytes} B and bursts of "
                f"{burst_bytes} B moves nothing"
            )
        self.bytes_per_second = bytes_per_second
        self.quantum_bytes = quantum_bytes
        self._burst_seconds = burst_bytes / bytes_per_second
        self._queues: dict[TrafficClass, deque[Ticket]] = {name: deque() for name in TrafficClass}
        self._free_at = -inf
        self._kv_credit = 0.0

    def offer(self, traffic_class: TrafficClass, num_bytes: int, now: float) -> Ticket:
        """Let a transfer wait for its turn; one of no bytes has passed at once.

        Call ``advance`` before, or this one may overtake what should have begun.
        """
        ticket = Ticket(traffic_class, num_bytes, now)
        if num_bytes > 0:
            self._queues[traffic_class].append(ticket)
        else:
            ticket.passed_at = now
        return ticket

    def advance(self, now: float) -> Sequence[Quantum]:
        """Let begin what may begin by ``now``; return the quanta in their order."""
        begun: list[Quantum] = []
        while self._free_at <= now and (traffic_class := self._next_class()) is not None:
            begun.append(self._begin(traffic_class))
        return begun

    @property
    def next_at(self) -> float:
        """When ``advance`` can let something begin; infinity while nothing waits."""
        return self._free_at if any(self._queues.values()) else inf

    @property
    def num_waiting(self) -> int:
        """Tickets of which bytes wait."""
        return sum(len(queue) for queue in self._queues.values())

    def _next_class(self) -> TrafficClass | None:
        kv = self._queues[TrafficClass.KV]
        if not self._queues[TrafficClass.MODEL]:
            return TrafficClass.KV if kv else None
        if kv and self._kv_credit >= self._head_bytes(kv):
            return TrafficClass.KV
        return TrafficClass.MODEL

    def _head_bytes(self, queue: deque[Ticket]) -> int:
        return min(self.quantum_bytes, queue[0].waiting_bytes)

    def _begin(self, traffic_class: TrafficClass) -> Quantum:
        queue = self._queues[traffic_class]
        ticket, num_bytes = queue[0], self._head_bytes(queue)
        begins_at = max(self._free_at, ticket.offered_at - self._burst_seconds)
        self._free_at = begins_at + num_bytes / self.bytes_per_second
        self._account(traffic_class, num_bytes)
        ticket.waiting_bytes -= num_bytes
        if ticket.waiting_bytes == 0:
            queue.popleft()
            ticket.passed_at = self._free_at
        return Quantum(ticket, num_bytes, begins_at, self._free_at)

    def _account(self, traffic_class: TrafficClass, num_bytes: int) -> None:
        """Keep what KV is owed; nothing is saved up while none of it waits."""
        if traffic_class is TrafficClass.KV:
            self._kv_credit = max(0.0, self._kv_credit - num_bytes)
        elif self._queues[TrafficClass.KV]:
            self._kv_credit += num_bytes * KV_FLOOR / (1 - KV_FLOOR)
        else:
            self._kv_credit = 0.0
