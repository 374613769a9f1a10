"""The controller's record of one request.

Theory of operation. The record follows who owns the request. In QUEUED the controller does: it
holds the prompt until a worker is to have it, and a cancel or a passed deadline ends the record at
once. In LOOKING_UP it does so, too, while a worker with a store is asked how much of the prompt is
stored; the request is queued when the answer comes, is late, or cannot come any more. Then its
prefill side owns it until the decode side reports ``DecodeStarted``, and its decode
side from then on. The owner's report ends the record. A prefill side that did not take the request
in, because it was not reached or has just begun to drain, gives it back to the queue. While the
prefill side owns it, a refused decode puts it in WAITING until a decode side is placed again; the
prefill goes on meanwhile. A cancel, a passed deadline, a dead gateway or a failed other side tells
every side to stop, and the record waits in CANCELLING for the owner's report: a decode that had
started when the cancel was sent passes the ownership on there too. In MIGRATING the decode side
hands a running decode to a target: it owns the request until the target reports that its decode
started, and goes on with it where the move failed. UNKNOWN is the phase of every request without a
record: never seen, ended, or taken in by an earlier controller.
"""

from dataclasses import dataclass
from enum import StrEnum

from common.errors import ErrorCode
from common.handoff.machine import Ignored, Illegal, Legal, PeerFault, Table
from services.controller.effects import PeerKey


class RequestPhase(StrEnum):
    """Where a request stands, as the controller knows it."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    LOOKING_UP = "looking_up"
    PLACED = "placed"
    WAITING = "waiting"
    DECODING = "decoding"
    MIGRATING = "migrating"
    CANCELLING_PREFILL = "cancelling_prefill"
    CANCELLING_DECODE = "cancelling_decode"


@dataclass(frozen=True, slots=True)
class Submitted:
    """A gateway submitted the id."""


@dataclass(frozen=True, slots=True)
class LookUpStarted:
    """A worker was asked how much of the prompt is stored."""

    asked: PeerKey


@dataclass(frozen=True, slots=True)
class LookUpAnswered:
    """The worker that was asked found so many leading blocks."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class LookUpLost:
    """The worker that was asked died or left, or its answer is late: nothing is known stored."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Both sides were chosen; the prefill side gets the prompt, a prefix perhaps from a worker."""

    prefill: PeerKey
    decode: PeerKey
    prefix_from: PeerKey | None = None


@dataclass(frozen=True, slots=True)
class Requeued:
    """The prefill side has not taken the request in: it was not reached, or it drains."""


@dataclass(frozen=True, slots=True)
class PrefixLost:
    """The worker that was to write a prefix to the prefill side will not, or is gone."""


@dataclass(frozen=True, slots=True)
class DecodeRefusedReceived:
    """The decode side holds nothing for it."""


@dataclass(frozen=True, slots=True)
class DecodePlaced:
    """Another decode side was chosen."""

    decode: PeerKey


@dataclass(frozen=True, slots=True)
class DecodeStartedReceived:
    """The decode side owns the request."""


@dataclass(frozen=True, slots=True)
class PrefillSideFinished:
    """The prefill side reports that all choices ended there and it holds nothing."""


@dataclass(frozen=True, slots=True)
class DecodeSideFinished:
    """The decode side reports that all choices ended there and it holds nothing."""


@dataclass(frozen=True, slots=True)
class PrefillSideFailed:
    """The prefill side reports an error; it holds nothing any more."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class DecodeSideFailed:
    """The decode side reports an error; it holds nothing any more."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class PrefillSideGone:
    """The prefill side died or left."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class DecodeSideGone:
    """The decode side died or left."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class MigrationStarted:
    """The decode side was told to hand the running decode to ``target``."""

    target: PeerKey


@dataclass(frozen=True, slots=True)
class MigrationLanded:
    """The target reports that it decodes the request now."""


@dataclass(frozen=True, slots=True)
class MigrationFailedReceived:
    """The decode side goes on itself."""


@dataclass(frozen=True, slots=True)
class MigrationTargetGone:
    """The target died or left; the decode side will say whether it still has the request."""


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """The gateway wants no more of it."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChoiceCancelReceived:
    """The gateway wants no more of one choice."""

    choice: int
    reason: str


@dataclass(frozen=True, slots=True)
class GatewayGone:
    """Nobody listens any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request took too long: as a whole, in waiting for room, or for any worker."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class CancelTimedOut:
    """The owner has not reported the end of a cancelled request in time."""


