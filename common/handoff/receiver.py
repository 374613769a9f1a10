"""The decode side of one handoff.

Theory of operation. The blocks are held from the reservation on, and the peer may write into them
at any moment until it says that it will not: with ``Commit``, ``Abort`` or ``Aborted``, or by being
dead. So a handoff that we end ourselves drains: the blocks stay held until the peer has answered.
A commit is verified block by block before anything reads the blocks; while that runs they are not
freed either (STOPPING). With ACCEPTED the blocks belong to the decoding request, and only the
record waits for the peer's ``Release``, so that a peer that missed ``Accepted`` is not told that
the transfer is unknown.
"""

from enum import StrEnum

from common.handoff.events import (
    Aborted,
    AbortedReceived,
    AbortReceived,
    CancelRequested,
    CommitReceived,
    Ended,
    Failed,
    FreeBlocks,
    HandedOver,
    LeaseExpired,
    Outcome,
    PeerGone,
    PeerLost,
    ReceiverEffect,
    ReceiverEvent,
    ReleaseReceived,
    ReserveRepeated,
    SendAbort,
    SendAccepted,
    SendCommitRefused,
    SendReserved,
    StartDecode,
    StartVerify,
    Verified,
    VerifyFailed,
)
from common.handoff.machine import Ignored, Illegal, Legal, PeerFault, Story, Table, decide
from common.messages.handoff import AbortReason


class ReceiverPhase(StrEnum):
    """Where the decode side of a handoff stands."""

    RESERVED = "reserved"
    VERIFYING = "verifying"
    STOPPING = "stopping"
    DRAINING = "draining"
    ACCEPTED = "accepted"
    ENDED = "ended"


_P = ReceiverPhase
_NO_VERIFY = Illegal("nothing is being verified")
_UNASKED = PeerFault("no abort was asked for")
_TWICE = PeerFault("it has committed already")
_EARLY = PeerFault("nothing was accepted yet")
_DRAINS = Ignored("the blocks are draining")
_STOPS = Ignored("the handoff is being stopped")
_OWNED = Ignored("the decoding request owns the blocks")
_OVER = Ignored("the handoff has ended")

