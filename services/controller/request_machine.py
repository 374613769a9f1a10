"""The controller's record of one request.

Theory of operation. The record follows who owns the request: its prefill side until the decode
side reports ``DecodeStarted``, its decode side from then on. The owner's report ends the record.
A prefill side that did not take the request in, because it was not reached or has just begun to
drain, is replaced. While the prefill side owns it, a refused decode puts it in WAITING until a
decode side is placed again; the prefill goes on meanwhile. A cancel, a passed deadline, a dead
gateway or a failed other side tells every side to stop, and the record waits in CANCELLING for the
owner's report: a decode that had started when the cancel was sent passes the ownership on there
too. UNKNOWN is the phase of every request without a record: never seen, ended, or taken in by an
earlier controller.
"""

from dataclasses import dataclass
from enum import StrEnum

from common.errors import ErrorCode
from common.handoff.machine import Ignored, Illegal, Legal, PeerFault, Table
from services.controller.effects import PeerKey


class RequestPhase(StrEnum):
    """Where a request stands, as the controller knows it."""

    UNKNOWN = "unknown"
    PLACED = "placed"
    WAITING = "waiting"
    DECODING = "decoding"
    CANCELLING_PREFILL = "cancelling_prefill"
    CANCELLING_DECODE = "cancelling_decode"


@dataclass(frozen=True, slots=True)
class Submitted:
    """A gateway submitted the id."""


@dataclass(frozen=True, slots=True)
class PrefillReplaced:
    """The prefill side has not taken the request in; other sides were chosen."""

    prefill: PeerKey
    decode: PeerKey


