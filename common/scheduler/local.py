"""The local scheduler: queues, admission, chunked prefill, decode, preemption.

Theory of operation. A sequence is always in the same state of mind: it has tokens, the first
``num_computed`` of which have K and V in the pool. A prefill chunk and a decode step are the same
thing, a row of the next uncomputed tokens; a row that reaches the last token draws the next one.
So a preempted sequence simply starts again from nothing (or from the prefix cache), and a decode
that arrives by handoff starts with everything but its last token computed.

Each step takes every decoding sequence first, one token each, then the prompts in arrival order
in chunks that end on block borders, until the step's token budget is spent; a prompt that gets
less than it needs is the last of its step. Blocks of a prompt are
acquired whole when it is admitted; a decode grows block by block and, when the pool is full, the
newest decode gives way, so that the oldest always goes on and a full pool cannot deadlock.

A step may be planned while the one before it is still in flight. It takes for granted that this
one succeeds: chunks go on where it will end, and a decode's next token is named as its pending
draw. A sequence that turns out to have ended has its row of the later step thrown away.

Nothing here reads a clock, waits or sends. ``plan`` marks rows as being in a step; a request that
ends meanwhile keeps its blocks until the last of its steps is finished.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf

from common.errors import ConfigError, ErrorCode, LocalProtocolError
from common.ids import RequestId
from common.kv.blocks import BlockManager, Hold
from common.messages.fields import WorkerLoad
from common.messages.handoff import AbortReason, FirstToken
from common.sampling import FinishReason, SampledToken
from common.scheduler.effects import (
    CopyBlocks,
    DecodeBegan,
    Effect,
    EmitTokens,
    Preempted,
    PrefillStarted,
    PromptComputed,
    PromptProgressed,
    RequestBroke,
    RequestEnded,
    StopHandoff,
)
from common.scheduler.publisher import Publisher
from common.scheduler.request import (
    LocalRequest,
    NewRequest,
    PendingDraw,
    RequestPhase,
    Sequence,
)
from common.scheduler.steps import PlannedRow, RowFailed, RowResult, SchedulerLimits, StepPlan


class LocalScheduler:
    """Owns the requests of one worker and decides each step."""

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits) -> None:
        if limits.max_num_batched_tokens < limits.block_size:
            raise ConfigError(
                f"a step of {limits.max_num_batched_tokens} tokens cannot compute a block of "
                f"{limits.block_size}"
            )
        self._blocks = blocks
        self._limits = limits
        self._requests: dict[RequestId, LocalRequest] = {}
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._publisher = Publisher(blocks, limits.block_size)
        self._open_steps: deque[StepPlan] = deque()
        self._num_planned = 0
        self.num_steps = 0

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._limits.block_size

    # ---- what comes from outside ---------------------------------------------------------------

    def add(self, new: NewRequest, *, is_remote: bool) -> list[Effect]:
        """Take a request in to prefill it; another worker decodes it when ``is_remote``."""
        if new.request_id in self._requests:
            raise LocalProtocolError(f"request {new.request_id} is here already")
        request = LocalRequest(new, is_remote)
        # The K and V of the last token drawn are never needed.
        num_stored = len(new.prompt) + (1 if new.params.num_left > 1 else 0)
        if not self._blocks.can_ever_hold(num_stored):
            counts = self._blocks.counts()
            message = (
                f"the prompt's {len(new.prompt)} tokens do not fit the worker's KV pool of "
                f"{counts.total * self._limits.block_size} tokens"
            )
            return [RequestBroke(new.request_id, new.gateway_id, ErrorCode.NO_ROOM, message)]
        request.sequences = [Sequence(request, new.params.first_choice, f"{new.request_id}/0")]
        self._requests[new.request_id] = request
        self._waiting.append(request.lead)
        return []

    def can_reserve(self) -> bool:
        """Whether a decode side may take more: nothing of its own waits for room."""
        return not self._waiting

    def add_decoding(
        self,
        new: NewRequest,
        owner: str,
        first_tokens: SequenceOf[FirstToken],
        num_cached_tokens: int,
    ) -> list[Effect]:
        """Take over a request whose prompt is computed in ``owner``'s blocks.

        ``first_tokens`` are of the choices that go on.
        """
        if new.request_id in self._requests:
            raise LocalProtocolError(f"request {new.request_id} is here already")
        request = LocalRequest(new, is_remote=False, num_cached_tokens=num_cached_tokens)
        self._requests[new.request_id] = request
        self._blocks.set_hold(owner, Hold.REQUEST)
        request.sequences = [
            Sequence(request, first.choice, owner if place == 0 else f"{owner}/{first.choice}")
            for place, first in enumerate(first_tokens)
        ]
        for sequence, first in zip(request.sequences, first_tokens, strict=True):
            sequence.outputs.append(first.token.token_id)
            sequence.unsent.append(first.token)
        self._adopt_blocks(request.lead, len(new.prompt))
        self._publisher.note(request.lead)
        return self._begin_decode(request)

    def place_locally(self, request_id: RequestId) -> list[Effect]:
        """Decode here what was to be handed over, as the controller ordered."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        request.is_remote = False
        if request.phase is not RequestPhase.SENDING:
            return []
        self._blocks.set_hold(request.lead.owner, Hold.REQUEST)
        return self._begin_decode(request)

    def open_handoff(self, request_id: RequestId) -> None:
        """From now on a handoff may read the request's blocks."""
        self._requests[request_id].is_handoff_open = True

    def close_handoff(self, request_id: RequestId, *, was_accepted: bool) -> list[Effect]:
        """No handoff reads the request's blocks any more."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        request.is_handoff_open = False
        if was_accepted:
            # The decode side reports the end; here only the blocks go.
            request.phase = RequestPhase.ENDED
            self._requests.pop(request_id)
            self._let_go(request)
            return []
        return self._settle(request) if request.phase is RequestPhase.ENDED else []

    def cancel(self, request_id: RequestId, choice: int | None) -> list[Effect] | None:
        """End a request or one choice. Returns None when the request is not here."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if choice is None:
            request.was_cancelled = True
        if request.phase is RequestPhase.ENDED:
            return []
        if choice is not None and not request.has_drawn:
            return []  # the choices are not drawn yet, so none can be complete
        for sequence in request.sequences:
            if sequence.finish_reason is None and choice in (None, sequence.choice):
                self._drop(sequence, FinishReason.CANCELLED)
        return [] if request.is_live else self._end(request, AbortReason.CANCELLED)

    def fail(self, request_id: RequestId, code: ErrorCode, message: str) -> list[Effect]:
        """End a request with an error."""
        request = self._requests.get(request_id)
        if request is None or request.phase is RequestPhase.ENDED:
            return []
        for sequence in request.sequences:
            self._drop(sequence, FinishReason.CANCELLED)
        request.is_told = True
        broke = RequestBroke(request_id, request.new.gateway_id, code, message)
        return [broke, *self._end(request, AbortReason.CANCELLED)]

    def find(self, request_id: RequestId) -> LocalRequest | None:
        """Return the request, if it is here."""
        return self._requests.get(request_id)

    def request_ids(self) -> tuple[RequestId, ...]:
        """Return the ids of all requests here."""
        return tuple(self._requests)

    # ---- one step ------------------------------------------------------------------------------

    def plan(self) -> tuple[StepPlan | None, list[Effect]]:
        """Decide the next step; None when there is nothing to compute before an open step ends.

        At most one earlier step may be open.
        """
        if len(self._open_steps) > 1:
            raise LocalProtocolError("two steps are open already")
        effects: list[Effect] = []
        rows = self._plan_decodes(effects)
        budget = self._limits.max_num_batched_tokens - len(rows)
        budget = self._plan_prefills(rows, budget)
        self._admit(rows, budget, effects)
        if not rows:
            return None, effects
        plan = StepPlan(self._num_planned, tuple(rows))
        for place, row in enumerate(rows):
            draw = PendingDraw(plan.number, place)
            row.sequence.enter_step(row.num_tokens, draw if row.is_last else None)
        self._num_planned += 1
        self._open_steps.append(plan)
        return plan, effects

    def finish_step(self, plan: StepPlan, results: SequenceOf[RowResult]) -> list[Effect]:
        """Take the outcome of the oldest open step in: one result per row, in order."""
        if not self._open_steps or self._open_steps[0] is not plan:
            raise LocalProtocolError(f"step {plan.number} is not the oldest open one")
        self._open_steps.popleft()
        self.num_steps += 1
        effects: list[Effect] = []
        for place, row in enumerate(plan.rows):
            row.sequence.leave_step(row.num_tokens, PendingDraw(plan.number, place))
        for row, result in zip(plan.rows, results, strict=True):
            effects += self._finish_row(row, result)
        return effects

    def publish(self) -> None:
        """Make what was computed findable for later prompts. Nobody need wait for it."""
        self._publisher.publish_all()

    def load(self, *, num_sending: int, num_receiving: int) -> WorkerLoad:
        """Count what there is to do."""
        return WorkerLoad(
            num_waiting=len(self._waiting),
            num_prefilling=len(self._prefilling),
            num_sending=num_sending,
            num_receiving=num_receiving,
            num_decoding=len(self._decoding),
            num_swapped=0,
            uncomputed_tokens=sum(s.num_uncomputed for s in (*self._waiting, *self._prefilling)),
            num_steps=self.num_steps,
        )

    # ---- planning ------------------------------------------------------------------------------

    def _plan_decodes(self, effects: list[Effect]) -> list[PlannedRow]:
        rows: list[PlannedRow] = []
        limit = min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        place = 0
        while place < len(self._decoding) and len(rows) < limit:
            sequence = self._decoding[place]
            if not sequence.can_decode:
                place += 1
            elif self._grow(sequence):
                start = sequence.num_computed + sequence.num_planned
                rows.append(PlannedRow(sequence, start, 1, is_last=True, pending=sequence.pending))
                place += 1
            elif not self._blocks.can_ever_hold(sequence.next_length):
                if sequence.is_in_step:
                    place += 1  # its last token is still to come
                else:
                    effects += self._finish_sequence(sequence, FinishReason.LENGTH)
            elif self._decoding[-1].is_in_step:
                break  # left out of this step, it can give way before the next
            else:
                effects.append(self._preempt(self._decoding[-1]))
        return rows

    def _grow(self, sequence: Sequence) -> bool:
        wanted = sequence.next_length
        if wanted <= len(sequence.block_table) * self._limits.block_size:
            return True
        if not self._blocks.grow(sequence.owner, wanted):
            return False
        sequence.block_table = self._blocks.block_ids(sequence.owner)
        return True

    def _preempt(self, sequence: Sequence) -> Preempted:
        self._decoding.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        self._waiting.appendleft(sequence)
        return Preempted(sequence.request.request_id, sequence.choice, sequence.length)

    def _plan_prefills(self, rows: list[PlannedRow], budget: int) -> int:
        for sequence in self._prefilling:
            if len(rows) >= self._limits.max_num_seqs:
                return 0
            if sequence.pending is not None:
                continue  # its last chunk is in flight
            budget = self._plan_chunk(sequence, rows, budget)
        return budget

    def _plan_chunk(self, sequence: Sequence, rows: list[PlannedRow], budget: int) -> int:
        """Plan what fits and return the budget for later prompts: none after a partial chunk."""
        start = sequence.num_computed + sequence.num_planned
        num_left = sequence.length - start
        num_tokens = min(num_left, budget)
        is_last = num_tokens == num_left
        if not is_last:
            # End on a block border, so that whole blocks can leave while the next chunk computes;
            # a budget that reaches none is used all the same, or the prompt would starve.
            border = num_tokens - (start + num_tokens) % self._limits.block_size
            num_tokens = border if border > 0 else num_tokens
        if num_tokens > 0:
            rows.append(PlannedRow(sequence, start, num_tokens, is_last))
        return budget - num_tokens if is_last else 0

    def _admit(self, rows: list[PlannedRow], budget: int, effects: list[Effect]) -> None:
        while self._waiting and budget > 0 and len(rows) < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            if not self._blocks.can_ever_hold(sequence.length):
                effects += self._finish_sequence(sequence, FinishReason.LENGTH)
                continue
            if not self._acquire(sequence):
                return
            self._waiting.popleft()
            self._prefilling.append(sequence)
            request = sequence.request
            if not request.has_drawn:
                request.phase = RequestPhase.PREFILLING
                request.num_cached_tokens = sequence.num_computed
                effects.append(PrefillStarted(request.request_id, sequence.num_computed))
                effects += self._progress(sequence)
            budget = self._plan_chunk(sequence, rows, budget)

    def _acquire(self, sequence: Sequence) -> bool:
        growth = min(sequence.request.new.params.num_left, self._limits.growth_tokens)
        wanted = sequence.length + (0 if sequence.request.is_remote else growth)
        capacity = wanted if self._blocks.can_ever_hold(wanted) else sequence.length
        acquired = self._blocks.acquire(
            sequence.owner,
            sequence.tokens(0, sequence.length),
            hold=Hold.REQUEST,
            max_cached_tokens=sequence.length - 1,
            capacity_tokens=capacity,
        )
        if acquired is None:
            return False
        self._adopt_blocks(sequence, acquired.num_cached_tokens)
        sequence.num_published = acquired.num_cached_tokens // self._limits.block_size
        return True

    def _adopt_blocks(self, sequence: Sequence, num_computed: int) -> None:
        sequence.block_table = self._blocks.block_ids(sequence.owner)
        sequence.num_computed = num_computed

    # ---- outcomes ------------------------------------------------------------------------------

    def _finish_row(self, row: PlannedRow, result: RowResult) -> list[Effect]:
        sequence = row.sequence
        request = sequence.request
        if request.phase is RequestPhase.ENDED:
            return self._settle(request)
        if sequence.finish_reason is not None:
            if not sequence.is_in_step:
                self._release(sequence)
            return []
        if isinstance(result, RowFailed):
            return self.fail(request.request_id, ErrorCode.INTERNAL, result.message)
        sequence.num_computed += row.num_tokens
        self._publisher.note(sequence)
        if not row.is_last:
            return self._progress(sequence)
        if not request.has_drawn:
            return self._finish_prompt(request, result)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self._decoding.append(sequence)
        return self._draw(sequence, result[0])

    def _progress(self, sequence: Sequence) -> list[Effect]:
        request = sequence.request
        num_blocks = sequence.num_computed // self._limits.block_size
        is_wanted = request.is_remote and not request.has_drawn and num_blocks > 0
        return [PromptProgressed(request.request_id, num_blocks)] if is_wanted else []

    def _finish_prompt(
        self, request: LocalRequest, tokens: tuple[SampledToken, ...]
    ) -> list[Effect]:
        """The prompt is whole: split into choices, each with its first token."""
        request.has_drawn = True
        lead = request.lead
        self._prefilling.remove(lead)
        request.sequences += [
            Sequence(request, choice, f"{request.request_id}/{choice}")
            for choice in request.new.params.choices[1:]
        ]
        effects: list[Effect] = []
        for sequence, token in zip(request.sequences, tokens, strict=True):
            sequence.outputs.append(token.token_id)
            sequence.unsent.append(token)
            sequence.finish_reason = sequence.find_finish_reason()
            effects.append(self._emit(sequence))
        going_on = [s for s in request.sequences if s.finish_reason is None]
        if not going_on:
            return effects + self._end(request, AbortReason.NOT_NEEDED)
        if not request.is_remote:
            return effects + self._begin_decode(request)
        request.phase = RequestPhase.SENDING
        self._blocks.set_hold(lead.owner, Hold.TRANSFER)
        firsts = tuple(
            FirstToken(choice=s.choice, token=token)
            for s, token in zip(request.sequences, tokens, strict=True)
            if s.finish_reason is None
        )
        effects.append(PromptComputed(request.request_id, firsts, request.num_cached_tokens))
        return effects

    def _begin_decode(self, request: LocalRequest) -> list[Effect]:
        """Give every choice that goes on its own tail of the prompt's blocks."""
        request.phase = RequestPhase.DECODING
        request.has_drawn = True
        lead = request.lead
        if len(request.sequences) > 1:
            self._publisher.publish(lead)  # the others share its blocks as they are found
        num_prompt = len(request.new.prompt)
        effects: list[Effect] = [DecodeBegan(request.request_id)]
        for sequence in request.sequences:
            if sequence.finish_reason is not None:
                continue
            if sequence is lead:
                self._decoding.append(sequence)
                continue
            copies = self._blocks.fork(lead.owner, sequence.owner, num_prompt)
            if copies is None:
                self._waiting.append(sequence)
                continue
            if copies:
                effects.append(CopyBlocks(copies))
            self._adopt_blocks(sequence, num_prompt)
            sequence.num_published = num_prompt // self._limits.block_size
            self._decoding.append(sequence)
        if lead.finish_reason is not None:
            self._release(lead)
        return effects

    def _draw(self, sequence: Sequence, token: SampledToken) -> list[Effect]:
        sequence.outputs.append(token.token_id)
        sequence.unsent.append(token)
        reason = sequence.find_finish_reason()
        if reason is None:
            return [self._emit(sequence)]
        return self._finish_sequence(sequence, reason)

    def _finish_sequence(self, sequence: Sequence, reason: FinishReason) -> list[Effect]:
        self._drop(sequence, reason)
        effects: list[Effect] = [self._emit(sequence)]
        if not sequence.request.is_live:
            effects += self._end(sequence.request, AbortReason.NOT_NEEDED)
        return effects

    def _emit(self, sequence: Sequence) -> EmitTokens:
        return EmitTokens(sequence.request.new.gateway_id, sequence.take_delta())

    # ---- letting go ----------------------------------------------------------------------------

    def _drop(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out of every queue; its blocks go unless something reads them."""
        sequence.finish_reason = sequence.finish_reason or reason
        for queue in (self._waiting, self._prefilling, self._decoding):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.is_in_step or sequence.request.is_handoff_open:
            return
        if sequence.request.phase is not RequestPhase.SENDING:
            self._release(sequence)

    def _end(self, request: LocalRequest, reason: AbortReason) -> list[Effect]:
        request.phase = RequestPhase.ENDED
        effects: list[Effect] = []
        if request.is_handoff_open:
            effects.append(StopHandoff(request.request_id, reason))
        return effects + self._settle(request)

    def _settle(self, request: LocalRequest) -> list[Effect]:
        """Let an ended request's blocks go once neither a step nor a handoff reads them."""
        if request.is_handoff_open or any(s.is_in_step for s in request.sequences):
            return []
        if self._requests.pop(request.request_id, None) is None:
            return []
        self._let_go(request)
        if request.is_told:
            return []
        return [RequestEnded(request.request_id, request.was_cancelled)]

    def _let_go(self, request: LocalRequest) -> None:
        for sequence in request.sequences:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if self._blocks.is_held(sequence.owner):
            self._publisher.publish(sequence)
            self._blocks.release(sequence.owner)
        sequence.block_table = ()
        sequence.num_published = 0
