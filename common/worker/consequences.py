"""What a handoff that ended without a decode means for its request. Pure."""

from dataclasses import dataclass

from common.errors import ErrorCode, LocalProtocolError
from common.handoff.events import Aborted, Failed, HandedOver, Outcome, PeerGone, Refused
from common.ids import WorkerId
from common.messages.handoff import AbortReason


@dataclass(frozen=True, slots=True)
class PlaceElsewhere:
    """The prompt is kept; the controller may name another decode side."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class EndCancelled:
    """The request was cancelled."""


@dataclass(frozen=True, slots=True)
class EndFailed:
    """The request cannot go on."""

    code: ErrorCode
    message: str


Consequence = PlaceElsewhere | EndCancelled | EndFailed


def consequence_of(outcome: Outcome, decode_worker: WorkerId) -> Consequence:
    """Return what follows; LocalProtocolError for a handoff that was accepted."""
    match outcome:
        case HandedOver():
            raise LocalProtocolError("a handoff that was accepted did not fail")
        case Refused(code, message):
            return PlaceElsewhere(code, message)
        case Aborted(AbortReason.CANCELLED, by_peer=True):
            return EndCancelled()
        case Aborted(AbortReason.CORRUPT, by_peer=True):
            message = f"KV blocks arrived damaged at {decode_worker}"
            return EndFailed(ErrorCode.TRANSFER_FAILED, message)
        case Aborted(reason, _):
            # The decode side let go for reasons of its own; the prompt is computed and kept.
            message = f"the decode side ended the handoff: {reason}"
            return PlaceElsewhere(ErrorCode.TRANSFER_FAILED, message)
        case PeerGone(reason):
            return EndFailed(ErrorCode.WORKER_DIED, reason)
        case Failed(message):
            return EndFailed(ErrorCode.TRANSFER_FAILED, message)