RECEIVER_TABLE: Table = {
    (_P.RESERVED, "ReserveRepeated"): Legal((_P.RESERVED,)),
    (_P.RESERVED, "CommitReceived"): Legal((_P.VERIFYING,)),
    (_P.RESERVED, "Verified"): _NO_VERIFY,
    (_P.RESERVED, "VerifyFailed"): _NO_VERIFY,
    (_P.RESERVED, "ReleaseReceived"): _EARLY,
    (_P.RESERVED, "AbortReceived"): Legal((_P.ENDED,)),
    (_P.RESERVED, "AbortedReceived"): _UNASKED,
    (_P.RESERVED, "CancelRequested"): Legal((_P.DRAINING,)),
    (_P.RESERVED, "PeerLost"): Legal((_P.ENDED,)),
    (_P.RESERVED, "LeaseExpired"): Legal((_P.DRAINING,)),
    (_P.VERIFYING, "ReserveRepeated"): Ignored("the peer has its answer: it committed"),
    (_P.VERIFYING, "CommitReceived"): Ignored("repeat of the commit being verified"),
    (_P.VERIFYING, "Verified"): Legal((_P.ACCEPTED, _P.ENDED)),
    (_P.VERIFYING, "VerifyFailed"): Legal((_P.RESERVED, _P.ENDED)),
    (_P.VERIFYING, "ReleaseReceived"): _EARLY,
    (_P.VERIFYING, "AbortReceived"): Legal((_P.STOPPING,)),
    (_P.VERIFYING, "AbortedReceived"): _UNASKED,
    (_P.VERIFYING, "CancelRequested"): Legal((_P.STOPPING,)),
    (_P.VERIFYING, "PeerLost"): Legal((_P.VERIFYING,)),
    (_P.VERIFYING, "LeaseExpired"): Ignored("everything is written: the peer is not needed"),
    (_P.STOPPING, "ReserveRepeated"): _STOPS,
    (_P.STOPPING, "CommitReceived"): _STOPS,
    (_P.STOPPING, "Verified"): Legal((_P.ENDED,)),
    (_P.STOPPING, "VerifyFailed"): Legal((_P.ENDED,)),
    (_P.STOPPING, "ReleaseReceived"): _EARLY,
    (_P.STOPPING, "AbortReceived"): _STOPS,
    (_P.STOPPING, "AbortedReceived"): _STOPS,
    (_P.STOPPING, "CancelRequested"): _STOPS,
    (_P.STOPPING, "PeerLost"): _STOPS,
    (_P.STOPPING, "LeaseExpired"): _STOPS,
    (_P.DRAINING, "ReserveRepeated"): _DRAINS,
    (_P.DRAINING, "CommitReceived"): Legal((_P.DRAINING,)),
    (_P.DRAINING, "Verified"): _NO_VERIFY,
    (_P.DRAINING, "VerifyFailed"): _NO_VERIFY,
    (_P.DRAINING, "ReleaseReceived"): _EARLY,
    (_P.DRAINING, "AbortReceived"): Legal((_P.ENDED,)),
    (_P.DRAINING, "AbortedReceived"): Legal((_P.ENDED,)),
    (_P.DRAINING, "CancelRequested"): _DRAINS,
    (_P.DRAINING, "PeerLost"): Legal((_P.ENDED,)),
    (_P.DRAINING, "LeaseExpired"): Ignored("only the peer's answer or death ends a drain"),
    (_P.ACCEPTED, "ReserveRepeated"): _TWICE,
    (_P.ACCEPTED, "CommitReceived"): Legal((_P.ACCEPTED,)),
    (_P.ACCEPTED, "Verified"): _NO_VERIFY,
    (_P.ACCEPTED, "VerifyFailed"): _NO_VERIFY,
    (_P.ACCEPTED, "ReleaseReceived"): Legal((_P.ENDED,)),
    (_P.ACCEPTED, "AbortReceived"): _OWNED,
    (_P.ACCEPTED, "AbortedReceived"): _UNASKED,
    (_P.ACCEPTED, "CancelRequested"): _OWNED,
    (_P.ACCEPTED, "PeerLost"): Legal((_P.ENDED,)),
    (_P.ACCEPTED, "LeaseExpired"): Ignored("only the peer's word or death ends the record"),
    (_P.ENDED, "ReserveRepeated"): _OVER,
    (_P.ENDED, "CommitReceived"): _OVER,
    (_P.ENDED, "Verified"): _NO_VERIFY,
    (_P.ENDED, "VerifyFailed"): _NO_VERIFY,
    (_P.ENDED, "ReleaseReceived"): _OVER,
    (_P.ENDED, "AbortReceived"): _OVER,
    (_P.ENDED, "AbortedReceived"): _OVER,
    (_P.ENDED, "CancelRequested"): _OVER,
    (_P.ENDED, "PeerLost"): _OVER,
    (_P.ENDED, "LeaseExpired"): _OVER,
}

MAX_COMMITS = 2
"""A damaged block is asked for once more; a second damage is a broken link."""


