"""The requests of one worker: what becomes of each by draws, ends and handoffs. Pure."""

from common.errors import ErrorCode, InvariantViolationError, LocalProtocolError
from common.ids import RequestId
from common.kv.blocks import Hold
from common.messages.handoff import AbortReason, FirstToken
from common.sampling import FinishReason, SampledToken
from common.scheduler.decode import DecodeScheduler
from common.scheduler.effects import (
    CopyBlocks,
    DecodeBegan,
    DecodeFrozen,
    Effect,
    EmitTokens,
    PromptComputed,
    RequestBroke,
    RequestEnded,
    StopHandoff,
)
from common.scheduler.prefill import PrefillScheduler
from common.scheduler.request import LocalRequest, RequestPhase, Sequence
from common.scheduler.sequence_blocks import SequenceBlocks
from common.scheduler.steps import PlannedRow, RowFailed, RowResult


class RequestBook:
    """Keeps every request until its last block is let go, and its sequences in their queues."""

    def __init__(
        self, held: SequenceBlocks, prefill: PrefillScheduler, decode: DecodeScheduler
    ) -> None:
        self._held = held
        self._prefill = prefill
        self._decode = decode
        self._requests: dict[RequestId, LocalRequest] = {}

    def find(self, request_id: RequestId) -> LocalRequest | None:
        """Return the request, if it is here."""
        return self._requests.get(request_id)

    def request_ids(self) -> tuple[RequestId, ...]:
        """Return the ids of all requests here."""
        return tuple(self._requests)

    def enter(self, request: LocalRequest) -> None:
        """Write a request in; LocalProtocolError when one of its id is here."""
        if request.request_id in self._requests:
            raise LocalProtocolError(f"request {request.request_id} is here already")
        self._requests[request.request_id] = request

    def withdraw(self, request: LocalRequest) -> bool:
        """Forget a request that has not begun, as if it had never come; False where it has."""
        if request.phase is not RequestPhase.WAITING:
            return False
        self.strike(request)
        return True

    def strike(self, request: LocalRequest) -> None:
        """Forget a request that ends elsewhere; here only its blocks go."""
        request.phase = RequestPhase.ENDED
        self._requests.pop(request.request_id)
        self._let_go(request)

    # ---- outcomes ------------------------------------------------------------------------------

    def finish_row(self, row: PlannedRow, result: RowResult) -> list[Effect]:
        """Take the outcome of one row in, whose step is over."""
        sequence = row.sequence
        request = sequence.request
        if request.phase is RequestPhase.ENDED:
            return self.settle(request)
        if sequence.finish_reason is not None:
            if not sequence.is_in_step:
                self._held.release(sequence)
            return []
        if isinstance(result, RowFailed):
            return self.fail(request, ErrorCode.INTERNAL, result.message)
        sequence.num_computed += row.num_tokens
        self._held.note_computed(sequence)
        if not row.is_last:
            return self._prefill.progress(sequence)
        if not request.has_drawn:
            return self._finish_prompt(request, result)
        if not row.is_decode:
            self._prefill.remove(sequence)
            self._decode.add(sequence)
        effects = self._draw(sequence, result[0])
        if request.phase is RequestPhase.FROZEN:
            effects += self.frozen_when_still(request)
        return effects

    def _finish_prompt(
        self, request: LocalRequest, tokens: tuple[SampledToken, ...]
    ) -> list[Effect]:
        """The prompt is whole: split into choices, each with its first token."""
        request.has_drawn = True
        lead = request.lead
        self._prefill.remove(lead)
        request.sequences += [
            Sequence(request, choice, f"{request.request_id}/{choice}")
            for choice in request.new.params.choices[1:]
        ]
        effects: list[Effect] = []
        for sequence, token in zip(request.sequences, tokens, strict=True):
            sequence.draw(token)
            sequence.finish_reason = sequence.find_finish_reason()
            effects.append(self._emit(sequence))
        going_on = [s for s in request.sequences if s.finish_reason is None]
        if not going_on:
            return effects + self.end(request, AbortReason.NOT_NEEDED)
        if not request.is_remote:
            return effects + self.begin_decode(request)
        request.phase = RequestPhase.SENDING
        self._prefill.sending += going_on
        self._held.set_hold(lead, Hold.TRANSFER)
        firsts = tuple(
            FirstToken(choice=s.choice, token=token)
            for s, token in zip(request.sequences, tokens, strict=True)
            if s.finish_reason is None
        )
        effects.append(PromptComputed(request.request_id, firsts, request.num_cached_tokens))
        return effects

    def begin_decode(self, request: LocalRequest) -> list[Effect]:
        """Give every choice that goes on its own tail of the prompt's blocks."""
        request.phase = RequestPhase.DECODING
        request.has_drawn = True
        lead = request.lead
        if len(request.sequences) > 1:
            self._held.publish(lead)  # the others share its blocks as they are found
        num_prompt = len(request.new.prompt)
        effects: list[Effect] = [DecodeBegan(request.request_id)]
        for sequence in request.sequences:
            if sequence.finish_reason is not None:
                continue
            if sequence is lead:
                self._decode.add(sequence)
                continue
            copies = self._held.fork(lead, sequence, num_prompt)
            if copies is None:
                self._decode.waiting.append(sequence)
                continue
            if copies:
                effects.append(CopyBlocks(copies))
            self._decode.add(sequence)
        if lead.finish_reason is not None:
            self._held.release(lead)
        return effects

    def decode_what_was_to_be_sent(self, request: LocalRequest) -> list[Effect]:
        """Decode a computed prompt here after all."""
        for sequence in request.sequences:
            self._prefill.remove(sequence)
        self._held.set_hold(request.lead, Hold.REQUEST)
        return self.begin_decode(request)

    def _draw(self, sequence: Sequence, token: SampledToken) -> list[Effect]:
        sequence.draw(token)
        reason = sequence.find_finish_reason()
        if reason is None:
            return [self._emit(sequence)]
        return self.finish_sequence(sequence, reason)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> list[Effect]:
        """End one choice, and with the last one its request."""
        self._drop(sequence, reason)
        effects: list[Effect] = [self._emit(sequence)]
        if not sequence.request.is_live:
            effects += self.end(sequence.request, AbortReason.NOT_NEEDED)
        return effects

    def _emit(self, sequence: Sequence) -> EmitTokens:
        return EmitTokens(sequence.request.new.gateway_id, sequence.take_delta())

    # ---- migration -----------------------------------------------------------------------------

    def freeze(self, request_id: RequestId) -> list[Effect]:
        """Go on with a decode no more, so that it can be migrated."""
        request = self._requests.get(request_id)
        live = [] if request is None else [s for s in request.sequences if s.finish_reason is None]
        if request is None or len(live) != 1 or live[0] not in self._decode.running:
            raise LocalProtocolError(f"request {request_id} is not one live decoding choice")
        request.phase = RequestPhase.FROZEN
        self._decode.freeze(live[0])
        return self.frozen_when_still(request)

    def frozen_when_still(self, request: LocalRequest) -> list[Effect]:
        """Tell of a frozen request as soon as no step has it any more."""
        sequence = request.live_sequence
        if sequence.is_in_step:
            return []
        self._held.set_hold(sequence, Hold.TRANSFER)
        return [DecodeFrozen(request.request_id)]

    def thaw(self, request_id: RequestId) -> list[Effect]:
        """Go on with a frozen request; nothing where it ended meanwhile."""
        request = self._requests.get(request_id)
        if request is None or request.phase is not RequestPhase.FROZEN:
            return []
        if request.is_handoff_open:
            raise LocalProtocolError(f"a handoff reads the blocks of request {request_id}")
        request.phase = RequestPhase.DECODING
        self._held.set_hold(request.live_sequence, Hold.REQUEST)
        self._decode.thaw(request.live_sequence)
        return []

    # ---- letting go ----------------------------------------------------------------------------

    def cancel(self, request: LocalRequest, choice: int | None) -> list[Effect]:
        """End a request or one choice."""
        if choice is None:
            request.was_cancelled = True
        if request.phase is RequestPhase.ENDED:
            return []
        if choice is not None and not request.has_drawn:
            return []  # the choices are not drawn yet, so none can be complete
        for sequence in request.sequences:
            if sequence.finish_reason is None and choice in (None, sequence.choice):
                self._drop(sequence, FinishReason.CANCELLED)
        return [] if request.is_live else self.end(request, AbortReason.CANCELLED)

    def fail(self, request: LocalRequest, code: ErrorCode, message: str) -> list[Effect]:
        """End a request with an error, unless it ended already."""
        if request.phase is RequestPhase.ENDED:
            return []
        for sequence in request.sequences:
            self._drop(sequence, FinishReason.CANCELLED)
        request.is_told = True
        broke = RequestBroke(request.request_id, request.new.gateway_id, code, message)
        return [broke, *self.end(request, AbortReason.CANCELLED)]

    def _drop(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out of every queue; its blocks go unless something reads them."""
        sequence.finish_reason = sequence.finish_reason or reason
        self._prefill.remove(sequence)
        self._decode.remove(sequence)
        if sequence.is_in_step or sequence.request.is_handoff_open:
            return
        if sequence.request.phase is not RequestPhase.SENDING:
            self._held.release(sequence)

    def end(self, request: LocalRequest, reason: AbortReason) -> list[Effect]:
        """End a request whose choices have all ended."""
        request.phase = RequestPhase.ENDED
        effects: list[Effect] = []
        if request.is_handoff_open:
            effects.append(StopHandoff(request.request_id, reason))
        return effects + self.settle(request)

    def settle(self, request: LocalRequest) -> list[Effect]:
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
            self._prefill.remove(sequence)
            self._decode.remove(sequence)
            self._held.release(sequence)

    # ---- what holds ----------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise InvariantViolationError unless each live sequence stands in exactly one queue."""
        queued = [id(s) for queue in (*self._prefill.queues, *self._decode.queues) for s in queue]
        live = [
            id(sequence)
            for request in self._requests.values()
            for sequence in request.sequences
            if sequence.finish_reason is None and request.phase is not RequestPhase.ENDED
        ]
        if sorted(queued) != sorted(live):
            raise InvariantViolationError(f"{len(live)} live sequences, {len(queued)} queued")
        self._held.validate_slots(
            [slot for r in self._requests.values() for s in r.sequences for slot in s.slots]
        )
