"""Scripts that bring either handoff machine into each of its phases, along several paths."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.errors import ErrorCode
from common.handoff.events import (
    AbortedReceived,
    AbortReceived,
    AcceptedReceived,
    BlocksComputed,
    CancelRequested,
    CommitReceived,
    CommitRefusedReceived,
    LeaseExpired,
    PeerLost,
    PrefillFinished,
    ReceiverEvent,
    ReleaseReceived,
    ReservedReceived,
    ReserveRefusedReceived,
    ReserveRepeated,
    SenderEvent,
    Verified,
    VerifyFailed,
    WriteFailed,
    WriteFinished,
)
from common.handoff.receiver import HandoffReceiver, ReceiverPhase
from common.handoff.sender import HandoffSender, SenderPhase
from common.messages.handoff import AbortReason, FirstToken
from common.sampling import SampledToken

NUM_BLOCKS = 4
LEASE_DEADLINE = 100.0
TARGETS = (10, 11, 12, 13)
CHECKSUMS = (90, 91, 92, 93)
FIRST_TOKENS = (FirstToken(choice=0, token=SampledToken(token_id=7)),)

FINISHED = PrefillFinished(FIRST_TOKENS, 0, 1.0)
RESERVED = ReservedReceived(TARGETS, 0)
ALL_CACHED = ReservedReceived(TARGETS, NUM_BLOCKS)
REFUSED = ReserveRefusedReceived(ErrorCode.NO_ROOM, "full")
CANCEL = CancelRequested(AbortReason.CANCELLED)
PEER_ABORT = AbortReceived(AbortReason.CANCELLED)
LOST = PeerLost("died")
COMMIT = CommitReceived(FIRST_TOKENS, 0, 1.0, CHECKSUMS)

M = TypeVar("M")
E = TypeVar("E")
Phase = TypeVar("Phase")


def written(first: int, num_blocks: int) -> WriteFinished:
    """The write of these blocks is done."""
    return WriteFinished(CHECKSUMS[first : first + num_blocks])


@dataclass(frozen=True)
class Stories(Generic[M, Phase, E]):
    """A machine, paths into each phase, and examples of each event type."""

    make: Callable[[], M]
    paths: Mapping[Phase, tuple[tuple[E, ...], ...]]
    examples: tuple[E, ...]


_ALL_WRITTEN: tuple[SenderEvent, ...] = (FINISHED, RESERVED, written(0, 4))
_WRITING: tuple[SenderEvent, ...] = (BlocksComputed(2), RESERVED)
_DAMAGED: tuple[SenderEvent, ...] = (*_ALL_WRITTEN, CommitRefusedReceived(1))

SENDER: Stories[HandoffSender, SenderPhase, SenderEvent] = Stories(
    make=lambda: HandoffSender(NUM_BLOCKS, LEASE_DEADLINE),
    paths={
        SenderPhase.RESERVING: ((), (BlocksComputed(2),), (BlocksComputed(2), FINISHED)),
        SenderPhase.READY: (
            (RESERVED,),
            (ReservedReceived(TARGETS, 2), BlocksComputed(1)),
            (ALL_CACHED,),
            (*_WRITING, written(0, 2)),
        ),
        SenderPhase.WRITING: (
            _WRITING,
            (*_WRITING, BlocksComputed(3)),
            (FINISHED, RESERVED),
            _DAMAGED,
        ),
        SenderPhase.COMMITTING: (_ALL_WRITTEN, (*_DAMAGED, written(0, 4)), (FINISHED, ALL_CACHED)),
        SenderPhase.STOPPING: tuple((*_WRITING, end) for end in (CANCEL, PEER_ABORT, LOST)),
        SenderPhase.ENDED: (
            (REFUSED,),
            (CANCEL,),
            (*_ALL_WRITTEN, AcceptedReceived()),
            (*_WRITING, CANCEL, written(0, 2)),
            (*_WRITING, WriteFailed("no space")),
        ),
    },
    examples=(
        RESERVED,
        ALL_CACHED,
        ReservedReceived(TARGETS[:3], 0),
        ReservedReceived(TARGETS, 5),
        REFUSED,
        BlocksComputed(1),
        BlocksComputed(4),
        FINISHED,
        written(0, 4),
        WriteFailed("no space"),
        AcceptedReceived(),
        CommitRefusedReceived(1),
        CANCEL,
        PEER_ABORT,
        LOST,
        LeaseExpired(),
    ),
)

RECEIVER: Stories[HandoffReceiver, ReceiverPhase, ReceiverEvent] = Stories(
    make=lambda: HandoffReceiver(LEASE_DEADLINE),
    paths={
        ReceiverPhase.RESERVED: ((), (ReserveRepeated(),), (COMMIT, VerifyFailed(1))),
        ReceiverPhase.VERIFYING: (
            (COMMIT,),
            (COMMIT, VerifyFailed(1), COMMIT),
            (COMMIT, LOST),
        ),
        ReceiverPhase.STOPPING: ((COMMIT, CANCEL), (COMMIT, PEER_ABORT), (COMMIT, LOST, CANCEL)),
        ReceiverPhase.DRAINING: (
            (CANCEL,),
            (LeaseExpired(),),
            (COMMIT, VerifyFailed(1), CANCEL),
        ),
        ReceiverPhase.ACCEPTED: (
            (COMMIT, Verified()),
            (COMMIT, VerifyFailed(0), COMMIT, Verified()),
        ),
        ReceiverPhase.ENDED: (
            (PEER_ABORT,),
            (LOST,),
            (CANCEL, AbortedReceived()),
            (COMMIT, Verified(), ReleaseReceived()),
            (COMMIT, LOST, Verified()),
        ),
    },
    examples=(
        ReserveRepeated(),
        COMMIT,
        Verified(),
        VerifyFailed(2),
        ReleaseReceived(),
        AbortedReceived(),
        CANCEL,
        PEER_ABORT,
        LOST,
        LeaseExpired(),
    ),
)
