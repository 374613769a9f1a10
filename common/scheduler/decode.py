"""The decode half of the local scheduler: one token for each sequence and step. Pure.

Theory of operation. ``running`` holds the sequences that decode, oldest first. Each gets one token
a step, and where a step has room for fewer, those that have waited longest get it. A decode grows
block by block; when the pool is full, the newest gives way, so that the oldest always goes on and a
full pool cannot deadlock. What was computed of the one that gives way is copied to host memory, and
it stands in ``swapped``; where that has no room, it waits in ``waiting`` to be computed again. Both
come back before any new prompt is admitted, the swapped ones first.

A sequence that is to go on elsewhere is ``frozen``: no longer planned, never preempted.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, MutableSequence
from heapq import nsmallest

from common.scheduler.effects import Effect, Preempted, SwapIn, SwapOut
from common.scheduler.request import Sequence
from common.scheduler.sequence_blocks import SequenceBlocks
from common.scheduler.steps import PlannedRow, StepDraft

Outgrew = Callable[[Sequence], list[Effect]]


class DecodeScheduler:
    """Queues of decodes, and which of them a step goes on with."""

    def __init__(self, held: SequenceBlocks) -> None:
        self._held = held
        self._num_added = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.swapped: deque[Sequence] = deque()
        self.frozen: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Decode a sequence from now on; it is the newest."""
        sequence.age = self._num_added
        self._num_added += 1
        self.running.append(sequence)

    def freeze(self, sequence: Sequence) -> None:
        """Plan a running sequence no more."""
        self.running.remove(sequence)
        self.frozen.append(sequence)

    def thaw(self, sequence: Sequence) -> None:
        """Go on with a frozen sequence, which is as old as it was."""
        self.frozen.remove(sequence)
        sequence.drawn_at = None
        insort(self.running, sequence, key=lambda other: other.age)

    @property
    def queues(self) -> tuple[MutableSequence[Sequence], ...]:
        """Every queue: a sequence stands in one of them at most."""
        return self.waiting, self.running, self.swapped, self.frozen

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of whatever queue it stands in."""
        for queue in self.queues:
            if sequence in queue:
                queue.remove(sequence)

    def ready(self) -> list[Sequence]:
        """Return the sequences that could get a token in the next step, oldest first."""
        return [sequence for sequence in self.running if sequence.can_decode]

    @property
    def is_short_of_room(self) -> bool:
        """Whether any sequence waits for blocks."""
        return bool(self.waiting or self.swapped)

    def plan(
        self, draft: StepDraft, ready: list[Sequence], max_rows: int, outgrew: Outgrew
    ) -> list[Effect]:
        """Plan one token for each of at most ``max_rows`` of these, which have no row yet.

        ``outgrew`` ends a sequence whose next token no empty pool could hold.
        """
        effects: list[Effect] = []
        gives_way: Sequence | None = None
        for sequence in self._whose_turn(draft, ready, max_rows):
            if not sequence.block_table or sequence is gives_way:
                continue  # it was preempted just now, or will be before the next step
            while not self._held.grow(sequence):
                if not self._held.can_ever_hold(sequence.next_length):
                    if not sequence.is_in_step:  # else its last token is still to come
                        effects += outgrew(sequence)
                    break
                newest = self.running[-1]
                if newest.is_in_step or draft.has(newest):
                    gives_way = newest
                    break
                fits = self._held.can_ever_hold(newest.next_length)
                effects += self._preempt(newest) if fits else outgrew(newest)
                if newest is sequence:
                    break
            else:
                draft.add(_row(sequence))
        return effects

    def _whose_turn(self, draft: StepDraft, ready: list[Sequence], max_rows: int) -> list[Sequence]:
        """Choose by who has waited longest; return the oldest first, who may preempt the others."""
        room = min(max_rows, draft.rows_left, draft.tokens_left)
        if len(ready) <= room:
            return ready
        chosen = nsmallest(room, ready, key=lambda sequence: (sequence.last_planned, sequence.turn))
        for turn, sequence in enumerate(chosen):
            sequence.turn = turn
        members = set(chosen)
        return [sequence for sequence in ready if sequence in members]

    def _preempt(self, sequence: Sequence) -> list[Effect]:
        self.running.remove(sequence)
        sequence.drawn_at = None
        request_id, choice = sequence.request.request_id, sequence.choice
        preempted = Preempted(request_id, choice, sequence.length)
        pairs = self._held.swap_out(sequence)
        if pairs is not None:
            self.swapped.appendleft(sequence)
            return [SwapOut(request_id, choice, pairs), preempted]
        self._held.release(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        return [preempted]

    def resume(self, draft: StepDraft) -> list[Effect]:
        """Bring swapped sequences back and go on with them, while there is room for the next."""
        effects: list[Effect] = []
        while self.swapped and not draft.is_full:
            sequence = self.swapped[0]
            pairs = self._held.swap_in(sequence)
            if pairs is None:
                break
            self.swapped.popleft()
            self.add(sequence)
            draft.add(_row(sequence))
            if pairs:
                effects.append(SwapIn(sequence.request.request_id, sequence.choice, pairs))
        return effects


def _row(sequence: Sequence) -> PlannedRow:
    return PlannedRow(
        sequence,
        sequence.num_computed + sequence.num_planned,
        1,
        is_last=True,
        pending=sequence.pending,
        is_decode=True,
    )