@dataclass(frozen=True, slots=True)
class PlacementFailed:
    """``PlaceRequest`` could not be sent, and nobody else can take the request."""

    code: ErrorCode
    message: str


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
    """The request took too long, as a whole or in waiting for room."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class CancelTimedOut:
    """The owner has not reported the end of a cancelled request in time."""


RequestEvent = (
    Submitted
    | PrefillReplaced
    | PlacementFailed
    | DecodeRefusedReceived
    | DecodePlaced
    | DecodeStartedReceived
    | PrefillSideFinished
    | DecodeSideFinished
    | PrefillSideFailed
    | DecodeSideFailed
    | PrefillSideGone
    | DecodeSideGone
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
_WAS_SENT = Illegal("its prefill side has taken it in")
_NOT_OWNER = Ignored("the prefill side owns the request until its decode starts")
_NO_DECODE = Ignored("no decode side is placed")
_HANDED_OVER = Ignored("the prefill side has handed the request over")
_STARTED = Ignored("its decode has started already")
_CANCELLED = Ignored("the request is being cancelled")
_NOT_CANCELLED = Illegal("the request is not being cancelled")
_NOT_WAITING = Illegal("the request waits for no decode side")

REQUEST_TABLE: Table = {
    (_P.UNKNOWN, "Submitted"): Legal((_P.PLACED,)),
    (_P.UNKNOWN, "PrefillReplaced"): _LOOKED_UP,
    (_P.UNKNOWN, "PlacementFailed"): _LOOKED_UP,
    (_P.UNKNOWN, "DecodeRefusedReceived"): _NO_RECORD,
    (_P.UNKNOWN, "DecodePlaced"): _LOOKED_UP,
    (_P.UNKNOWN, "DecodeStartedReceived"): _NO_RECORD,
    (_P.UNKNOWN, "PrefillSideFinished"): _NO_RECORD,
    (_P.UNKNOWN, "DecodeSideFinished"): _NO_RECORD,
    (_P.UNKNOWN, "PrefillSideFailed"): _NO_RECORD,
    (_P.UNKNOWN, "DecodeSideFailed"): _NO_RECORD,
    (_P.UNKNOWN, "PrefillSideGone"): _LOOKED_UP,
    (_P.UNKNOWN, "DecodeSideGone"): _LOOKED_UP,
    (_P.UNKNOWN, "CancelReceived"): _NO_RECORD,
    (_P.UNKNOWN, "ChoiceCancelReceived"): _NO_RECORD,
    (_P.UNKNOWN, "GatewayGone"): _LOOKED_UP,
    (_P.UNKNOWN, "DeadlinePassed"): _LOOKED_UP,
    (_P.UNKNOWN, "CancelTimedOut"): _LOOKED_UP,
    (_P.PLACED, "Submitted"): _KNOWN,
    (_P.PLACED, "PrefillReplaced"): Legal((_P.PLACED,)),
    (_P.PLACED, "PlacementFailed"): _END,
    (_P.PLACED, "DecodeRefusedReceived"): Legal((_P.WAITING,)),
    (_P.PLACED, "DecodePlaced"): _NOT_WAITING,
    (_P.PLACED, "DecodeStartedReceived"): Legal((_P.DECODING,)),
    (_P.PLACED, "PrefillSideFinished"): _END,
    (_P.PLACED, "DecodeSideFinished"): _NOT_OWNER,
    (_P.PLACED, "PrefillSideFailed"): _END,
    (_P.PLACED, "DecodeSideFailed"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "PrefillSideGone"): _END,
    (_P.PLACED, "DecodeSideGone"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "CancelReceived"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "ChoiceCancelReceived"): Legal((_P.PLACED,)),
    (_P.PLACED, "GatewayGone"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "DeadlinePassed"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.PLACED, "CancelTimedOut"): _NOT_CANCELLED,
    (_P.WAITING, "Submitted"): _KNOWN,
    (_P.WAITING, "PrefillReplaced"): _WAS_SENT,
    (_P.WAITING, "PlacementFailed"): _WAS_SENT,
    (_P.WAITING, "DecodeRefusedReceived"): _NO_DECODE,
    (_P.WAITING, "DecodePlaced"): Legal((_P.PLACED,)),
    (_P.WAITING, "DecodeStartedReceived"): PeerFault("no decode side is placed"),
    (_P.WAITING, "PrefillSideFinished"): _END,
    (_P.WAITING, "DecodeSideFinished"): _NO_DECODE,
    (_P.WAITING, "PrefillSideFailed"): _END,
    (_P.WAITING, "DecodeSideFailed"): _NO_DECODE,
    (_P.WAITING, "PrefillSideGone"): _END,
    (_P.WAITING, "DecodeSideGone"): Illegal("no decode side is placed"),
    (_P.WAITING, "CancelReceived"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.WAITING, "ChoiceCancelReceived"): Legal((_P.WAITING,)),
    (_P.WAITING, "GatewayGone"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.WAITING, "DeadlinePassed"): Legal((_P.CANCELLING_PREFILL,)),
    (_P.WAITING, "CancelTimedOut"): _NOT_CANCELLED,
    (_P.DECODING, "Submitted"): _KNOWN,
    (_P.DECODING, "PrefillReplaced"): _WAS_SENT,
    (_P.DECODING, "PlacementFailed"): _WAS_SENT,
    (_P.DECODING, "DecodeRefusedReceived"): PeerFault("its decode has started"),
    (_P.DECODING, "DecodePlaced"): _NOT_WAITING,
    (_P.DECODING, "DecodeStartedReceived"): _STARTED,
    (_P.DECODING, "PrefillSideFinished"): _HANDED_OVER,
    (_P.DECODING, "DecodeSideFinished"): _END,
    (_P.DECODING, "PrefillSideFailed"): _HANDED_OVER,
    (_P.DECODING, "DecodeSideFailed"): _END,
    (_P.DECODING, "PrefillSideGone"): _HANDED_OVER,
    (_P.DECODING, "DecodeSideGone"): _END,
    (_P.DECODING, "CancelReceived"): Legal((_P.CANCELLING_DECODE,)),
    (_P.DECODING, "ChoiceCancelReceived"): Legal((_P.DECODING,)),
    (_P.DECODING, "GatewayGone"): Legal((_P.CANCELLING_DECODE,)),
    (_P.DECODING, "DeadlinePassed"): Legal((_P.CANCELLING_DECODE,)),
    (_P.DECODING, "CancelTimedOut"): _NOT_CANCELLED,
    (_P.CANCELLING_PREFILL, "Submitted"): _KNOWN,
    (_P.CANCELLING_PREFILL, "PrefillReplaced"): Illegal("a cancelled request is not placed again"),
    (_P.CANCELLING_PREFILL, "PlacementFailed"): _END,
    (_P.CANCELLING_PREFILL, "DecodeRefusedReceived"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "DecodePlaced"): _NOT_WAITING,
    (_P.CANCELLING_PREFILL, "DecodeStartedReceived"): Legal((_P.CANCELLING_DECODE,)),
    (_P.CANCELLING_PREFILL, "PrefillSideFinished"): _END,
    (_P.CANCELLING_PREFILL, "DecodeSideFinished"): _NOT_OWNER,
    (_P.CANCELLING_PREFILL, "PrefillSideFailed"): _END,
    (_P.CANCELLING_PREFILL, "DecodeSideFailed"): _NOT_OWNER,
    (_P.CANCELLING_PREFILL, "PrefillSideGone"): _END,
    (_P.CANCELLING_PREFILL, "DecodeSideGone"): _NOT_OWNER,
    (_P.CANCELLING_PREFILL, "CancelReceived"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "ChoiceCancelReceived"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "GatewayGone"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "DeadlinePassed"): _CANCELLED,
    (_P.CANCELLING_PREFILL, "CancelTimedOut"): _END,
    (_P.CANCELLING_DECODE, "Submitted"): _KNOWN,
    (_P.CANCELLING_DECODE, "PrefillReplaced"): _WAS_SENT,
    (_P.CANCELLING_DECODE, "PlacementFailed"): _WAS_SENT,
    (_P.CANCELLING_DECODE, "DecodeRefusedReceived"): PeerFault("its decode has started"),
    (_P.CANCELLING_DECODE, "DecodePlaced"): _NOT_WAITING,
    (_P.CANCELLING_DECODE, "DecodeStartedReceived"): _STARTED,
    (_P.CANCELLING_DECODE, "PrefillSideFinished"): _HANDED_OVER,
    (_P.CANCELLING_DECODE, "DecodeSideFinished"): _END,
    (_P.CANCELLING_DECODE, "PrefillSideFailed"): _HANDED_OVER,
    (_P.CANCELLING_DECODE, "DecodeSideFailed"): _END,
    (_P.CANCELLING_DECODE, "PrefillSideGone"): _HANDED_OVER,
    (_P.CANCELLING_DECODE, "DecodeSideGone"): _END,
    (_P.CANCELLING_DECODE, "CancelReceived"): _CANCELLED,
    (_P.CANCELLING_DECODE, "ChoiceCancelReceived"): _CANCELLED,
    (_P.CANCELLING_DECODE, "GatewayGone"): _CANCELLED,
    (_P.CANCELLING_DECODE, "DeadlinePassed"): _CANCELLED,
    (_P.CANCELLING_DECODE, "CancelTimedOut"): _END,
}

QUEUED = (RequestPhase.PLACED, RequestPhase.WAITING)
CANCELLING = (RequestPhase.CANCELLING_PREFILL, RequestPhase.CANCELLING_DECODE)
