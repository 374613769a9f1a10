"""What other workers hand to this one."""

from dataclasses import dataclass, field

from common.handoff.events import CommitReceived
from common.handoff.receiver import HandoffReceiver
from common.ids import RequestId, TransferId
from common.messages.fields import PhaseName, Phases
from common.messages.handoff import FirstToken
from common.scheduler.request import NewRequest
from common.transfer.backend import PoolExport
from common.worker.paired_peers import Peer
from common.worker.phases import PrefixCopied


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A verified request whose blocks are held under ``owner``; these choices go on.

    ``done_at`` is when its prefill ended, or its decode was frozen, on this host's monotonic clock
    in seconds; ``phases`` ended before and were not told to the gateway.
    """

    new: NewRequest
    owner: str
    first_tokens: tuple[FirstToken, ...]
    num_cached_tokens: int
    done_at: float
    is_migration: bool
    phases: Phases


@dataclass(frozen=True, slots=True)
class PrefixEnded:
    """Another worker's copy of a prefix for a request: published, or nothing where it failed."""

    request_id: RequestId
    copied: PrefixCopied


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """One handoff that is under way, with the blocks that are held for it."""

    transfer_id: TransferId
    peer: Peer
    new: NewRequest
    machine: HandoffReceiver
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    export: PoolExport
    is_prefix: bool
    token: bytes = field(default=b"", repr=False)
    cancelled_choices: set[int] = field(default_factory=set)

    @property
    def request_id(self) -> RequestId:
        """The request that it is for."""
        return self.new.request_id

    @property
    def written_ids(self) -> tuple[int, ...]:
        """The blocks that the peer writes."""
        return self.block_ids[self.num_cached_blocks :]

    def taken_over(self, commit: CommitReceived) -> TakenOver:
        """Return the request as it goes on here, without the choices cancelled on the way."""
        return TakenOver(
            new=self.new,
            owner=self.transfer_id,
            first_tokens=tuple(
                first for first in commit.first_tokens if first.choice not in self.cancelled_choices
            ),
            num_cached_tokens=commit.num_cached_tokens,
            done_at=commit.prefill_done_at,
            is_migration=commit.is_migration,
            phases=commit.phases,
        )

    def copied(self, commit: CommitReceived) -> PrefixCopied:
        """Return what a prefix cost."""
        moved = [phase for phase in commit.phases if phase.name is PhaseName.TRANSFER]
        return PrefixCopied(
            num_tokens=len(self.new.prompt),
            num_bytes=sum(phase.num_bytes for phase in moved),
            num_calls=sum(phase.num_calls for phase in moved),
            phases=tuple(p for p in commit.phases if p.name is not PhaseName.TRANSFER),
        )
