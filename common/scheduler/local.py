"""The local scheduler of a hybrid worker: what the next step computes. Pure.

Theory of operation. A sequence is always in the same state of mind: it has tokens, the first
``num_computed`` of which have K and V in the pool. A prefill chunk and a decode step are the same
thing, a row of the next uncomputed tokens; a row that reaches the last token draws the next one.
So a preempted sequence simply starts again from nothing (or from the prefix cache), and a decode
that arrives by handoff starts with everything but its last token computed.

Two halves keep the queues, ``prefill.py`` of prompts and ``decode.py`` of what goes on after them.
They share one pool and the token budget of each step, and how they share it depends on the mode
(``modes.py``)::

    balanced      every decode one token, then the prompts in arrival order
    prefill-led   prompts may take 80 % of the tokens; decodes that find no room wait in turn
    decode-led    as balanced, but beside decodes prompts get a chunk now and then, so that steps
                  keep within the decode SLA on average

What one half leaves, the other takes. Blocks of a prompt are acquired whole when it is admitted; a
decode grows block by block and the newest gives way when the pool is full.

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
from common.kv.blocks import BlockManager, PublishedBlocks
from common.messages.fields import Mode, WorkerLoad, WorkerRates
from common.messages.handoff import FirstToken
from common.sampling import FinishReason
from common.scheduler.compute_quota import ComputeQuota
from common.scheduler.decode import DecodeScheduler
from common.scheduler.effects import Effect, RequestBroke
from common.scheduler.migration import Migration, migration_of
from common.scheduler.modes import ModeMachine, Pressure, Triggers
from common.scheduler.prefill import PrefillScheduler
from common.scheduler.rates import StepRates
from common.scheduler.request import (
    LocalRequest,
    NewRequest,
    PendingDraw,
    RequestPhase,
    Sequence,
)
from common.scheduler.request_book import RequestBook
from common.scheduler.sequence_blocks import SequenceBlocks
from common.scheduler.steps import RowResult, SchedulerLimits, StepDraft, StepPlan
from common.scheduler.swap import SwapSpace

DEFAULT_TRIGGERS = Triggers()


class LocalScheduler:
    """Owns the requests of one worker and decides each step."""

    def __init__(
        self,
        blocks: BlockManager,
        limits: SchedulerLimits,
        swap: SwapSpace | None = None,
        triggers: Triggers = DEFAULT_TRIGGERS,
        *,
        is_keeping: bool = False,
    ) -> None:
        """With ``is_keeping``, ``take_computed`` must be called after every ``publish``."""
        if limits.max_num_batched_tokens < limits.block_size:
            raise ConfigError(
                f"a step of {limits.max_num_batched_tokens} tokens cannot compute a block of "
                f"{limits.block_size}"
            )
        self._limits = limits
        self._triggers = triggers
        self._held = SequenceBlocks(blocks, limits, swap or SwapSpace(0), is_keeping=is_keeping)
        self._prefill = PrefillScheduler(self._held, limits.block_size)
        self._decode = DecodeScheduler(self._held)
        self._book = RequestBook(self._held, self._prefill, self._decode)
        self._modes = ModeMachine(triggers)
        self._rates = StepRates(limits.block_size, limits.min_chunk)
        self._quota = ComputeQuota(limits.quota_seconds, limits.block_size)
        self._open_steps: deque[StepPlan] = deque()
        self._num_planned = 0
        self.num_steps = 0

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._limits.block_size

    # ---- what comes from outside ---------------------------------------------------------------

    def add(self, new: NewRequest, *, is_remote: bool, num_awaited_tokens: int = 0) -> list[Effect]:
        """Take a request in to prefill it; another worker decodes it when ``is_remote``.

        Where its first ``num_awaited_tokens`` are to be copied or loaded, later requests pass it by
        until ``prefix_arrived``.
        """
        request = LocalRequest(new, is_remote)
        if self._book.find(new.request_id) is not None:
            raise LocalProtocolError(f"request {new.request_id} is here already")
        # The K and V of the last token drawn are never needed.
        num_stored = len(new.prompt) + (1 if new.params.num_left > 1 else 0)
        if not self._held.can_ever_hold(num_stored):
            message = (
                f"the prompt's {len(new.prompt)} tokens do not fit the worker's KV pool of "
                f"{self._held.num_tokens_in_all} tokens"
            )
            return [RequestBroke(new.request_id, new.gateway_id, ErrorCode.NO_ROOM, message)]
        request.sequences = [Sequence(request, new.params.first_choice, f"{new.request_id}/0")]
        self._book.enter(request)
        self._prefill.add(request.lead, num_awaited_tokens=num_awaited_tokens)
        return []

    def prefix_arrived(self, request_id: RequestId) -> None:
        """The prefix that a request waits for is in the cache, or will not come."""
        request = self._book.find(request_id)
        if request is not None and request.sequences:
            self._prefill.prefix_arrived(request.lead)

    def prefix_has_no_room(self, request_id: RequestId) -> None:
        """The prefix that a request waits for finds no room: it is to be loaded when there is some.

        ``RoomForPrefix`` comes then, in the request's turn, and ``prefix_arrived`` is to follow.
        """
        request = self._book.find(request_id)
        if request is not None and request.sequences:
            self._prefill.prefix_has_no_room(request.lead)

    def withdraw(self, request_id: RequestId) -> bool:
        """Forget a request that holds nothing yet, for another worker to have it.

        False, and nothing is changed, where it has begun, or is not here.
        """
        request = self._book.find(request_id)
        return request is not None and self._book.withdraw(request)

    def can_reserve(self) -> bool:
        """Whether a decode side may take more: nothing of its own waits for room."""
        return not (self._prefill.is_short_of_room or self._decode.is_short_of_room)

    def add_decoding(
        self,
        new: NewRequest,
        owner: str,
        first_tokens: SequenceOf[FirstToken],
        num_cached_tokens: int,
    ) -> list[Effect]:
        """Take over a request whose prompt is computed in ``owner``'s blocks.

        ``first_tokens`` are of the choices that go on. The prompt may end in what the request has
        drawn before (``SamplingParams``).
        """
        request = LocalRequest(new, is_remote=False, num_cached_tokens=num_cached_tokens)
        self._book.enter(request)
        request.sequences = [
            Sequence(request, first.choice, owner if place == 0 else f"{owner}/{first.choice}")
            for place, first in enumerate(first_tokens)
        ]
        for sequence, first in zip(request.sequences, first_tokens, strict=True):
            sequence.draw(first.token)
        self._held.adopt(request.lead, len(new.prompt))
        return self._book.begin_decode(request)

    def place_locally(self, request_id: RequestId) -> list[Effect]:
        """Decode here what was to be handed over, as the controller ordered."""
        request = self._book.find(request_id)
        if request is None:
            return []
        request.is_remote = False
        if request.phase is not RequestPhase.SENDING:
            return []
        return self._book.decode_what_was_to_be_sent(request)

    def open_handoff(self, request_id: RequestId) -> None:
        """From now on a handoff may read the request's blocks."""
        request = self._book.find(request_id)
        if request is None:
            raise LocalProtocolError(f"request {request_id} is not here")
        request.is_handoff_open = True

    def close_handoff(self, request_id: RequestId, *, was_accepted: bool) -> list[Effect]:
        """No handoff reads the request's blocks any more."""
        request = self._book.find(request_id)
        if request is None:
            return []
        request.is_handoff_open = False
        if was_accepted:
            # The decode side reports the end.
            self._book.strike(request)
            return []
        return self._book.settle(request) if request.phase is RequestPhase.ENDED else []

    def freeze(self, request_id: RequestId) -> list[Effect]:
        """Go on with a decode no more, so that it can be migrated.

        ``DecodeFrozen`` comes when no open step has it: here and now, or from ``finish_step``, and
        not at all if it ends before. A frozen request keeps its blocks, and ends like any other.
        LocalProtocolError unless it is one live choice that decodes and is not preempted.
        """
        return self._book.freeze(request_id)

    def thaw(self, request_id: RequestId) -> list[Effect]:
        """Go on with a frozen request, whose handoff is closed; nothing where it ended."""
        return self._book.thaw(request_id)

    def migration_of(self, request_id: RequestId) -> Migration:
        """Describe a frozen request for its handoff; LocalProtocolError where it is not frozen."""
        return migration_of(request_id, self._book.find(request_id))

    def cancel(self, request_id: RequestId, choice: int | None) -> list[Effect] | None:
        """End a request or one choice. Returns None when the request is not here."""
        request = self._book.find(request_id)
        return None if request is None else self._book.cancel(request, choice)

    def fail(self, request_id: RequestId, code: ErrorCode, message: str) -> list[Effect]:
        """End a request with an error."""
        request = self._book.find(request_id)
        return [] if request is None else self._book.fail(request, code, message)

    def find(self, request_id: RequestId) -> LocalRequest | None:
        """Return the request, if it is here."""
        return self._book.find(request_id)

    def request_ids(self) -> tuple[RequestId, ...]:
        """Return the ids of all requests here."""
        return self._book.request_ids()

    # ---- who leads -----------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """Which half leads the next step."""
        return self._modes.mode

    def direct(self, mode: Mode | None, num_steps: int) -> None:
        """Let ``mode`` lead the next ``num_steps`` steps that have prompts and decodes.

        After them, and at once with None, the worker's own triggers decide. The newest counts.
        """
        self._modes.direct(mode, num_steps)

    def note_step(self, seconds: float, plan: StepPlan) -> None:
        """Learn from a finished step, which took ``seconds`` since the one before it ended."""
        self._rates.note(seconds, plan)
        self._quota.note(seconds, plan)

    def rates(self) -> WorkerRates:
        """Return how fast the worker was of late; 0 where nothing was measured."""
        return self._rates.rates()

    @property
    def quota_error(self) -> float:
        """Mean error of predicted times of late, as a share; 0 where prompts have no quota."""
        return self._quota.error

    def attention_seconds(self, plan: StepPlan) -> float:
        """Estimate what attention over a step's prompts took (see ``ComputeQuota``)."""
        return self._quota.attention_seconds(plan)

    # ---- one step ------------------------------------------------------------------------------

    def plan(self) -> tuple[StepPlan | None, list[Effect]]:
        """Decide the next step; None when there is nothing to compute before an open step ends.

        At most one earlier step may be open.
        """
        if len(self._open_steps) > 1:
            raise LocalProtocolError("two steps are open already")
        effects: list[Effect] = []
        draft = StepDraft(
            self._num_planned,
            self._limits.max_num_batched_tokens,
            self._limits.max_num_seqs,
            self._quota.allowance(),
        )
        ready = self._decode.ready()
        has_prompts = self._prefill.has_work or bool(self._decode.waiting)
        self._modes.observe(self._pressure(is_decoding=bool(ready)))
        max_decodes = self._modes.num_decode_tokens(draft.tokens_left, has_prompts=has_prompts)
        effects += self._decode.plan(draft, ready, max_decodes, self._outgrew)
        num_left_out = len(ready) - len(draft.rows)
        effects += self._decode.resume(draft)
        if has_prompts:
            effects += self._plan_prompts(draft, num_left_out)
        if max_decodes < len(ready):  # they get what the prompts left
            rest = [sequence for sequence in ready if not draft.has(sequence)]
            effects += self._decode.plan(draft, rest, draft.rows_left, self._outgrew)
        if not draft.rows:
            return None, effects
        self._modes.note_planned(has_both=has_prompts and bool(ready))
        return self._open(draft), effects

    def _pressure(self, *, is_decoding: bool) -> Pressure:
        return Pressure(
            num_waiting=len(self._prefill.waiting),
            token_seconds=self._rates.token_seconds if is_decoding else 0.0,
            load=self._held.share_in_use() if self._modes.asks_for_load else 0.0,
        )

    def _outgrew(self, sequence: Sequence) -> list[Effect]:
        return self._book.finish_sequence(sequence, FinishReason.LENGTH)

    def _plan_prompts(self, draft: StepDraft, num_left_out: int) -> list[Effect]:
        max_tokens = draft.tokens_left
        num_decodes = len(draft.rows)
        if num_decodes and self._modes.mode is Mode.DECODE_LED:
            allowed = self._rates.prompt_allowance(self._triggers.decode_sla_seconds)
            max_tokens = max_tokens if allowed is None else min(max_tokens, allowed)
            if allowed == 0:
                self._rates.hold_back(draft.number)
        # A decode that was left out of this step counts among the worker's sequences all the same.
        max_new = draft.rows_left - num_left_out - self._prefill.num_to_decode_here
        # What waits for room to come back lets nothing new take it.
        queues = () if self._decode.swapped else (self._decode.waiting, self._prefill.waiting)
        effects = self._prefill.plan(draft, max_tokens, max_new, queues)
        if num_decodes and len(draft.rows) > num_decodes:
            self._rates.spend(draft.number)
        return effects

    def _open(self, draft: StepDraft) -> StepPlan:
        plan = StepPlan(draft.number, tuple(draft.rows))
        for place, row in enumerate(plan.rows):
            draw = PendingDraw(plan.number, place)
            row.sequence.enter_step(row.num_tokens, draw if row.is_last else None)
        self._num_planned += 1
        self._open_steps.append(plan)
        return plan

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
            effects += self._book.finish_row(row, result)
        return effects

    def publish(self) -> None:
        """Make what was computed findable for later prompts. Nobody need wait for it."""
        self._held.publish_all()

    def take_computed(self) -> list[PublishedBlocks]:
        """Return the blocks that were computed here and published since the last call, in order.

        Each has an owner that holds it, for the caller to release. Nothing unless ``is_keeping``.
        """
        return self._held.take_computed()

    def load(self, *, num_sending: int, num_receiving: int) -> WorkerLoad:
        """Count what there is to do."""
        prefill, decode = self._prefill, self._decode
        again = sum(sequence.num_uncomputed for sequence in decode.waiting)
        return WorkerLoad(
            num_waiting=len(prefill.waiting) + len(prefill.receiving) + len(decode.waiting),
            num_prefilling=len(prefill.running),
            num_sending=num_sending,
            num_receiving=num_receiving,
            num_decoding=len(decode.running) + len(decode.frozen),
            num_decode_tokens=sum(each.length for each in (*decode.running, *decode.frozen)),
            num_swapped=len(decode.swapped),
            uncomputed_tokens=prefill.num_uncomputed_tokens + again,
            num_steps=self.num_steps,
        )

    def validate(self) -> None:
        """Raise InvariantViolationError unless queues and host slots agree with the requests."""
        self._book.validate()