RequestEvent = (
    Submitted
    | LookUpStarted
    | LookUpAnswered
    | LookUpLost
    | Dispatched
    | Requeued
    | PrefixLost
    | DecodeRefusedReceived
    | DecodePlaced
    | DecodeStartedReceived
    | PrefillSideFinished
    | DecodeSideFinished
    | PrefillSideFailed
    | DecodeSideFailed
    | PrefillSideGone
    | DecodeSideGone
    | MigrationStarted
    | MigrationLanded
    | MigrationFailedReceived
    | MigrationTargetGone
    | CancelReceived
    | ChoiceCancelReceived
    | GatewayGone
    | DeadlinePassed
    | CancelTimedOut
)

_P = RequestPhase
_END = Legal((_P.UNKNOWN,))
_NO_RECORD = Ignored("no record: it ended, or an earlier controller took it in")
_LOOKED_UP = Illegal("only records get this event")
_KNOWN = Ignored("a repeat of a known id is refused and changes nothing")
_TAKEN_IN = Illegal("its prefill side has taken it in")
_NOWHERE = Ignored("no worker has the request")
_NOT_OWNER = Ignored("the prefill side owns the request until its decode starts")
_NO_DECODE = Ignored("no decode side is placed")
_HANDED_OVER = Ignored("the prefill side has handed the request over")
_STARTED = Ignored("its decode has started already")
_CANCELLED = Ignored("the request is being cancelled")
_STOPPED = Illegal("a cancelled request is not placed again, nor moved")
_NOT_CANCELLED = Illegal("the request is not being cancelled")
_NOT_MOVED = Illegal("the request is not being moved")
_NO_MOVE = Ignored("the request is not being moved")
_NOT_DECODING = Illegal("the request does not decode")
_NOT_WAITING = Illegal("the request waits for no decode side")
_ASKED = Illegal("a worker is asked what is stored of it")
_NOT_ASKED = Illegal("no worker is asked what is stored of it")
_LATE = Ignored("the answer was not waited for any longer")

