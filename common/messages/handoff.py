"""The handoff conversation: prefill side (DEALER) with decode side (ROUTER).

``reserve → write → commit → accept → release``, under a lease that both peers renew. Peers name
blocks of a paired pool, never addresses.
"""

from dataclasses import field
from enum import StrEnum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from common.errors import ErrorCode
from common.ids import GatewayId, RequestId, TransferId
from common.messages.fields import (
    STRUCT,
    ChoiceIndex,
    Count,
    Endpoint,
    EpochNumber,
    ExportedPool,
    Fingerprint,
    Flag,
    Name,
    PeerInfo,
    Phases,
    PromptLength,
    Seconds,
    Text,
)
from common.sampling import SampledToken, SamplingParams


class AbortReason(StrEnum):
    """Why a handoff ended without a decode."""

    CANCELLED = "cancelled"
    NOT_NEEDED = "not_needed"
    LEASE_EXPIRED = "lease_expired"
    WRITE_FAILED = "write_failed"
    CORRUPT = "corrupt"
    SHUTTING_DOWN = "shutting_down"
    UNKNOWN_TRANSFER = "unknown_transfer"


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PairRequest:
    """Prefill side → decode side, once per pair of epochs, before any reservation.

    Answered by ``PairAccepted`` or ``PairRefused``. A repeat is safe.
    """

    peer: PeerInfo
    model_fingerprint: Fingerprint


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PairAccepted:
    """Decode side → prefill side: layouts agree; here is the pool to write into."""

    epoch: EpochNumber
    transport: Name
    pool: ExportedPool
    lease_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class PairRefused:
    """Decode side → prefill side: this pair cannot work; both values of the field at fault."""

    field: Name
    expected: Text
    actual: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Reserve:
    """Prefill side → decode side: hold blocks for this prompt. One raw frame: prompt ids, int32.

    Answered by ``Reserved`` or ``ReserveRefused``. A repeat of a held transfer is answered again.
    """

    transfer_id: TransferId
    request_id: RequestId
    gateway_id: GatewayId
    tokens_endpoint: Endpoint
    params: SamplingParams
    num_prompt_tokens: PromptLength
    is_prefix: Flag = False
    """Whether only the prompt's blocks are wanted, for the receiver's own use: nothing decodes."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Reserved:
    """Decode side → prefill side: write into these blocks while the lease is renewed.

    One raw frame: the block ids of the whole prompt in order, int32 little-endian. The first
    ``num_cached_blocks`` hold this prefix already and must not be written. ``token`` opens the
    others where the transport needs one, and travels on this channel alone.
    """

    transfer_id: TransferId
    num_cached_blocks: Count
    token: Annotated[bytes, Field(strict=True, min_length=0, max_length=64)] = field(
        default=b"", repr=False
    )


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class ReserveRefused:
    """Decode side → prefill side: nothing is held; the controller may place the decode again."""

    transfer_id: TransferId
    code: ErrorCode
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class FirstToken:
    """The token of one choice that the prefill side drew; it is never computed again."""

    choice: ChoiceIndex
    token: SampledToken


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Commit:
    """Prefill side → decode side: every block is written.

    One raw frame: one checksum per written block in prompt order (those after
    ``num_cached_blocks``), uint64 little-endian. The decode side verifies them and answers
    ``Accepted`` or ``CommitRefused``. A repeat of an accepted transfer is answered again.
    """

    transfer_id: TransferId
    num_tokens: PromptLength
    num_cached_tokens: Count
    first_tokens: Annotated[tuple[FirstToken, ...], Field(max_length=128)]
    """Empty for a prefix alone."""
    prefill_done_at: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
    """When the prefill's last step ended, in seconds of the host's monotonic clock."""
    seconds_since_prefill: Seconds = 0.0
    """How long before this was sent that was; clocks of other hosts say nothing here."""
    is_migration: Flag = False
    """Whether a running decode was frozen then, and the first token is its last one so far."""
    phases: Phases = ()
    """What ended on the prefill side and was not told to the gateway: the decode side does that."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Accepted:
    """Decode side → prefill side: the KV is right and the decode is ours."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class CommitRefused:
    """Decode side → prefill side: a block's checksum is wrong; write everything again, once."""

    transfer_id: TransferId
    block_index: Count
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Release:
    """Prefill side → decode side: ``Accepted`` arrived; the transfer's record can go."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Abort:
    """Either side: end this handoff.

    From the prefill side it also says that no write is in flight any more, so the decode side
    frees at once. From the decode side it asks the prefill side to stop; the blocks drain until
    ``Aborted`` arrives or the peer is known dead. Idempotent.
    """

    transfer_id: TransferId
    reason: AbortReason


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class Aborted:
    """Prefill side → decode side, answer to ``Abort``: no write is in flight any more."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class RenewLeases:
    """Prefill side → decode side, several times per lease: these transfers are alive here."""

    transfer_ids: Annotated[tuple[TransferId, ...], Field(max_length=65536)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class LeasesRenewed:
    """Decode side → prefill side, answer to ``RenewLeases``: those of them that are alive here.

    The prefill side ends every asked transfer that is missing.
    """

    transfer_ids: Annotated[tuple[TransferId, ...], Field(max_length=65536)]
    unknown_ids: Annotated[tuple[TransferId, ...], Field(max_length=65536)]


PrefillToDecode = PairRequest | Reserve | Commit | Release | Abort | Aborted | RenewLeases
DecodeToPrefill = (
    PairAccepted
    | PairRefused
    | Reserved
    | ReserveRefused
    | Accepted
    | CommitRefused
    | Abort
    | LeasesRenewed
)
