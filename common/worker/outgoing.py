"""What a worker hands to another one, and how that ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.handoff.events import Outcome
from common.handoff.sender import HandoffSender
from common.ids import GatewayId, RequestId, TransferId, WorkerId
from common.messages.fields import PhaseName, PhaseRecord, Phases
from common.sampling import SamplingParams
from common.worker.decode_peer import DecodePeer


class HandoffKind(StrEnum):
    """Why blocks go to another worker."""

    PROMPT = "prompt"
    """It decodes what was prefilled here."""
    DECODE = "decode"
    """It goes on with what was decoded here."""
    PREFIX = "prefix"
    """It computes, and needs a prefix that is cached here."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Tokens with the blocks of their K and V under ``owner`` here, and what is told of them.

    ``phases`` ended here and were told to nobody. ``live_choices`` are asked for at the commit:
    some may have been cancelled by then.
    """

    kind: HandoffKind
    request_id: RequestId
    gateway_id: GatewayId
    tokens_endpoint: str
    params: SamplingParams
    prompt: Sequence[int]
    owner: str
    block_ids: tuple[int, ...]
    live_choices: Callable[[], frozenset[int]]
    phases: Phases = ()


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """What one handoff moved: bytes, contiguous copies, and the time in writes."""

    num_bytes: int
    num_calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HandoffEnd:
    """A handoff to ``worker_id`` that is over; nothing reads its blocks any more."""

    outgoing: Outgoing
    worker_id: WorkerId
    outcome: Outcome
    totals: TransferTotals


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One handoff that is under way, and what it moved so far."""

    transfer_id: TransferId
    outgoing: Outgoing
    peer: DecodePeer
    machine: HandoffSender
    token: bytes = field(default=b"", repr=False)
    num_bytes: int = 0
    num_calls: int = 0
    write_seconds: float = 0.0

    @property
    def request_id(self) -> RequestId:
        """The request that it is for."""
        return self.outgoing.request_id

    @property
    def totals(self) -> TransferTotals:
        """What it moved."""
        return TransferTotals(self.num_bytes, self.num_calls, self.write_seconds)

    def phases(self, worker_id: WorkerId) -> Phases:
        """Return what the receiver is to tell the gateway for this worker."""
        if not self.num_bytes:
            return self.outgoing.phases
        transfer = PhaseRecord(
            name=PhaseName.TRANSFER,
            worker=worker_id,
            seconds=self.write_seconds,
            num_tokens=len(self.outgoing.prompt),
            num_bytes=self.num_bytes,
            num_calls=self.num_calls,
        )
        return (*self.outgoing.phases, transfer)