REQUEST_TABLE: Table = {
    (_P.UNKNOWN, "Submitted"): Legal((_P.QUEUED,)),
    (_P.UNKNOWN, "LookUpStarted"): _LOOKED_UP,
    (_P.UNKNOWN, "LookUpAnswered"): _NO_RECORD,
    (_P.UNKNOWN, "LookUpLost"): _LOOKED_UP,
    (_P.UNKNOWN, "Dispatched"): _LOOKED_UP,
    (_P.UNKNOWN, "Requeued"): _LOOKED_UP,
    (_P.UNKNOWN, "PrefixLost"): _NO_RECORD,
    (_P.UNKNOWN, "DecodeRefusedReceived"): _NO_RECORD,
    (_P.UNKNOWN, "DecodePlaced"): _LOOKED_UP,
    (_P.UNKNOWN, "DecodeStartedReceived"): _NO_RECORD,
    (_P.UNKNOWN, "PrefillSideFinished"): _NO_RECORD,
    (_P.UNKNOWN, "DecodeSideFinished"): _NO_RECORD,
    (_P.UNKNOWN, "PrefillSideFailed"): _NO_RECORD,
    (_P.UNKNOWN, "DecodeSideFailed"): _NO_RECORD,
    (_P.UNKNOWN, "PrefillSideGone"): _LOOKED_UP,
    (_P.UNKNOWN, "DecodeSideGone"): _LOOKED_UP,
    (_P.UNKNOWN, "MigrationStarted"): _LOOKED_UP,
    (_P.UNKNOWN, "MigrationLanded"): _LOOKED_UP,
    (_P.UNKNOWN, "MigrationFailedReceived"): _NO_RECORD,
    (_P.UNKNOWN, "MigrationTargetGone"): _LOOKED_UP,
    (_P.UNKNOWN, "CancelReceived"): _NO_RECORD,
    (_P.UNKNOWN, "ChoiceCancelReceived"): _NO_RECORD,
    (_P.UNKNOWN, "GatewayGone"): _LOOKED_UP,
    (_P.UNKNOWN, "DeadlinePassed"): _LOOKED_UP,
    (_P.UNKNOWN, "CancelTimedOut"): _LOOKED_UP,
    (_P.QUEUED, "Submitted"): _KNOWN,
    (_P.QUEUED, "LookUpStarted"): Legal((_P.LOOKING_UP,)),
    (_P.QUEUED, "LookUpAnswered"): _LATE,
    (_P.QUEUED, "LookUpLost"): _NOT_ASKED,
    (_P.QUEUED, "Dispatched"): Legal((_P.PLACED,)),
    (_P.QUEUED, "Requeued"): Illegal("the request is queued already"),
    (_P.QUEUED, "PrefixLost"): _NOWHERE,
    (_P.QUEUED, "DecodeRefusedReceived"): _NOWHERE,
    (_P.QUEUED, "DecodePlaced"): _NOT_WAITING,
    (_P.QUEUED, "DecodeStartedReceived"): PeerFault("no worker has the request"),
    (_P.QUEUED, "PrefillSideFinished"): _NOWHERE,
    (_P.QUEUED, "DecodeSideFinished"): _NOWHERE,
    (_P.QUEUED, "PrefillSideFailed"): _NOWHERE,
    (_P.QUEUED, "DecodeSideFailed"): _NOWHERE,
    (_P.QUEUED, "PrefillSideGone"): Illegal("no worker has the request"),
    (_P.QUEUED, "DecodeSideGone"): Illegal("no worker has the request"),
    (_P.QUEUED, "MigrationStarted"): _NOT_DECODING,
    (_P.QUEUED, "MigrationLanded"): _NOT_MOVED,
    (_P.QUEUED, "MigrationFailedReceived"): _NOWHERE,
    (_P.QUEUED, "MigrationTargetGone"): _NOT_MOVED,
    (_P.QUEUED, "CancelReceived"): _END,
    (_P.QUEUED, "ChoiceCancelReceived"): Ignored("no token of any choice was drawn"),
    (_P.QUEUED, "GatewayGone"): _END,
    (_P.QUEUED, "DeadlinePassed"): _END,
    (_P.QUEUED, "CancelTimedOut"): _NOT_CANCELLED,
    (_P.LOOKING_UP, "Submitted"): _KNOWN,
    (_P.LOOKING_UP, "LookUpStarted"): _ASKED,
    (_P.LOOKING_UP, "LookUpAnswered"): Legal((_P.QUEUED,)),
    (_P.LOOKING_UP, "LookUpLost"): Legal((_P.QUEUED,)),
    (_P.LOOKING_UP, "Dispatched"): _ASKED,
    (_P.LOOKING_UP, "Requeued"): _ASKED,
    (_P.LOOKING_UP, "PrefixLost"): _NOWHERE,
    (_P.LOOKING_UP, "DecodeRefusedReceived"): _NOWHERE,
    (_P.LOOKING_UP, "DecodePlaced"): _NOT_WAITING,
    (_P.LOOKING_UP, "DecodeStartedReceived"): PeerFault("no worker has the request"),
    (_P.LOOKING_UP, "PrefillSideFinished"): _NOWHERE,
    (_P.LOOKING_UP, "DecodeSideFinished"): _NOWHERE,
    (_P.LOOKING_UP, "PrefillSideFailed"): _NOWHERE,
    (_P.LOOKING_UP, "DecodeSideFailed"): _NOWHERE,
    (_P.LOOKING_UP, "PrefillSideGone"): Illegal("no worker has the request"),
    (_P.LOOKING_UP, "DecodeSideGone"): Illegal("no worker has the request"),
    (_P.LOOKING_UP, "MigrationStarted"): _NOT_DECODING,
    (_P.LOOKING_UP, "MigrationLanded"): _NOT_MOVED,
    (_P.LOOKING_UP, "MigrationFailedReceived"): _NOWHERE,
    (_P.LOOKING_UP, "MigrationTargetGone"): _NOT_MOVED,
    (_P.LOOKING_UP, "CancelReceived"): _END,
    (_P.LOOKING_UP, "ChoiceCancelReceived"): Ignored("no token of any choice was drawn"),
    (_P.LOOKING_UP, "GatewayGone"): _END,
    (_P.LOOKING_UP, "DeadlinePassed"): _END,
    (_P.LOOKING_UP, "CancelTimedOut"): _NOT_CANCELLED,
    (_P.PLACED, "Submitted"): _KNOWN,
    (_P.PLACED, "LookUpStarted"): Illegal("the request is placed already"),
    (_P.PLACED, "LookUpAnswered"): _LATE,
    (_P.PLACED, "LookUpLost"): _NOT_ASKED,
    (_P.PLACED, "Dispatched"): Illegal("the request is placed already"),
    (_P.PLACED, "Requeued"): Legal((_P.QUEUED,)),
    (_P.PLACED, "PrefixLost"): Legal((_P.PLACED,)),
    (_P.PLACED, "DecodeRefusedReceived"): Legal((_P.WAITING,)),
    (_P.PLACED, "DecodePlaced"): _NOT_WAITING,
    (_P.PLACED, "DecodeStartedReceived"): Legal((_P.DECODING,)),
    (_P.PLACED, "PrefillSideFinished"): _END,
    (_P.PLACED, "DecodeSideFinished"): _NOT_OWNER,
    (_P.PLACED, "PrefillSideFailed"): _END,
    (_P.PLACED, "DecodeSideFailed"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "PrefillSideGone"): _END,
    (_P.PLACED, "DecodeSideGone"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "MigrationStarted"): _NOT_DECODING,
    (_P.PLACED, "MigrationLanded"): _NOT_MOVED,
    (_P.PLACED, "MigrationFailedReceived"): _NO_MOVE,
    (_P.PLACED, "MigrationTargetGone"): _NOT_MOVED,
    (_P.PLACED, "CancelReceived"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "ChoiceCancelReceived"): Legal((_P.PLACED,)),
    (_P.PLACED, "GatewayGone"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "DeadlinePassed"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "CancelTimedOut"): _NOT_CANCELLED,
    (_P.WAITING, "Submitted"): _KNOWN,
    (_P.WAITING, "LookUpStarted"): _TAKEN_IN,
    (_P.WAITING, "LookUpAnswered"): _LATE,
    (_P.WAITING, "LookUpLost"): _NOT_ASKED,
    (_P.WAITING, "Dispatched"): _TAKEN_IN,
    (_P.WAITING, "Requeued"): _TAKEN_IN,
    (_P.WAITING, "PrefixLost"): Legal((_P.WAITING,)),
    (_P.WAITING, "DecodeRefusedReceived"): _NO_DECODE,
    (_P.WAITING, "DecodePlaced"): Legal((_P.PLACED,)),
    (_P.WAITING, "DecodeStartedReceived"): PeerFault("no decode side is placed"),
    (_P.WAITING, "PrefillSideFinished"): _END,
    (_P.WAITING, "DecodeSideFinished"): _NO_DECODE,
    (_P.WAITING, "PrefillSideFailed"): _END,
    (_P.WAITING, "DecodeSideFailed"): _NO_DECODE,
    (_P.WAITING, "PrefillSideGone"): _END,
    (_P.WAITING, "DecodeSideGone"): Illegal("no decode side is placed"),
    (_P.WAITING, "MigrationStarted"): _NOT_DECODING,
    (_P.WAITING, "MigrationLanded"): _NOT_MOVED,
    (_P.WAITING, "MigrationFailedReceived"): _NO_MOVE,
    (_P.WAITING, "MigrationTargetGone"): _NOT_MOVED,
    (_P.WAITING, "CancelReceived"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.WAITING, "ChoiceCancelReceived"): Legal((_P.WAITING,)),
    (_P.WAITING, "GatewayGone"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.WAITING, "DeadlinePassed"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.WAITING, "CancelTimedOut"): _NOT_CANCELLED,
    (_P.DECODING, "Submitted"): _KNOWN,
    (_P.DECODING, "LookUpStarted"): _TAKEN_IN,
    (_P.DECODING, "LookUpAnswered"): _LATE,
    (_P.DECODING, "LookUpLost"): _NOT_ASKED,
    (_P.DECODING, "Dispatched"): _TAKEN_IN,
    (_P.DECODING, "Requeued"): _TAKEN_IN,
    (_P.DECODING, "PrefixLost"): _HANDED_OVER,
    (_P.DECODING, "DecodeRefusedReceived"): PeerFault("its decode has started"),
    (_P.DECODING, "DecodePlaced"): _NOT_WAITING,
    (_P.DECODING, "DecodeStartedReceived"): _STARTED,
    (_P.DECODING, "PrefillSideFinished"): _HANDED_OVER,
    (_P.DECODING, "DecodeSideFinished"): _END,
    (_P.DECODING, "PrefillSideFailed"): _HANDED_OVER,
    (_P.DECODING, "DecodeSideFailed"): _END,
    (_P.DECODING, "PrefillSideGone"): _HANDED_OVER,
    (_P.DECODING, "DecodeSideGone"): _END,
    (_P.DECODING, "MigrationStarted"): Legal((_P.MIGRATING,)),
    (_P.DECODING, "MigrationLanded"): _NOT_MOVED,
    (_P.DECODING, "MigrationFailedReceived"): _NO_MOVE,
    (_P.DECODING, "MigrationTargetGone"): _NOT_MOVED,
    (_P.DECODING, "CancelReceived"): Legal((_P.CANCELLING_DECODE,)),
    (_P.DECODING, "ChoiceCancelReceived"): Legal((_P.DECODING,)),
    (_P.DECODING, "GatewayGone"): Legal((_P.CANCELLING_DECODE,)),
    (_P.DECODING, "DeadlinePassed"): Legal((_P.CANCELLING_DECODE,)),
    (_P.DECODING, "CancelTimedOut"): _NOT_CANCELLED,
    (_P.MIGRATING, "Submitted"): _KNOWN,
    (_P.MIGRATING, "LookUpStarted"): _TAKEN_IN,
    (_P.MIGRATING, "LookUpAnswered"): _LATE,
    (_P.MIGRATING, "LookUpLost"): _NOT_ASKED,
    (_P.MIGRATING, "Dispatched"): _TAKEN_IN,
    (_P.MIGRATING, "Requeued"): _TAKEN_IN,
    (_P.MIGRATING, "PrefixLost"): _HANDED_OVER,
    (_P.MIGRATING, "DecodeRefusedReceived"): PeerFault("its decode has started"),
    (_P.MIGRATING, "DecodePlaced"): _NOT_WAITING,
    (_P.MIGRATING, "DecodeStartedReceived"): _STARTED,
    (_P.MIGRATING, "PrefillSideFinished"): _HANDED_OVER,
    (_P.MIGRATING, "DecodeSideFinished"): _END,
    (_P.MIGRATING, "PrefillSideFailed"): _HANDED_OVER,
    (_P.MIGRATING, "DecodeSideFailed"): _END,
    (_P.MIGRATING, "PrefillSideGone"): _HANDED_OVER,
    (_P.MIGRATING, "DecodeSideGone"): _END,
    (_P.MIGRATING, "MigrationStarted"): Illegal("the request is being moved already"),
    (_P.MIGRATING, "MigrationLanded"): Legal((_P.DECODING,)),
    (_P.MIGRATING, "MigrationFailedReceived"): Legal((_P.DECODING,)),
    (_P.MIGRATING, "MigrationTargetGone"): Legal((_P.MIGRATING,)),
    (_P.MIGRATING, "CancelReceived"): Legal((_P.CANCELLING_DECODE,)),
    (_P.MIGRATING, "ChoiceCancelReceived"): Legal((_P.MIGRATING,)),
    (_P.MIGRATING, "GatewayGone"): Legal((_P.CANCELLING_DECODE,)),
    (_P.MIGRATING, "DeadlinePassed"): Legal((_P.CANCELLING_DECODE,)),
    (_P.MIGRATING, "CancelTimedOut"): _NOT_CANCELLED,
    (_P.CANCELLING_PREFILL, "Submitted"): _KNOWN,
    (_P.CANCELLING_PREFILL, "LookUpStarted"): _STOPPED,
    (_P.CANCELLING_PREFILL, "LookUpAnswered"): _LATE,
    (_P.CANCELLING_PREFILL, "LookUpLost"): _NOT_ASKED,
    (_P.CANCELLING_PREFILL, "Dispatched"): _STOPPED,
    (_P.CANCELLING_PREFILL, "Requeued"): _STOPPED,
    (_P.CANCELLING_PREFILL, "PrefixLost"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "DecodeRefusedReceived"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "DecodePlaced"): _NOT_WAITING,
    (_P.CANCELLING_PREFILL, "DecodeStartedReceived"): Legal((_P.CANCELLING_DECODE,)),
    (_P.CANCELLING_PREFILL, "PrefillSideFinished"): _END,
    (_P.CANCELLING_PREFILL, "DecodeSideFinished"): _NOT_OWNER,
    (_P.CANCELLING_PREFILL, "PrefillSideFailed"): _END,
    (_P.CANCELLING_PREFILL, "DecodeSideFailed"): _NOT_OWNER,
    (_P.CANCELLING_PREFILL, "PrefillSideGone"): _END,
    (_P.CANCELLING_PREFILL, "DecodeSideGone"): _NOT_OWNER,
    (_P.CANCELLING_PREFILL, "MigrationStarted"): _STOPPED,
    (_P.CANCELLING_PREFILL, "MigrationLanded"): _NOT_MOVED,
    (_P.CANCELLING_PREFILL, "MigrationFailedReceived"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "MigrationTargetGone"): _NOT_MOVED,
    (_P.CANCELLING_PREFILL, "CancelReceived"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "ChoiceCancelReceived"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "GatewayGone"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "DeadlinePassed"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "CancelTimedOut"): _END,
    (_P.CANCELLING_DECODE, "Submitted"): _KNOWN,
    (_P.CANCELLING_DECODE, "LookUpStarted"): _TAKEN_IN,
    (_P.CANCELLING_DECODE, "LookUpAnswered"): _LATE,
    (_P.CANCELLING_DECODE, "LookUpLost"): _NOT_ASKED,
    (_P.CANCELLING_DECODE, "Dispatched"): _TAKEN_IN,
    (_P.CANCELLING_DECODE, "Requeued"): _TAKEN_IN,
    (_P.CANCELLING_DECODE, "PrefixLost"): _CANCELLED,
    (_P.CANCELLING_DECODE, "DecodeRefusedReceived"): PeerFault("its decode has started"),
    (_P.CANCELLING_DECODE, "DecodePlaced"): _NOT_WAITING,
    (_P.CANCELLING_DECODE, "DecodeStartedReceived"): _STARTED,
    (_P.CANCELLING_DECODE, "PrefillSideFinished"): _HANDED_OVER,
    (_P.CANCELLING_DECODE, "DecodeSideFinished"): _END,
    (_P.CANCELLING_DECODE, "PrefillSideFailed"): _HANDED_OVER,
    (_P.CANCELLING_DECODE, "DecodeSideFailed"): _END,
    (_P.CANCELLING_DECODE, "PrefillSideGone"): _HANDED_OVER,
    (_P.CANCELLING_DECODE, "DecodeSideGone"): _END,
    (_P.CANCELLING_DECODE, "MigrationStarted"): _STOPPED,
    (_P.CANCELLING_DECODE, "MigrationLanded"): Legal((_P.CANCELLING_DECODE,)),
    (_P.CANCELLING_DECODE, "MigrationFailedReceived"): _CANCELLED,
    (_P.CANCELLING_DECODE, "MigrationTargetGone"): _CANCELLED,
    (_P.CANCELLING_DECODE, "CancelReceived"): _CANCELLED,
    (_P.CANCELLING_DECODE, "ChoiceCancelReceived"): _CANCELLED,
    (_P.CANCELLING_DECODE, "GatewayGone"): _CANCELLED,
    (_P.CANCELLING_DECODE, "DeadlinePassed"): _CANCELLED,
    (_P.CANCELLING_DECODE, "CancelTimedOut"): _END,
}

UNPLACED = (RequestPhase.QUEUED, RequestPhase.LOOKING_UP)
WITH_PREFILL = (RequestPhase.PLACED, RequestPhase.WAITING)
NOT_STARTED = (*UNPLACED, *WITH_PREFILL)
DECODED = (RequestPhase.DECODING, RequestPhase.MIGRATING, RequestPhase.CANCELLING_DECODE)
CANCELLING = (RequestPhase.CANCELLING_PREFILL, RequestPhase.CANCELLING_DECODE)
