"""The prefill half of the local scheduler: prompts, chunk by chunk. Pure.

Theory of operation. A prompt waits its turn in ``waiting``, or in ``receiving`` while a prefix of
it is copied here from another worker or loaded from a store. Where a load found no room the prompt
waits its turn, and once there is room for all of it, its load is asked for again before anything
that came later is admitted. It is admitted when there is room for all of it, then it stands in
``running`` until its last chunk is computed. A prompt that goes on elsewhere stays in ``sending``
with its blocks until the decode side has them.

Prompts are computed in the order of their arrival, in chunks that end on block borders; one that
gets less than it needs is the last of its step. A quota of compute ends a step before its tokens do
(``compute_quota``). Sequences that were preempted without a copy of
their K and V come through here again: to compute them is the same work.
"""

from collections import deque
from collections.abc import MutableSequence
from collections.abc import Sequence as SequenceOf

from common.scheduler.attention_cost import Chunk
from common.scheduler.effects import Effect, PrefillStarted, PromptProgressed, RoomForPrefix
from common.scheduler.request import RequestPhase, Sequence
from common.scheduler.sequence_blocks import SequenceBlocks
from common.scheduler.steps import PlannedRow, StepDraft


class PrefillScheduler:
    """Queues of prompts, and which of their tokens a step computes."""

    def __init__(self, held: SequenceBlocks, block_size: int) -> None:
        self._held = held
        self._block_size = block_size
        self._num_arrivals = 0
        self.waiting: deque[Sequence] = deque()
        self.receiving: list[Sequence] = []
        self.running: list[Sequence] = []
        self.sending: list[Sequence] = []
        self._found_no_room = False

    def add(self, sequence: Sequence, *, num_awaited_tokens: int) -> None:
        """Take a prompt in, as the newest."""
        sequence.request.arrival = self._num_arrivals
        self._num_arrivals += 1
        if num_awaited_tokens:
            sequence.num_expected = num_awaited_tokens
            self.receiving.append(sequence)
        else:
            sequence.num_expected = self._held.num_cached(sequence)
            self.waiting.append(sequence)

    def prefix_arrived(self, sequence: Sequence) -> None:
        """Let a prompt wait for nothing but its turn, which is that of its arrival."""
        if sequence not in self.receiving:
            return
        self.receiving.remove(sequence)
        sequence.num_expected = self._held.num_cached(sequence)
        self._await_turn(sequence)

    def prefix_has_no_room(self, sequence: Sequence) -> None:
        """Let a prompt wait its turn, and load its prefix then (``RoomForPrefix``)."""
        if sequence not in self.receiving:
            return
        self.receiving.remove(sequence)
        sequence.is_load_due = True
        self._await_turn(sequence)

    def _await_turn(self, sequence: Sequence) -> None:
        arrival = sequence.request.arrival
        place = sum(1 for other in self.waiting if other.request.arrival < arrival)
        self.waiting.insert(place, sequence)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of prompts here that are still to be computed, and not copied or loaded."""
        queues = (self.waiting, self.receiving, self.running)
        return sum(sequence.num_to_compute for queue in queues for sequence in queue)

    @property
    def has_work(self) -> bool:
        """Whether any prompt may be computed now, if there is room."""
        return bool(self.waiting) or any(s.pending is None for s in self.running)

    @property
    def is_short_of_room(self) -> bool:
        """Whether a prompt waits that found no room when it was last tried."""
        return self._found_no_room and bool(self.waiting)

    @property
    def num_to_decode_here(self) -> int:
        """Running prompts that are still to be planned whole and decode here afterwards."""
        return sum(s.pending is None and not s.request.is_remote for s in self.running)

    @property
    def queues(self) -> tuple[MutableSequence[Sequence], ...]:
        """Every queue: a sequence stands in one of them at most."""
        return self.waiting, self.receiving, self.running, self.sending

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of whatever queue it stands in."""
        for queue in self.queues:
            if sequence in queue:
                queue.remove(sequence)

    def plan(
        self,
        draft: StepDraft,
        max_tokens: int,
        max_new: int,
        queues: SequenceOf[deque[Sequence]],
    ) -> list[Effect]:
        """Plan at most ``max_tokens`` tokens of prompts.

        The first of ``queues`` that holds something is admitted from first. At most ``max_new``
        of those that decode here are.
        """
        budget = min(max_tokens, draft.tokens_left)
        for sequence in self.running:
            if budget < 1 or draft.rows_left < 1:
                return []
            if sequence.pending is None:  # else its last chunk is in flight
                budget = self._plan_chunk(sequence, draft, budget)
        effects: list[Effect] = []
        for queue in queues:
            while queue:
                is_bound = not queue[0].request.is_remote
                if budget < 1 or draft.rows_left < 1 or (is_bound and max_new < 1):
                    return effects
                if draft.allowance is not None and draft.allowance.is_spent:
                    return effects
                if queue[0].is_load_due:
                    return effects + self._try_load(queue)
                self._found_no_room = not self._held.acquire(queue[0])
                if self._found_no_room:
                    return effects
                sequence = queue.popleft()
                max_new -= is_bound
                effects += self._admit(sequence)
                budget = self._plan_chunk(sequence, draft, budget)
        self._found_no_room = False
        return effects

    def _try_load(self, queue: deque[Sequence]) -> list[Effect]:
        """Have the first prompt's prefix loaded, if there is room for all of it."""
        self._found_no_room = not self._held.can_acquire(queue[0])
        if self._found_no_room:
            return []
        sequence = queue.popleft()
        sequence.is_load_due = False
        self.receiving.append(sequence)
        return [RoomForPrefix(sequence.request.request_id)]

    def _admit(self, sequence: Sequence) -> list[Effect]:
        self.running.append(sequence)
        sequence.num_expected = 0
        request = sequence.request
        if request.has_drawn:
            return []
        request.phase = RequestPhase.PREFILLING
        request.num_cached_tokens = sequence.num_computed
        started = PrefillStarted(request.request_id, sequence.num_computed)
        return [started, *self.progress(sequence)]

    def _plan_chunk(self, sequence: Sequence, draft: StepDraft, budget: int) -> int:
        """Plan what fits and return the budget for later prompts: none after a partial chunk."""
        start = sequence.num_computed + sequence.num_planned
        num_left = sequence.length - start
        num_tokens = min(num_left, budget)
        if draft.allowance is not None:
            num_tokens = draft.allowance.take(Chunk(start, num_tokens))
        is_last = num_tokens == num_left
        if not is_last:
            # End on a block border, so that whole blocks can leave while the next chunk computes;
            # a budget that reaches none is used all the same, or the prompt would starve.
            border = num_tokens - (start + num_tokens) % self._block_size
            num_tokens = border if border > 0 else num_tokens
        if num_tokens:
            draft.add(PlannedRow(sequence, start, num_tokens, is_last))
        return budget - num_tokens if is_last else 0

    def progress(self, sequence: Sequence) -> list[Effect]:
        """Tell which blocks of a prompt that goes on elsewhere are whole."""
        request = sequence.request
        num_blocks = sequence.num_computed // self._block_size
        is_wanted = request.is_remote and not request.has_drawn and num_blocks > 0
        return [PromptProgressed(request.request_id, num_blocks)] if is_wanted else []
