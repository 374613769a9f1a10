"""Moving requests that still wait away from a place that has far more than its share.

A request that waits at a hot place moves to the place with the least work, the newest first, so
that those before it keep their order. A place is hot when its work is ``HOT_FACTOR`` times the mean
and more than ``min_tokens``. A move must leave its target with less than its source had before: the
largest load never grows, and moves end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.controller.policy.dualpath.engines import GroupId, Inputs, QueuedRequest

HOT_FACTOR = 1.5
MAX_MOVES = 64


@dataclass(slots=True)
class Place:
    """Where requests wait: its engines, all unfinished tokens, its largest pool, who may move.

    ``movable`` are waiting requests, the oldest first; their tokens are part of ``num_tokens``.
    """

    place: GroupId
    num_engines: int
    num_tokens: int
    max_blocks: int
    movable: list[QueuedRequest] = field(default_factory=list)

    @property
    def load(self) -> float:
        """Tokens per engine."""
        return self.num_tokens / self.num_engines


@dataclass(frozen=True, slots=True)
class Redirection:
    """A waiting request moves."""

    request: QueuedRequest
    source: GroupId
    target: GroupId
    reason: str
    inputs: Inputs


def redirections(
    places: Iterable[Place], *, min_tokens: float = 0.0, max_moves: int = MAX_MOVES
) -> list[Redirection]:
    """Return the moves that take the heat out of hot places; ``places`` are changed accordingly.

    ``min_tokens`` is per engine. Each request moves at most once.
    """
    held = list(places)
    total = sum(place.num_tokens for place in held)
    mean = total / max(1, sum(place.num_engines for place in held))
    hot_load = max(HOT_FACTOR * mean, min_tokens)
    moves: list[Redirection] = []
    while len(moves) < max_moves:
        hot = [place for place in held if place.movable and place.load > hot_load]
        if not hot:
            break
        source = max(hot, key=lambda place: (place.load, place.place))
        request = source.movable.pop()
        able = [
            place
            for place in held
            if place.max_blocks >= request.num_blocks
            and (place.num_tokens + request.num_tokens) / place.num_engines < source.load
        ]
        if not able:
            continue
        target = min(able, key=lambda place: (place.load, place.place))
        inputs = (
            ("source_tokens", source.num_tokens),
            ("target_tokens", target.num_tokens),
            ("mean_tokens", round(mean, 1)),
        )
        source.num_tokens -= request.num_tokens
        target.num_tokens += request.num_tokens
        reason = "its queue is a hot spot, and the target's is the shortest"
        moves.append(Redirection(request, source.place, target.place, reason, inputs))
    return moves
