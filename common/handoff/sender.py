"""The prefill side of one handoff.

Theory of operation. ``Reserve`` is sent when the prefill is admitted, so the answer travels while
the first chunk computes. From then on every block that is whole is written as soon as the write
before it is done: at most one write is in flight, and it takes all blocks that are ready. After
the last block the commit goes out with one checksum per written block. Whatever ends the handoff
while a write is in flight waits in STOPPING for that write, because our ``Abort`` or ``Aborted``
promises the decode side that nothing is written into its blocks any more.

A renewed lease says that the peer lives, not that its answer is on the way: an answer that a lost
connection took with it never comes. So while an answer is due, only a bounded number of renewals
counts.
"""

from enum import StrEnum

from common.errors import ErrorCode
from common.handoff.events import (
    Aborted,
    AbortReceived,
    AcceptedReceived,
    BlocksComputed,
    CancelRequested,
    CommitRefusedReceived,
    Ended,
    Failed,
    HandedOver,
    LeaseExpired,
    Outcome,
    PeerGone,
    PeerLost,
    PrefillFinished,
    Refused,
    ReservedReceived,
    ReserveRefusedReceived,
    SendAbort,
    SendAborted,
    SendCommit,
    SenderEffect,
    SenderEvent,
    SendRelease,
    StartWrite,
    WriteFailed,
    WriteFinished,
)
from common.handoff.machine import Ignored, Illegal, Legal, PeerFault, Story, Table, decide
from common.messages.handoff import AbortReason


class SenderPhase(StrEnum):
    """Where the prefill side of a handoff stands."""

    RESERVING = "reserving"
    READY = "ready"
    WRITING = "writing"
    COMMITTING = "committing"
    STOPPING = "stopping"
    ENDED = "ended"


_P = SenderPhase
_PUMP = (_P.READY, _P.WRITING, _P.COMMITTING)
_NO_WRITE = Illegal("no write is in flight")
_STOPS = Ignored("the handoff is being stopped")
_OVER = Ignored("the handoff has ended")
_EARLY = PeerFault("nothing was committed yet")
_ONCE = Illegal("the prefill has finished already")
_REPEAT = Ignored("repeat of an answer")

