"""Which decode engine gets a request, in two phases (papers 2.7).

Phase 1, across groups: every request of the global queue goes to the group with the fewest tokens,
counted anew after each. This ends first come, first served across groups: each has its own queue.

Phase 2, inside a group, over its queue, in order:

    R = longest prefix of the queue whose blocks fit into the free blocks of all engines together
    Z = 1.05 x (tokens of R + tokens of the engines) / number of engines

The head goes, of the engines with room for it, to the one with the fewest requests among those that
stay within Z tokens; where none does, to the one with the fewest tokens. Without room for the head
the fetch ends: nobody overtakes it.

R takes free memory for one piece, an upper bound. R and Z are of the fetch's begin; tokens,
requests and free blocks are counted down after each assignment. The printed code takes a minimum of
an empty list where no engine has room, takes the number of unfinished requests for a sequence
number, and leaves open when R is computed. Two things are ours: groups are compared by their *mean*
tokens, which is the paper's order where groups are equally large; and of engines that are equal in
requests the one that has more of the prompt cached is taken, then the one with fewer tokens.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heapreplace

from services.controller.policy.dualpath.engines import (
    Assigned,
    EngineId,
    GroupId,
    QueuedRequest,
    Side,
)

Z_PERCENT = 105


class TokenClass(StrEnum):
    """Whether an engine stays within Z with the request."""

    LOW = "low_token"
    HIGH = "high_token"


REASONS = {
    TokenClass.LOW: "fewest requests of those within Z tokens",
    TokenClass.HIGH: "fewest tokens; none is within Z",
}


@dataclass(slots=True)
class GroupLoad:
    """A group as phase 1 sees it: tokens of its engines and of its queue, and its largest pool."""

    group: GroupId
    num_engines: int
    num_tokens: int
    max_blocks: int

    @property
    def key(self) -> tuple[float, GroupId]:
        """What groups are compared by, the least being the best."""
        return (self.num_tokens / self.num_engines, self.group)


def spread(
    queue: deque[QueuedRequest], groups: Iterable[GroupLoad]
) -> list[tuple[QueuedRequest, GroupId]]:
    """Phase 1: take every request that some group could hold out of ``queue``; name its group.

    ``num_tokens`` of the groups are counted up. Requests larger than every pool stay, in order.
    """
    loads = list(groups)
    by_id = {load.group: load for load in loads}
    heap = [load.key for load in loads]
    heapify(heap)
    least_blocks = min((load.max_blocks for load in loads), default=0)
    found: list[tuple[QueuedRequest, GroupId]] = []
    too_large: list[QueuedRequest] = []
    while queue:
        request = queue.popleft()
        if request.num_blocks <= least_blocks:
            load = by_id[heap[0][1]]
            load.num_tokens += request.num_tokens
            heapreplace(heap, load.key)
        else:  # rare: some pools are too small
            able = [load for load in loads if load.max_blocks >= request.num_blocks]
            if not able:
                too_large.append(request)
                continue
            load = min(able, key=lambda able_load: able_load.key)
            load.num_tokens += request.num_tokens
            heap = [other.key for other in loads]
            heapify(heap)
        found.append((request, load.group))
    queue.extend(too_large)
    return found


@dataclass(slots=True)
class DecodeEngine:
    """One engine as phase 2 sees it; ``Round`` counts assignments in."""

    engine: EngineId
    num_requests: int
    num_tokens: int
    free_blocks: int


def num_schedulable(queue: Iterable[QueuedRequest], engines: Iterable[DecodeEngine]) -> int:
    """Return the length of R: how many requests at the head fit into all free blocks together."""
    free = sum(engine.free_blocks for engine in engines)
    count = 0
    for request in queue:
        free -= request.num_blocks
        if free < 0:
            break
        count += 1
    return count


@dataclass(slots=True)
class Round:
    """Phase 2 of one fetch: ``engines`` as they stand, and the tokens that R adds.

    ``scaled_limit`` is Z times 100 times the number of engines: a whole number, and so exact.
    """

    engines: Sequence[DecodeEngine]
    num_new_tokens: int
    scaled_limit: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute Z, once."""
        tokens = self.num_new_tokens + sum(engine.num_tokens for engine in self.engines)
        self.scaled_limit = Z_PERCENT * tokens

    @property
    def limit(self) -> float:
        """Z, in tokens."""
        return self.scaled_limit / 100 / max(1, len(self.engines))

    def choose(
        self, request: QueuedRequest, hits: Mapping[EngineId, int] | None = None
    ) -> tuple[DecodeEngine, TokenClass] | None:
        """Return the engine for a request; None when none has room. ``hits`` are cached blocks."""
        scale = 100 * len(self.engines)
        most = self.scaled_limit // scale - request.num_tokens if scale else 0
        best: DecodeEngine | None = None
        best_key: tuple[int, int, int, int, EngineId] | None = None
        for engine in self.engines:
            if engine.free_blocks < request.num_blocks:
                continue
            cached = -hits.get(engine.engine, 0) if hits else 0
            tokens = engine.num_tokens
            key = (
                (0, engine.num_requests, cached, tokens, engine.engine)
                if tokens <= most
                else (1, tokens, cached, engine.num_requests, engine.engine)
            )
            if best_key is None or key < best_key:
                best, best_key = engine, key
        if best is None or best_key is None:
            return None
        return best, TokenClass.HIGH if best_key[0] else TokenClass.LOW

    def take(self, engine: DecodeEngine, request: QueuedRequest) -> None:
        """Count a request as assigned."""
        engine.num_tokens += request.num_tokens
        engine.num_requests += 1
        engine.free_blocks -= request.num_blocks


def assign_decodes(engines: Sequence[DecodeEngine], queue: deque[QueuedRequest]) -> list[Assigned]:
    """Phase 2: assign from the head of ``queue``, in order, until there is no room for the head.

    Assigned requests leave the queue, and ``engines`` are counted up.
    """
    count = num_schedulable(queue, engines)
    new_tokens = sum(request.num_tokens for request, _ in zip(queue, range(count), strict=False))
    phase = Round(engines, new_tokens)
    limit = round(phase.limit, 1)
    assigned: list[Assigned] = []
    while queue:
        request = queue[0]
        chosen = phase.choose(request)
        if chosen is None:
            break
        queue.popleft()
        engine, token_class = chosen
        inputs = (
            ("tokens", engine.num_tokens),
            ("requests", engine.num_requests),
            ("free_blocks", engine.free_blocks),
            ("z", limit),
        )
        phase.take(engine, request)
        assigned.append(
            Assigned(
                request,
                Side.DECODE,
                engine.engine,
                token_class.value,
                REASONS[token_class],
                inputs,
            )
        )
    return assigned
