"""What the local scheduler wants done. Its worker executes each list in order, at once."""

from dataclasses import dataclass

from common.errors import ErrorCode
from common.ids import GatewayId, RequestId
from common.messages.handoff import AbortReason, FirstToken
from common.messages.tokens import TokenDelta


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Send this delta to its gateway."""

    gateway_id: GatewayId
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The request holds blocks and computes; a remote one may reserve its decode side now."""

    request_id: RequestId
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RoomForPrefix:
    """There is room for a prompt whose stored prefix found none: load it now, and say when."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class PromptProgressed:
    """The first ``num_blocks`` blocks of the prompt are whole."""

    request_id: RequestId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The whole prompt is computed and these choices go on at the decode side."""

    request_id: RequestId
    first_tokens: tuple[FirstToken, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeBegan:
    """The request's choices decode here from now on."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy blocks inside the pool now: (source, target) pairs."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy blocks of the pool to host slots now: (pool block, host slot) pairs."""

    request_id: RequestId
    choice: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy host slots back into blocks of the pool now: (pool block, host slot) pairs."""

    request_id: RequestId
    choice: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DecodeFrozen:
    """No step reads or writes the frozen request any more: it may be migrated."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class StopHandoff:
    """The request no longer needs its decode side."""

    request_id: RequestId
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence gave its blocks up for older ones.

    Without a ``SwapOut`` just before, its ``num_tokens`` tokens will be computed again.
    """

    request_id: RequestId
    choice: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Every choice ended and every block is let go."""

    request_id: RequestId
    was_cancelled: bool


@dataclass(frozen=True, slots=True)
class RequestBroke:
    """The request cannot go on here; its blocks are let go as soon as nothing reads them."""

    request_id: RequestId
    gateway_id: GatewayId
    code: ErrorCode
    message: str


Effect = (
    EmitTokens
    | PrefillStarted
    | RoomForPrefix
    | PromptProgressed
    | PromptComputed
    | DecodeBegan
    | CopyBlocks
    | SwapOut
    | SwapIn
    | DecodeFrozen
    | StopHandoff
    | Preempted
    | RequestEnded
    | RequestBroke
)
