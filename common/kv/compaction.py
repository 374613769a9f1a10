"""Which cached blocks to move so that the longest free run grows. Pure.

Theory of operation. Blocks that somebody holds stay where they are. Between them lie stretches of
free blocks and of cached ones that nobody holds; a cached block may lie anywhere, as long as its
bytes go with it. So the cached blocks of one part of a stretch, a window, move into free blocks
outside of it, and the whole window is free then. No block is evicted.

The window is the longest that can be had: its cached blocks fit into the free ones outside, and are
no more than may be moved. It begins and ends where free runs do, so that what is filled outside is
the beginning of a free run, the shortest ones first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.kv.runs import Run, to_blocks

LEAST_GAIN = 1.25
"""How much longer the longest free run is to become, or nothing is moved."""

Move = tuple[int, int]
"""``(cached block, free block)``."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A free run, or one cached block."""

    start: int
    length: int
    is_free: bool

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_places(self) -> int:
        """Blocks that may be filled: none at the pool's beginning, which nothing lies before."""
        return self.length if self.is_free and self.start > 0 else 0


def plan_moves(free: Sequence[Run], cached: Sequence[int], max_moves: int) -> list[Move]:
    """Return at most ``max_moves`` moves, of different blocks to different blocks; often none.

    ``free`` are the maximal free runs, ``cached`` the blocks that may be moved; both in any order.
    Targets are beginnings of free runs, never of that at block 0.
    """
    pieces = [_Piece(start, length, is_free=True) for start, length in free]
    pieces += [_Piece(block, 1, is_free=False) for block in cached]
    pieces.sort(key=lambda piece: piece.start)
    num_places = sum(piece.num_places for piece in pieces)
    longest = max((length for _, length in free), default=0)
    best: Sequence[_Piece] = ()
    for stretch in _stretches(pieces):
        window = _longest_window(stretch, num_places, max_moves)
        if _length(window) > _length(best):
            best = window
    if _length(best) < max(longest * LEAST_GAIN, longest + 1):
        return []
    sources = [piece.start for piece in best if not piece.is_free]
    inside = {piece.start for piece in best}
    outside = [p for p in pieces if p.num_places and p.start not in inside]
    outside.sort(key=lambda piece: (piece.length, piece.start))
    targets = to_blocks((piece.start, piece.length) for piece in outside)
    return list(zip(sources, targets, strict=False))


def _stretches(pieces: Sequence[_Piece]) -> Iterator[Sequence[_Piece]]:
    """Cut where held blocks lie between."""
    first = 0
    for place in range(1, len(pieces) + 1):
        if place == len(pieces) or pieces[place].start > pieces[place - 1].end:
            yield pieces[first:place]
            first = place


def _longest_window(stretch: Sequence[_Piece], num_places: int, max_moves: int) -> Sequence[_Piece]:
    """Return the longest part whose cached blocks can go into the places outside of it."""
    best: tuple[int, int, int] = (0, 0, 0)
    first = num_cached = num_inside = 0
    for place, piece in enumerate(stretch):
        num_cached += not piece.is_free
        num_inside += piece.num_places
        while num_cached > min(max_moves, num_places - num_inside):
            num_cached -= not stretch[first].is_free
            num_inside -= stretch[first].num_places
            first += 1
        if first <= place:
            best = max(best, (piece.end - stretch[first].start, first, place + 1))
    return stretch[best[1] : best[2]]


def _length(window: Sequence[_Piece]) -> int:
    return window[-1].end - window[0].start if window else 0