SENDER_TABLE: Table = {
    (_P.RESERVING, "ReservedReceived"): Legal((*_PUMP, _P.ENDED)),
    (_P.RESERVING, "ReserveRefusedReceived"): Legal((_P.ENDED,)),
    (_P.RESERVING, "BlocksComputed"): Legal((_P.RESERVING,)),
    (_P.RESERVING, "PrefillFinished"): Legal((_P.RESERVING,)),
    (_P.RESERVING, "WriteFinished"): _NO_WRITE,
    (_P.RESERVING, "WriteFailed"): _NO_WRITE,
    (_P.RESERVING, "AcceptedReceived"): _EARLY,
    (_P.RESERVING, "CommitRefusedReceived"): _EARLY,
    (_P.RESERVING, "AbortReceived"): Legal((_P.ENDED,)),
    (_P.RESERVING, "CancelRequested"): Legal((_P.ENDED,)),
    (_P.RESERVING, "PeerLost"): Legal((_P.ENDED,)),
    (_P.RESERVING, "LeaseExpired"): Legal((_P.ENDED,)),
    (_P.READY, "ReservedReceived"): _REPEAT,
    (_P.READY, "ReserveRefusedReceived"): PeerFault("it has reserved already"),
    (_P.READY, "BlocksComputed"): Legal((_P.READY, _P.WRITING)),
    (_P.READY, "PrefillFinished"): Legal((_P.WRITING, _P.COMMITTING)),
    (_P.READY, "WriteFinished"): _NO_WRITE,
    (_P.READY, "WriteFailed"): _NO_WRITE,
    (_P.READY, "AcceptedReceived"): _EARLY,
    (_P.READY, "CommitRefusedReceived"): _EARLY,
    (_P.READY, "AbortReceived"): Legal((_P.ENDED,)),
    (_P.READY, "CancelRequested"): Legal((_P.ENDED,)),
    (_P.READY, "PeerLost"): Legal((_P.ENDED,)),
    (_P.READY, "LeaseExpired"): Legal((_P.ENDED,)),
    (_P.WRITING, "ReservedReceived"): _REPEAT,
    (_P.WRITING, "ReserveRefusedReceived"): PeerFault("it has reserved already"),
    (_P.WRITING, "BlocksComputed"): Legal((_P.WRITING,)),
    (_P.WRITING, "PrefillFinished"): Legal((_P.WRITING,)),
    (_P.WRITING, "WriteFinished"): Legal(_PUMP),
    (_P.WRITING, "WriteFailed"): Legal((_P.ENDED,)),
    (_P.WRITING, "AcceptedReceived"): _EARLY,
    (_P.WRITING, "CommitRefusedReceived"): _EARLY,
    (_P.WRITING, "AbortReceived"): Legal((_P.STOPPING,)),
    (_P.WRITING, "CancelRequested"): Legal((_P.STOPPING,)),
    (_P.WRITING, "PeerLost"): Legal((_P.STOPPING,)),
    (_P.WRITING, "LeaseExpired"): Legal((_P.STOPPING,)),
    (_P.COMMITTING, "ReservedReceived"): _REPEAT,
    (_P.COMMITTING, "ReserveRefusedReceived"): PeerFault("it has reserved already"),
    (_P.COMMITTING, "BlocksComputed"): _ONCE,
    (_P.COMMITTING, "PrefillFinished"): _ONCE,
    (_P.COMMITTING, "WriteFinished"): _NO_WRITE,
    (_P.COMMITTING, "WriteFailed"): _NO_WRITE,
    (_P.COMMITTING, "AcceptedReceived"): Legal((_P.ENDED,)),
    (_P.COMMITTING, "CommitRefusedReceived"): Legal((_P.WRITING, _P.COMMITTING, _P.ENDED)),
    (_P.COMMITTING, "AbortReceived"): Legal((_P.ENDED,)),
    (_P.COMMITTING, "CancelRequested"): Legal((_P.ENDED,)),
    (_P.COMMITTING, "PeerLost"): Legal((_P.ENDED,)),
    (_P.COMMITTING, "LeaseExpired"): Legal((_P.ENDED,)),
    (_P.STOPPING, "ReservedReceived"): _REPEAT,
    (_P.STOPPING, "ReserveRefusedReceived"): PeerFault("it has reserved already"),
    (_P.STOPPING, "BlocksComputed"): _STOPS,
    (_P.STOPPING, "PrefillFinished"): _STOPS,
    (_P.STOPPING, "WriteFinished"): Legal((_P.ENDED,)),
    (_P.STOPPING, "WriteFailed"): Legal((_P.ENDED,)),
    (_P.STOPPING, "AcceptedReceived"): _EARLY,
    (_P.STOPPING, "CommitRefusedReceived"): _EARLY,
    (_P.STOPPING, "AbortReceived"): Legal((_P.STOPPING,)),
    (_P.STOPPING, "CancelRequested"): _STOPS,
    (_P.STOPPING, "PeerLost"): Legal((_P.STOPPING,)),
    (_P.STOPPING, "LeaseExpired"): _STOPS,
    (_P.ENDED, "ReservedReceived"): _OVER,
    (_P.ENDED, "ReserveRefusedReceived"): _OVER,
    (_P.ENDED, "BlocksComputed"): _OVER,
    (_P.ENDED, "PrefillFinished"): _OVER,
    (_P.ENDED, "WriteFinished"): _NO_WRITE,
    (_P.ENDED, "WriteFailed"): _NO_WRITE,
    (_P.ENDED, "AcceptedReceived"): _OVER,
    (_P.ENDED, "CommitRefusedReceived"): _OVER,
    (_P.ENDED, "AbortReceived"): _OVER,
    (_P.ENDED, "CancelRequested"): _OVER,
    (_P.ENDED, "PeerLost"): _OVER,
    (_P.ENDED, "LeaseExpired"): _OVER,
}

