"""Which prefill engine gets a prompt: Algorithm 1 (papers 2.7).

The waiting queue is first come, first served. Its head goes to the engine with the fewest
unfinished tokens in the first category that has one:

    C2  tok <= beta, and its node's queue of reads <= alpha: that link would idle soon
    C3  tok <= beta, and its node's queue of reads >  alpha
    C1  tok >  beta: gets nothing; while all are here, requests stay queued

Where the printed code was not followed: it sorts engines into categories once and then loops, so
that one engine could be filled beyond beta; here a category is looked at anew after every
assignment. It calls the minimum of an empty list; here a fetch ends with what was assigned so far.
Of equal engines the one with the shorter queue of reads is taken, then the first by number.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heapreplace

from services.controller.policy.dualpath.engines import Assigned, EngineId, QueuedRequest, Side
from services.controller.policy.dualpath.thresholds import Thresholds


class Category(IntEnum):
    """The paper's categories, by its numbers."""

    OVERLOADED = 1
    SHORT_READS = 2
    LONG_READS = 3


REASONS = {
    Category.OVERLOADED: "has more than beta tokens unfinished",
    Category.SHORT_READS: "fewest tokens of those whose queue of reads is short",
    Category.LONG_READS: "fewest tokens; every queue of reads is long",
}


@dataclass(frozen=True, slots=True)
class PrefillEngine:
    """One engine as Algorithm 1 sees it; ``read_queue_tokens`` is its node's queue."""

    engine: EngineId
    num_tokens: int
    read_queue_tokens: int
    thresholds: Thresholds

    @property
    def category(self) -> Category:
        """Its category at this moment."""
        if self.num_tokens > self.thresholds.compute_tokens:
            return Category.OVERLOADED
        if self.read_queue_tokens > self.thresholds.read_tokens:
            return Category.LONG_READS
        return Category.SHORT_READS


Preference = tuple[int, int, int, EngineId]


def preference(engine: PrefillEngine, num_added: int = 0) -> Preference | None:
    """Return what engines are compared by, the least being the best; None for category 1.

    ``num_added`` are the tokens that this request would add to this engine, where engines differ in
    what they have cached; the paper's have nothing cached.
    """
    category = engine.category
    if category is Category.OVERLOADED:
        return None
    return (category, engine.num_tokens + num_added, engine.read_queue_tokens, engine.engine)


def assign_prompts(engines: Iterable[PrefillEngine], queue: deque[QueuedRequest]) -> list[Assigned]:
    """Assign from the head of ``queue``, in order, until no engine may have more.

    Assigned requests leave the queue. Costs O(log n) for each of them: an engine's tokens only grow
    here and its queue of reads stays, so a heap by preference is always right.
    """
    by_id = {engine.engine: engine for engine in engines}
    heap = [found for engine in by_id.values() if (found := preference(engine)) is not None]
    heapify(heap)
    assigned: list[Assigned] = []
    while queue and heap:
        best = by_id[heap[0][3]]
        request = queue.popleft()
        assigned.append(
            Assigned(
                request,
                Side.PREFILL,
                best.engine,
                f"C{best.category:d}",
                REASONS[best.category],
                (
                    ("tokens", best.num_tokens),
                    ("beta", best.thresholds.compute_tokens),
                    ("read_queue_tokens", best.read_queue_tokens),
                    ("alpha", best.thresholds.read_tokens),
                ),
            )
        )
        loaded = PrefillEngine(
            best.engine,
            best.num_tokens + request.num_tokens,
            best.read_queue_tokens,
            best.thresholds,
        )
        by_id[best.engine] = loaded
        again = preference(loaded)
        if again is None:
            heappop(heap)
        else:
            heapreplace(heap, again)
    return assigned
