"""One request's record: walks the table of ``request_machine`` and says whom to tell."""

from collections import Counter
from collections.abc import Iterable

from common.errors import ErrorCode
from common.handoff.machine import Ignored, Story, decide
from common.ids import WorkerId
from common.messages.control import (
    Cancel,
    PrefixUnavailable,
    RequestFailed,
    RequestPlaced,
    SubmitRequest,
)
from services.controller.effects import Effect, Note, PeerKey, Send
from services.controller.policy.views import RequestView
from services.controller.request_machine import (
    CANCELLING,
    DECODED,
    REQUEST_TABLE,
    UNPLACED,
    CancelReceived,
    CancelTimedOut,
    ChoiceCancelReceived,
    DeadlinePassed,
    DecodePlaced,
    DecodeRefusedReceived,
    DecodeSideFailed,
    DecodeSideFinished,
    DecodeSideGone,
    DecodeStartedReceived,
    Dispatched,
    GatewayGone,
    LookUpAnswered,
    LookUpLost,
    LookUpStarted,
    MigrationFailedReceived,
    MigrationLanded,
    MigrationStarted,
    MigrationTargetGone,
    PrefillSideFailed,
    PrefillSideFinished,
    PrefillSideGone,
    PrefixLost,
    RequestEvent,
    RequestPhase,
    Requeued,
    Submitted,
)

CANCEL_REPORT_SECONDS = 30.0
"""How long the owner may take to report a cancelled request's end."""