class HandoffReceiver:
    """The decode side of one handoff; its blocks are held when it is made.

    ``lease_deadline`` is on the clock of the ``now`` arguments.
    """

    def __init__(self, lease_deadline: float) -> None:
        self.phase = ReceiverPhase.RESERVED
        self.lease_deadline = lease_deadline
        self._commit: CommitReceived | None = None
        self._num_commits = 0
        self._outcome: Outcome | None = None
        self._holds_blocks = True
        self._is_peer_lost = False
        self._abort_reason = AbortReason.CANCELLED
        self._story = Story()

    def renew(self, deadline: float) -> None:
        """The peer knows this transfer: it lives until ``deadline``."""
        self.lease_deadline = deadline

    def tick(self, now: float) -> list[ReceiverEffect]:
        """Notice an expired lease."""
        if now <= self.lease_deadline or self.phase is not ReceiverPhase.RESERVED:
            return []
        return self.handle(LeaseExpired())

    def handle(self, event: ReceiverEvent) -> list[ReceiverEffect]:
        """Take one event and return what to do. The only mutator.

        Raises IllegalTransitionError or RemoteProtocolError, with nothing changed.
        """
        name = type(event).__name__
        verdict = decide(RECEIVER_TABLE, "handoff receiver", self.phase, name, self._story)
        self._story.add(self.phase, name)
        if isinstance(verdict, Ignored):
            return []
        effects = self._apply(event)
        self.validate()
        return effects

    def _apply(  # noqa: C901, PLR0911  # one case per event
        self, event: ReceiverEvent
    ) -> list[ReceiverEffect]:
        match event:
            case ReserveRepeated():
                return [SendReserved()]
            case CommitReceived(checksums=checksums):
                if self.phase is ReceiverPhase.ACCEPTED:
                    return [SendAccepted()]
                if self.phase is ReceiverPhase.DRAINING:
                    # It would not have committed, had it heard our abort.
                    return [SendAbort(self._abort_reason)]
                self._commit = event
                self._num_commits += 1
                self.phase = ReceiverPhase.VERIFYING
                return [StartVerify(checksums)]
            case Verified():
                return self._verified()
            case VerifyFailed(block_index):
                return self._verify_failed(block_index)
            case ReleaseReceived():
                return self._end(HandedOver())
            case AbortReceived(reason):
                return self._peer_stopped(Aborted(reason, by_peer=True))
            case AbortedReceived():
                return self._peer_stopped(Aborted(AbortReason.CANCELLED, by_peer=False))
            case CancelRequested(reason):
                return self._stop(Aborted(reason, by_peer=False), reason)
            case PeerLost(reason):
                return self._peer_lost(reason)
            case LeaseExpired():
                lost = PeerGone("the prefill side did not renew its lease")
                return self._stop(lost, AbortReason.LEASE_EXPIRED)

    def _peer_lost(self, reason: str) -> list[ReceiverEffect]:
        if self.phase is ReceiverPhase.VERIFYING:
            # Everything is written; only a damaged block would need the peer again.
            self._is_peer_lost = True
            return []
        if self.phase is ReceiverPhase.ACCEPTED:
            return self._end(HandedOver())
        return self._peer_stopped(PeerGone(reason))

    def _verified(self) -> list[ReceiverEffect]:
        assert self._commit is not None, "verified without a commit"
        if self.phase is ReceiverPhase.STOPPING:
            return self._free(self._outcome or Failed("stopped without a reason"))
        self._holds_blocks = False
        if self._is_peer_lost:
            return [StartDecode(self._commit), *self._end(HandedOver())]
        self.phase = ReceiverPhase.ACCEPTED
        return [SendAccepted(), StartDecode(self._commit)]

    def _verify_failed(self, block_index: int) -> list[ReceiverEffect]:
        if self.phase is ReceiverPhase.STOPPING:
            return self._free(self._outcome or Failed("stopped without a reason"))
        if self._num_commits >= MAX_COMMITS:
            message = f"block {block_index} arrived damaged {MAX_COMMITS} times"
            return [SendAbort(AbortReason.CORRUPT), *self._free(Failed(message))]
        if self._is_peer_lost:
            return self._free(PeerGone(f"block {block_index} is damaged and its writer is gone"))
        self.phase = ReceiverPhase.RESERVED
        return [SendCommitRefused(block_index)]

    def _stop(self, outcome: Outcome, reason: AbortReason) -> list[ReceiverEffect]:
        self._outcome = outcome
        self._abort_reason = reason
        verifying = self.phase is ReceiverPhase.VERIFYING
        self.phase = ReceiverPhase.STOPPING if verifying else ReceiverPhase.DRAINING
        return [SendAbort(reason)]

    def _peer_stopped(self, outcome: Outcome) -> list[ReceiverEffect]:
        if self.phase is ReceiverPhase.VERIFYING:
            self._outcome = outcome
            self.phase = ReceiverPhase.STOPPING
            return []
        return self._free(self._outcome or outcome)

    def _free(self, outcome: Outcome) -> list[ReceiverEffect]:
        self._holds_blocks = False
        return [FreeBlocks(), *self._end(outcome)]

    def _end(self, outcome: Outcome) -> list[ReceiverEffect]:
        self.phase = ReceiverPhase.ENDED
        return [Ended(outcome)]

    def validate(self) -> None:
        """Check who owns the blocks. Raises AssertionError: a bug of ours."""
        owned = self.phase not in (ReceiverPhase.ACCEPTED, ReceiverPhase.ENDED)
        assert self._holds_blocks == owned, (self.phase, self._holds_blocks)