MAX_COMMITS = 2
"""A damaged block is written again once; a second damage is a broken link."""
MAX_UNANSWERED_RENEWALS = 16
"""Renewals that count while an answer to ``Reserve`` or ``Commit`` is due: four leases' worth."""


class HandoffSender:
    """The prefill side of one handoff. ``Reserve`` has been sent when it is made.

    ``num_blocks`` is the length of the prompt in blocks; ``lease_deadline`` is on the clock of the
    ``now`` arguments.
    """

    def __init__(self, num_blocks: int, lease_deadline: float) -> None:
        self.phase = SenderPhase.RESERVING
        self.num_blocks = num_blocks
        self.lease_deadline = lease_deadline
        self.target_ids: tuple[int, ...] = ()
        self.num_cached_blocks = 0
        self._num_computed = 0
        self._num_written = 0
        self._num_in_flight = 0
        self._num_commits = 0
        self._num_unanswered = 0
        self._checksums: list[int] = []
        self._finished: PrefillFinished | None = None
        self._ending: tuple[Outcome, SendAbort | SendAborted | None] | None = None
        self._story = Story()

    def renew(self, deadline: float) -> None:
        """The peer knows this transfer: it lives until ``deadline``.

        Without effect once the peer has owed us an answer for too long.
        """
        if self.phase in (SenderPhase.RESERVING, SenderPhase.COMMITTING):
            self._num_unanswered += 1
            if self._num_unanswered > MAX_UNANSWERED_RENEWALS:
                return
        self.lease_deadline = deadline

    def tick(self, now: float) -> list[SenderEffect]:
        """Notice an expired lease."""
        if now <= self.lease_deadline or self.phase in (SenderPhase.ENDED, SenderPhase.STOPPING):
            return []
        return self.handle(LeaseExpired())

    def handle(self, event: SenderEvent) -> list[SenderEffect]:
        """Take one event and return what to do. The only mutator.

        Raises IllegalTransitionError or RemoteProtocolError, with nothing changed.
        """
        name = type(event).__name__
        verdict = decide(SENDER_TABLE, "handoff sender", self.phase, name, self._story)
        self._story.add(self.phase, name)
        if isinstance(verdict, Ignored):
            return []
        effects = self._apply(event)
        self.validate()
        return effects

    def _apply(  # noqa: C901, PLR0911, PLR0912  # one case per event
        self, event: SenderEvent
    ) -> list[SenderEffect]:
        match event:
            case ReservedReceived(block_ids, num_cached_blocks):
                return self._reserved(block_ids, num_cached_blocks)
            case ReserveRefusedReceived(code, message):
                return self._end(Refused(code, message), None)
            case BlocksComputed(num_blocks):
                self._num_computed = max(self._num_computed, num_blocks)
                return self._pump()
            case PrefillFinished():
                self._num_computed = self.num_blocks
                self._finished = event
                return self._pump()
            case WriteFinished(checksums):
                return self._written(tuple(checksums))
            case WriteFailed(message):
                self._num_in_flight = 0
                if self._ending is not None:
                    return self._end(*self._ending)
                return self._end(Failed(message), SendAbort(AbortReason.WRITE_FAILED))
            case AcceptedReceived():
                return [SendRelease(), *self._end(HandedOver(), None)]
            case CommitRefusedReceived(block_index):
                return self._commit_refused(block_index)
            case AbortReceived(reason):
                return self._stop(Aborted(reason, by_peer=True), SendAborted())
            case CancelRequested(reason):
                return self._stop(Aborted(reason, by_peer=False), SendAbort(reason))
            # Without a reservation nothing was written: the prompt is ours and can go elsewhere.
            case PeerLost(reason) if self.phase is SenderPhase.RESERVING:
                return self._end(Refused(ErrorCode.WORKER_DIED, reason), None)
            case PeerLost(reason):
                return self._stop(PeerGone(reason), None)
            case LeaseExpired() if self.phase is SenderPhase.RESERVING:
                refused = Refused(ErrorCode.TRANSFER_FAILED, "the decode side did not answer")
                return self._end(refused, SendAbort(AbortReason.LEASE_EXPIRED))
            case LeaseExpired():
                lost = PeerGone("the decode side did not renew its lease")
                return self._stop(lost, SendAbort(AbortReason.LEASE_EXPIRED))

    def _reserved(self, block_ids: tuple[int, ...], num_cached: int) -> list[SenderEffect]:
        if len(block_ids) != self.num_blocks or not 0 <= num_cached <= self.num_blocks:
            message = (
                f"{len(block_ids)} blocks reserved, {num_cached} cached, {self.num_blocks} asked"
            )
            return self._end(Failed(message), SendAbort(AbortReason.WRITE_FAILED))
        self.target_ids = block_ids
        self.num_cached_blocks = num_cached
        self._num_written = num_cached
        self.phase = SenderPhase.READY
        return self._pump()

    def _written(self, checksums: tuple[int, ...]) -> list[SenderEffect]:
        self._num_written += self._num_in_flight
        self._num_in_flight = 0
        self._checksums.extend(checksums)
        if self._ending is not None:
            return self._end(*self._ending)
        self.phase = SenderPhase.READY
        return self._pump()

    def _commit_refused(self, block_index: int) -> list[SenderEffect]:
        if self._num_commits >= MAX_COMMITS:
            message = f"block {block_index} arrived damaged {MAX_COMMITS} times"
            return self._end(Failed(message), SendAbort(AbortReason.CORRUPT))
        self._num_written = self.num_cached_blocks
        self._checksums.clear()
        self.phase = SenderPhase.READY
        return self._pump()

    def _pump(self) -> list[SenderEffect]:
        if self.phase is not SenderPhase.READY:
            return []
        if self._num_computed > self._num_written:
            self._num_in_flight = self._num_computed - self._num_written
            self.phase = SenderPhase.WRITING
            return [StartWrite(self._num_written, self._num_in_flight)]
        if self._finished is not None:
            self._num_commits += 1
            self._num_unanswered = 0
            self.phase = SenderPhase.COMMITTING
            return [SendCommit(self._finished, tuple(self._checksums))]
        return []

    def _stop(
        self, outcome: Outcome, last_word: SendAbort | SendAborted | None
    ) -> list[SenderEffect]:
        if self.phase is SenderPhase.STOPPING and self._ending is not None:
            # A second reason while the write runs: a dead peer hears nothing; an asking one gets
            # its answer; the first outcome stays.
            self._ending = (self._ending[0], last_word)
            return []
        if self.phase is SenderPhase.WRITING:
            self.phase = SenderPhase.STOPPING
            self._ending = (outcome, last_word)
            return []
        return self._end(outcome, last_word)

    def _end(
        self, outcome: Outcome, last_word: SendAbort | SendAborted | None
    ) -> list[SenderEffect]:
        self.phase = SenderPhase.ENDED
        return [*([last_word] if last_word is not None else []), Ended(outcome)]

    def validate(self) -> None:
        """Check the machine's sums. Raises AssertionError naming them: a bug of ours."""
        in_flight = self.phase in (SenderPhase.WRITING, SenderPhase.STOPPING)
        assert (self._num_in_flight > 0) == in_flight, (self.phase, self._num_in_flight)
        assert self._num_written + self._num_in_flight <= self.num_blocks, self._num_written
        assert (
            self.phase is SenderPhase.RESERVING
            or not self.target_ids
            or (len(self._checksums) == self._num_written - self.num_cached_blocks)
        ), (self._checksums, self._num_written)