class RequestRecord:
    """One request. Made by a ``Submitted`` event that was taken in.

    ``prefill`` and ``decode`` are None while the request is queued or looked up. ``asked`` is the
    worker that looks it up, ``asked_at`` since when, and ``num_stored_blocks`` what was found: 0
    also where nobody was asked or has answered. ``prefix_from`` was told to write a prefix of the
    prompt to the prefill side. ``decode`` is the same as
    ``prefill`` where one worker does both, and None while no decode side is placed. ``refusals``
    holds when a decode side refused last, ``faults`` how often it could not work for another reason
    than room. ``view`` is what policies see, and ``hashes`` are its prompt's, where they read them.
    ``payload`` is the prompt's frame, empty once nobody can need it again. ``unserved_since`` tells
    from when on no set of ready workers could have taken the queued request. ``target`` is where a
    running decode moves to, None otherwise and once it is gone. ``arrival`` numbers all requests.
    Times are on the clock of the ``now`` arguments.
    """

    def __init__(
        self,
        submission: SubmitRequest,
        gateway: PeerKey,
        view: RequestView,
        payload: tuple[bytes, ...],
        now: float,
    ) -> None:
        self.submission = submission
        self.request_id = submission.request_id
        self.gateway = gateway
        self.prefill: PeerKey | None = None
        self.decode: PeerKey | None = None
        self.asked: PeerKey | None = None
        self.asked_at = now
        self.num_stored_blocks = 0
        self.prefix_from: PeerKey | None = None
        self.view = view
        self.payload = payload
        self.arrival = 0
        self.num_placements = 0
        self.phase = RequestPhase.QUEUED
        self.submitted_at = now
        self.unserved_since: float | None = None
        self.hashes: tuple[bytes, ...] = ()
        self.waiting_since: float | None = None
        self.target: PeerKey | None = None
        self.target_lost_at: float | None = None
        self.moved_at: float | None = None
        self.move_failed_at: float | None = None
        self.cancelled_at: float | None = None
        self.was_stopped = False
        self.refusals: dict[PeerKey, float] = {}
        self.faults: Counter[PeerKey] = Counter()
        self._story = Story()

    @property
    def num_blocks(self) -> int:
        """Blocks of its prompt and of its growth."""
        return self.view.num_blocks

    def side_of(self, peer: PeerKey) -> str | None:
        """Return "prefill", "decode", "target", "asked" or, for a worker without a part, None.

        A combined worker is its owner's side.
        """
        sides: list[tuple[str, PeerKey | None]]
        sides = [("prefill", self.prefill), ("decode", self.decode), ("asked", self.asked)]
        if self.phase in DECODED:
            sides = [("decode", self.decode), ("target", self.target), ("prefill", self.prefill)]
        return next((side for side, key in sides if key == peer), None)

    def handle(self, event: RequestEvent, cause: str, now: float) -> list[Effect]:
        """Take one event and return what to do. The only mutator.

        Raises IllegalTransitionError or RemoteProtocolError, with nothing changed.
        """
        name = type(event).__name__
        before = self.phase
        verdict = decide(REQUEST_TABLE, "request", before, name, self._story)
        self._story.add(before, name)
        if isinstance(verdict, Ignored):
            facts = (("ignored", name), ("phase", before), ("reason", verdict.reason))
            return [Note("event_ignored", cause, self.request_id, facts, level="debug")]
        effects = self._apply(event, cause, now)
        if self.phase not in (*UNPLACED, RequestPhase.PLACED):
            self.forget_prompt()
        self.validate()
        return effects

    def _apply(self, event: RequestEvent, cause: str, now: float) -> list[Effect]:  # noqa: C901, PLR0911, PLR0912 - one case per event
        match event:
            case LookUpStarted(asked):
                self.asked, self.asked_at = asked, now
                self.phase = RequestPhase.LOOKING_UP
                return []
            case LookUpAnswered(num_blocks):
                return self._looked_up(num_blocks)
            case LookUpLost():
                return self._looked_up(0)
            case Dispatched(prefill, decode, prefix_from):
                self.prefill, self.decode = prefill, decode
                self.prefix_from = prefix_from
                self.num_placements += 1
                self.unserved_since = None
                self.phase = RequestPhase.PLACED
                return []
            case Requeued():
                self.prefill = self.decode = self.prefix_from = None
                self.phase = RequestPhase.QUEUED
                return []
            case PrefixLost():
                return self._prefix_lost(cause)
            case DecodeRefusedReceived():
                if self.decode is not None:
                    self.refusals[self.decode] = now
                self.decode = None
                self.phase = RequestPhase.WAITING
                self.waiting_since = now if self.waiting_since is None else self.waiting_since
                return []
            case DecodePlaced(decode):
                self.decode = decode
                self.phase = RequestPhase.PLACED
                return []
            case DecodeStartedReceived():
                return self._decode_started(cause)
            case MigrationStarted(target):
                self.target, self.target_lost_at = target, None
                self.phase = RequestPhase.MIGRATING
                return []
            case MigrationLanded():
                self.decode, self.target, self.moved_at = self.target, None, now
                return self._decode_started(cause)
            case MigrationFailedReceived():
                self.target, self.move_failed_at = None, now
                self.phase = RequestPhase.DECODING
                return []
            case MigrationTargetGone():
                self.target, self.target_lost_at = None, now
                return []
            case PrefillSideFinished() | DecodeSideFinished():
                self.phase = RequestPhase.UNKNOWN
                return []
            case PrefillSideFailed(code, message) | PrefillSideGone(code, message):
                return self._owner_lost(code, message, cause)
            case DecodeSideFailed(code, message) | DecodeSideGone(code, message):
                return self._decode_lost(code, message, cause, now)
            case CancelReceived(reason) | GatewayGone(reason):
                return self._stop(self._sides(), reason, cause, now)
            case ChoiceCancelReceived(choice, reason):
                self.forget_prompt()  # its tokens have come: it was taken in
                return self._tell(self._sides(), reason, cause, choice)
            case DeadlinePassed(code, message):
                failed = self._fail(code, message, cause)
                return [*failed, *self._stop(self._sides(), message, cause, now)]
            case CancelTimedOut():
                self.phase = RequestPhase.UNKNOWN
                facts = (
                    ("prefill", self.prefill and self.prefill[0]),
                    ("decode", self.decode and self.decode[0]),
                )
                return [Note("request_record_leaked", cause, self.request_id, facts, "error")]
            case Submitted():
                raise AssertionError("the table ignores a repeated submit")

    def _looked_up(self, num_blocks: int) -> list[Effect]:
        self.asked, self.num_stored_blocks = None, num_blocks
        self.phase = RequestPhase.QUEUED
        return []

    def _prefix_lost(self, cause: str) -> list[Effect]:
        self.prefix_from = None
        lost = PrefixUnavailable(request_id=self.request_id)
        return [Send(self.prefill, lost, cause)] if self.prefill else []

    def forget_prompt(self) -> None:
        """Let the prompt go: the prefill side has it and goes on with it."""
        self.payload = ()

    def tell_placed(self, cause: str) -> Send:
        """Return what tells the gateway which workers have the request."""
        assert self.prefill is not None, "it is queued"
        placed = RequestPlaced(
            request_id=self.request_id,
            prefill_worker=WorkerId(self.prefill[0]),
            decode_worker=WorkerId((self.decode or self.prefill)[0]),
        )
        return Send(self.gateway, placed, cause)

    def _sides(self) -> list[PeerKey]:
        sides = (self.prefill, self.decode)
        if self.phase in DECODED:
            sides = (self.decode, self.target)
        return list(dict.fromkeys(side for side in sides if side))

    def _decode_started(self, cause: str) -> list[Effect]:
        if self.phase not in CANCELLING:
            self.phase = RequestPhase.DECODING
            return []
        # Our cancel may have reached the decode side before its reservation did.
        self.phase = RequestPhase.CANCELLING_DECODE
        return self._tell([self.decode] if self.decode else [], "cancelled", cause)

    def _owner_lost(self, code: ErrorCode, message: str, cause: str) -> list[Effect]:
        """End with the prefill side, which owned it; the decode side stops."""
        effects: list[Effect] = []
        if self.phase not in CANCELLING:
            effects = self._fail(code, message, cause)
            others = [side for side in self._sides() if side != self.prefill]
            effects += self._tell(others, message, cause)
        self.phase = RequestPhase.UNKNOWN
        return effects

    def _decode_lost(self, code: ErrorCode, message: str, cause: str, now: float) -> list[Effect]:
        """End with the decode side where it owns the request, else stop the prefill side."""
        if self.phase in CANCELLING:
            self.phase = RequestPhase.UNKNOWN
            return []
        effects = self._fail(code, message, cause)
        if self.phase in DECODED:
            others = [side for side in self._sides() if side != self.decode]
            self.phase = RequestPhase.UNKNOWN
            return [*effects, *self._tell(others, message, cause)]
        owner = [self.prefill] if self.prefill else []
        return [*effects, *self._stop(owner, message, cause, now)]

    def _stop(self, sides: Iterable[PeerKey], reason: str, cause: str, now: float) -> list[Effect]:
        if self.phase in UNPLACED:
            self.asked = None
            self.phase = RequestPhase.UNKNOWN
            return []
        effects = self._tell(sides, reason, cause)
        self.cancelled_at = now
        self.was_stopped = True
        self.phase = (
            RequestPhase.CANCELLING_DECODE
            if self.phase in DECODED
            else RequestPhase.CANCELLING_PREFILL
        )
        return effects

    def _tell(
        self, sides: Iterable[PeerKey], reason: str, cause: str, choice: int | None = None
    ) -> list[Effect]:
        cancel = Cancel(request_id=self.request_id, choice=choice, reason=reason)
        return [Send(side, cancel, cause) for side in sides]

    def _fail(self, code: ErrorCode, message: str, cause: str) -> list[Effect]:
        self.was_stopped = True
        failed = RequestFailed(request_id=self.request_id, code=code, message=message)
        facts = (("code", code), ("message", message), ("phase", self.phase))
        return [
            Send(self.gateway, failed, cause),
            Note("request_failed", cause, self.request_id, facts, "warning"),
        ]

    def validate(self) -> None:
        """Check what must always hold. Raises AssertionError naming it: a bug of ours."""
        needs_decode = (RequestPhase.PLACED, *DECODED)
        assert self.phase not in needs_decode or self.decode is not None, self.phase
        may_move = (RequestPhase.MIGRATING, RequestPhase.CANCELLING_DECODE, RequestPhase.UNKNOWN)
        assert self.phase in may_move or self.target is None, (self.phase, self.target)
        assert self.phase is not RequestPhase.WAITING or self.decode is None, self.decode
        is_queued = self.phase in UNPLACED
        assert not is_queued or (self.prefill is None and self.decode is None), self.prefill
        assert not is_queued or self.payload, "its prompt is gone"
        assert is_queued or self.phase is RequestPhase.UNKNOWN or self.prefill, self.phase
        assert (self.phase is RequestPhase.LOOKING_UP) is (self.asked is not None), self.asked
        assert (self.phase not in CANCELLING) or self.cancelled_at is not None, self.phase
