"""Events and effects of the handoff machines. Each outcome of an effect is its own event."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ErrorCode
from common.messages.fields import Phases
from common.messages.handoff import AbortReason, FirstToken

# ---- events of both sides ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Our own worker ends the handoff: cancelled, not needed, or shutting down."""

    reason: AbortReason


@dataclass(frozen=True, slots=True)
class AbortReceived:
    """The peer sent ``Abort``."""

    reason: AbortReason


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer's incarnation is dead or gone; it writes nothing any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """The peer has not renewed in time."""


# ---- events of the prefill side ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReservedReceived:
    """The decode side holds these blocks; the first ``num_cached_blocks`` need no bytes."""

    block_ids: tuple[int, ...]
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class ReserveRefusedReceived:
    """The decode side holds nothing."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class BlocksComputed:
    """The first ``num_blocks`` blocks of the prompt are whole in our pool."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The last block is in our pool too, and the first tokens are drawn."""

    first_tokens: tuple[FirstToken, ...]
    num_cached_tokens: int
    at: float


@dataclass(frozen=True, slots=True)
class WriteFinished:
    """The write in flight is done; one checksum per block written."""

    checksums: Sequence[int]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The write in flight failed, and nothing of it goes on."""

    message: str


@dataclass(frozen=True, slots=True)
class AcceptedReceived:
    """The decode side verified the commit and owns the request."""


@dataclass(frozen=True, slots=True)
class CommitRefusedReceived:
    """The decode side found a wrong block."""

    block_index: int


# ---- events of the decode side -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReserveRepeated:
    """``Reserve`` came again for a transfer that is held."""


@dataclass(frozen=True, slots=True)
class CommitReceived:
    """Every block is written, the peer says; one checksum per block after the cached ones.

    ``prefill_done_at`` is on the clock of this side.
    """

    first_tokens: tuple[FirstToken, ...]
    num_cached_tokens: int
    prefill_done_at: float
    checksums: tuple[int, ...]
    is_migration: bool = False
    phases: Phases = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """Every checksum is right."""


@dataclass(frozen=True, slots=True)
class VerifyFailed:
    """The block at this place of the prompt is not what the peer wrote."""

    block_index: int


@dataclass(frozen=True, slots=True)
class ReleaseReceived:
    """The peer has our ``Accepted``."""


@dataclass(frozen=True, slots=True)
class AbortedReceived:
    """The peer answers our ``Abort``: it writes nothing any more."""


# ---- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Write these blocks of the prompt (places, not ids); comes back as an event."""

    first: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Send ``Commit``."""

    finished: PrefillFinished
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Send ``Release``."""


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Send ``Abort``."""

    reason: AbortReason


@dataclass(frozen=True, slots=True)
class SendAborted:
    """Send ``Aborted``."""


@dataclass(frozen=True, slots=True)
class SendReserved:
    """Send ``Reserved`` again."""


@dataclass(frozen=True, slots=True)
class StartVerify:
    """Compare the written blocks with these checksums; comes back as an event."""

    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendAccepted:
    """Send ``Accepted``."""


@dataclass(frozen=True, slots=True)
class SendCommitRefused:
    """Send ``CommitRefused``."""

    block_index: int


@dataclass(frozen=True, slots=True)
class StartDecode:
    """The request's blocks pass from the transfer to the request, which may decode."""

    commit: CommitReceived


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Nothing writes into or reads from the transfer's blocks: let them go."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The decode side owns the request."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode side has no room or will not; another may."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """One side ended it on purpose."""

    reason: AbortReason
    by_peer: bool


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The peer died or left, or its lease ran out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The bytes could not be moved right."""

    message: str


Outcome = HandedOver | Refused | Aborted | PeerGone | Failed
"""How a handoff ended, for its worker."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The machine is done; its worker draws the consequence."""

    outcome: Outcome


CommonEvent = CancelRequested | AbortReceived | PeerLost | LeaseExpired
SenderEvent = (
    CommonEvent
    | ReservedReceived
    | ReserveRefusedReceived
    | BlocksComputed
    | PrefillFinished
    | WriteFinished
    | WriteFailed
    | AcceptedReceived
    | CommitRefusedReceived
)
SenderEffect = StartWrite | SendCommit | SendRelease | SendAbort | SendAborted | Ended
ReceiverEvent = (
    CommonEvent
    | ReserveRepeated
    | CommitReceived
    | Verified
    | VerifyFailed
    | ReleaseReceived
    | AbortedReceived
)
ReceiverEffect = (
    SendReserved
    | StartVerify
    | SendAccepted
    | SendCommitRefused
    | SendAbort
    | StartDecode
    | FreeBlocks
    | Ended
)
