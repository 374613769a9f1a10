"""A request and its sequences as one worker sees them."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum

from common.ids import GatewayId, RequestId
from common.messages.tokens import TokenDelta
from common.sampling import FinishReason, SampledToken, SamplingParams


class RequestPhase(StrEnum):
    """Where a request stands on this worker."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    SENDING = "sending"
    DECODING = "decoding"
    FROZEN = "frozen"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What a worker is told of a request. ``prompt`` are its token ids."""

    request_id: RequestId
    gateway_id: GatewayId
    tokens_endpoint: str
    params: SamplingParams
    prompt: SequenceOf[int]


@dataclass(frozen=True, slots=True)
class PendingDraw:
    """The draw after row ``row`` of step ``step``, which is in flight."""

    step: int
    row: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: the prompt and what was drawn after it.

    Positions ``0 .. num_computed - 1`` have K and V in the pool, in the blocks of ``owner``; the
    next ``num_planned`` are computed by the ``num_open_steps`` steps in flight. ``pending`` is the
    draw of these that comes last. ``unsent`` are drawn tokens that have not gone to the gateway
    yet. The first ``num_handed`` blocks were computed by another worker. While its K and V lie in
    host memory, ``slots`` say where, and there are no blocks. While a prompt waits, its first
    ``num_expected`` tokens are cached here, or are to come from another worker or a store; where
    ``is_load_due``, they are loaded once there is room.

    ``age`` orders decoding sequences: a preempted one that is back counts as new. ``last_planned``
    is the last step that was planned with it, and ``turn`` its rank when a step had too few rows.
    ``drawn_at`` is when its last token was drawn, on the scheduler's own clock of steps; None when
    that says nothing of the time between two tokens.
    """

    request: "LocalRequest"
    choice: int
    owner: str
    outputs: list[int] = field(default_factory=list)
    unsent: list[SampledToken] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    num_handed: int = 0
    num_expected: int = 0
    is_load_due: bool = False
    block_table: tuple[int, ...] = ()
    num_open_steps: int = 0
    num_planned: int = 0
    pending: PendingDraw | None = None
    finish_reason: FinishReason | None = None
    slots: tuple[int, ...] = ()
    age: int = 0
    last_planned: int = -1
    turn: int = 0
    last_token: SampledToken | None = None
    drawn_at: float | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.request.new.prompt) + len(self.outputs)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose K and V are still to be computed; 1 while decoding."""
        return self.length - self.num_computed

    @property
    def num_to_compute(self) -> int:
        """Tokens that are still to be computed here as far as is known: the last one always is."""
        return min(self.num_uncomputed, max(1, self.length - self.num_expected))

    @property
    def is_in_step(self) -> bool:
        """Whether a step in flight reads or writes its blocks."""
        return self.num_open_steps > 0

    @property
    def num_pending(self) -> int:
        """Tokens that are drawn by steps in flight: at most one."""
        return 0 if self.pending is None else 1

    @property
    def next_length(self) -> int:
        """Tokens of prompt and output once the steps in flight are over."""
        return self.length + self.num_pending

    @property
    def can_decode(self) -> bool:
        """Whether the next decode step may be planned now.

        Not while a step in flight draws the token that ends the choice, or one that penalties
        must read.
        """
        if self.pending is None:
            return True
        params = self.request.new.params
        if len(self.outputs) + 1 >= params.num_left:
            return False
        return not params.has_penalties

    def draw(self, token: SampledToken) -> None:
        """Append a token that was drawn; the gateway does not have it yet."""
        self.outputs.append(token.token_id)
        self.unsent.append(token)
        self.last_token = token

    def enter_step(self, num_tokens: int, draw: PendingDraw | None) -> None:
        """A step that computes the next ``num_tokens`` tokens is in flight now."""
        self.num_open_steps += 1
        self.num_planned += num_tokens
        self.pending = draw

    def leave_step(self, num_tokens: int, draw: PendingDraw) -> None:
        """A step is over; ``draw`` is pending no more."""
        self.num_open_steps -= 1
        self.num_planned -= num_tokens
        if self.pending == draw:
            self.pending = None

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the token ids at positions ``start .. end - 1``."""
        prompt = self.request.new.prompt
        num_prompt = len(prompt)
        part = list(prompt[start:end])
        if end > num_prompt:
            part += self.outputs[max(0, start - num_prompt) : end - num_prompt]
        return part

    def find_finish_reason(self) -> FinishReason | None:
        """Return why the choice ends with its last output, or None when it goes on."""
        params = self.request.new.params
        last = self.outputs[-1]
        if params.num_drawn + len(self.outputs) > params.min_tokens:
            if last in params.stop_token_ids:
                return FinishReason.STOP
            if last in params.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
        if len(self.outputs) >= params.num_left:
            return FinishReason.LENGTH
        return None

    def take_delta(self) -> TokenDelta:
        """Return what the gateway has not been sent yet; it counts as sent from now on."""
        tokens = tuple(self.unsent)
        self.unsent.clear()
        num_drawn = self.request.new.params.num_drawn
        place = len(self.outputs) - len(tokens)
        return TokenDelta(
            request_id=self.request.request_id,
            choice=self.choice,
            index=num_drawn + place,
            tokens=tokens,
            finish_reason=self.finish_reason,
            num_cached_tokens=self.request.num_cached_tokens if place == 0 else None,
        )


@dataclass(slots=True, eq=False)
class LocalRequest:
    """One request on this worker.

    ``is_remote`` says that another worker decodes it. ``is_handoff_open`` holds its blocks while a
    handoff may still read them, whatever else happens to the request. ``is_told`` says that its
    end was reported already, as a failure, though blocks may still be held. ``arrival`` numbers
    requests in the order in which they came.
    """

    new: NewRequest
    is_remote: bool
    phase: RequestPhase = RequestPhase.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int = 0
    is_handoff_open: bool = False
    has_drawn: bool = False
    was_cancelled: bool = False
    is_told: bool = False
    arrival: int = 0

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return self.new.request_id

    @property
    def lead(self) -> Sequence:
        """The sequence that computes the prompt for all choices."""
        return self.sequences[0]

    @property
    def live_sequence(self) -> Sequence:
        """The first choice that goes on; StopIteration when none does."""
        return next(s for s in self.sequences if s.finish_reason is None)

    @property
    def is_live(self) -> bool:
        """Whether any choice goes on."""
        return bool(self.live_choices)

    @property
    def live_choices(self) -> frozenset[int]:
        """The choices that go on."""
        return frozenset(s.choice for s in self.sequences if s.finish_reason is None)
