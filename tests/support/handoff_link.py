"""Both handoff machines over a simulated link, driven as the worker drives them.

The link keeps order; it may delay, repeat a message at once, or lose everything that is under way
in one direction, as a connection that breaks does. Memory is simulated too: each block has an
owner and a content, and a write that lands in a block that its transfer no longer holds is noted
as a violation.
"""

from collections import deque
from dataclasses import dataclass, field

from common.errors import ErrorCode
from common.handoff.events import (
    AbortedReceived,
    AbortReceived,
    AcceptedReceived,
    CommitReceived,
    CommitRefusedReceived,
    Ended,
    FreeBlocks,
    Outcome,
    ReceiverEffect,
    ReceiverEvent,
    ReleaseReceived,
    ReservedReceived,
    ReserveRefusedReceived,
    ReserveRepeated,
    SendAbort,
    SendAborted,
    SendAccepted,
    SendCommit,
    SendCommitRefused,
    SenderEffect,
    SenderEvent,
    SendRelease,
    SendReserved,
    StartDecode,
    StartVerify,
    StartWrite,
    Verified,
    VerifyFailed,
    WriteFailed,
    WriteFinished,
)
from common.handoff.receiver import HandoffReceiver, ReceiverPhase
from common.handoff.sender import HandoffSender
from common.messages.handoff import AbortReason

LEASE = 8
GARBAGE = -1


@dataclass(frozen=True)
class Message:
    """What is under way: the kind and what the kinds carry."""

    kind: str
    event: SenderEvent | ReceiverEvent | None = None
    names_transfer: bool = False


@dataclass
class Memory:
    """The decode side's blocks of this transfer: who has them, and what is in them."""

    owner: str = "free"
    content: list[int] = field(default_factory=list)


class HandoffPair:
    """One transfer between two workers. ``checksum`` of a block is its content."""

    def __init__(self, num_blocks: int, num_cached: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = num_cached
        self.now = 0
        self.source = [100 + place for place in range(num_blocks)]
        self.memory = Memory()
        self.up: deque[Message] = deque()
        self.down: deque[Message] = deque()
        self.sender: HandoffSender | None = HandoffSender(num_blocks, LEASE)
        self.receiver: HandoffReceiver | None = None
        self.is_prefill_alive = True
        self.is_decode_alive = True
        self.is_prefill_paired = True
        self.write: StartWrite | None = None
        self.verify: StartVerify | None = None
        self.num_decodes = 0
        self.outcomes: dict[str, Outcome] = {}
        self.violations: list[str] = []
        self.send_up(Message("reserve"))

    # ---- the link --------------------------------------------------------------------------------

    def send_up(self, message: Message) -> None:
        """Send to the decode side."""
        if self.is_decode_alive:
            self.up.append(message)

    def send_down(self, message: Message) -> None:
        """Send to the prefill side."""
        if self.is_prefill_alive:
            self.down.append(message)

    def deliver_up(self, *, has_room: bool) -> None:
        """Let the oldest message reach the decode side."""
        message = self.up.popleft()
        if not self.is_prefill_paired:
            return  # a stranger is refused
        if message.kind == "renew":
            self._renew(names_transfer=message.names_transfer)
        elif message.kind == "reserve":
            self._reserve(has_room=has_room)
        elif self.receiver is None:
            if isinstance(message.event, CommitReceived):
                unknown = AbortReceived(AbortReason.UNKNOWN_TRANSFER)
                self.send_down(Message("abort", unknown))
        else:
            self.to_receiver(message.event)  # type: ignore[arg-type]  # upward events are its own

    def deliver_down(self) -> None:
        """Let the oldest message reach the prefill side."""
        message = self.down.popleft()
        if message.kind == "renewed" and self.sender is not None:
            if message.names_transfer:
                self.sender.renew(self.now + LEASE)
            else:
                self.to_sender(AbortReceived(AbortReason.UNKNOWN_TRANSFER))
        elif message.kind != "renewed":
            if isinstance(message.event, AbortReceived) and self.sender is None:
                self.send_up(Message("aborted", AbortedReceived()))
            if self.sender is not None:
                self.to_sender(message.event)  # type: ignore[arg-type]  # downward events are its own

    def _reserve(self, *, has_room: bool) -> None:
        if self.receiver is not None:
            if self.receiver.phase is not ReceiverPhase.ACCEPTED:
                self.to_receiver(ReserveRepeated())
        elif not has_room or self.memory.owner != "free":
            self.send_down(Message("refused", ReserveRefusedReceived(ErrorCode.NO_ROOM, "full")))
        else:
            self.receiver = HandoffReceiver(self.now + LEASE)
            cached = self.source[: self.num_cached]
            fresh = [GARBAGE] * (self.num_blocks - self.num_cached)
            self.memory = Memory("transfer", [*cached, *fresh])
            self._answer_reserve()

    def _answer_reserve(self) -> None:
        ids = tuple(range(self.num_blocks))
        self.send_down(Message("reserved", ReservedReceived(ids, self.num_cached)))

    def _renew(self, *, names_transfer: bool) -> None:
        is_known = self.receiver is not None
        if self.receiver is not None and names_transfer:
            self.receiver.renew(self.now + LEASE)
        elif self.receiver is not None:
            unnamed: dict[ReceiverPhase, ReceiverEvent] = {
                ReceiverPhase.DRAINING: AbortedReceived(),
                ReceiverPhase.ACCEPTED: ReleaseReceived(),
                ReceiverPhase.RESERVED: AbortReceived(AbortReason.UNKNOWN_TRANSFER),
            }
            event = unnamed.get(self.receiver.phase)
            if event is not None:
                self.to_receiver(event)
        if names_transfer:
            self.send_down(Message("renewed", names_transfer=is_known))

    def renew_leases(self) -> None:
        """The prefill side tells what is alive there."""
        if self.is_prefill_alive:
            self.send_up(Message("renew", names_transfer=self.sender is not None))

    # ---- the machines ----------------------------------------------------------------------------

    def to_sender(self, event: SenderEvent) -> None:
        """Give the prefill side's machine an event and carry out what it wants."""
        assert self.sender is not None
        self._run_sender(self.sender.handle(event))

    def to_receiver(self, event: ReceiverEvent) -> None:
        """Give the decode side's machine an event and carry out what it wants."""
        assert self.receiver is not None
        self._run_receiver(self.receiver.handle(event))

    def tick(self) -> None:
        """Let both notice the time."""
        if self.sender is not None:
            self._run_sender(self.sender.tick(self.now))
        if self.receiver is not None:
            self._run_receiver(self.receiver.tick(self.now))

    def _run_sender(self, effects: list[SenderEffect]) -> None:
        for effect in effects:
            match effect:
                case StartWrite():
                    if self.write is not None:
                        self.violations.append("two writes in flight")
                    self.write = effect
                case SendCommit(finished, checksums):
                    commit = CommitReceived(
                        finished.first_tokens, finished.num_cached_tokens, finished.at, checksums
                    )
                    self.send_up(Message("commit", commit))
                case SendRelease():
                    self.send_up(Message("release", ReleaseReceived()))
                case SendAbort(reason):
                    self.send_up(Message("abort", AbortReceived(reason)))
                case SendAborted():
                    self.send_up(Message("aborted", AbortedReceived()))
                case Ended(outcome):
                    if self.write is not None:
                        self.violations.append("the prefill side ended during a write")
                    self.outcomes["sender"] = outcome
                    self.sender = None

    def _run_receiver(self, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            match effect:
                case SendReserved():
                    self._answer_reserve()
                case StartVerify():
                    if self.verify is not None:
                        self.violations.append("two verifications at once")
                    self.verify = effect
                case SendAccepted():
                    self.send_down(Message("accepted", AcceptedReceived()))
                case SendCommitRefused(block_index):
                    self.send_down(Message("commit refused", CommitRefusedReceived(block_index)))
                case SendAbort(reason):
                    self.send_down(Message("abort", AbortReceived(reason)))
                case StartDecode():
                    self._start_decode()
                case FreeBlocks():
                    self._free()
                case Ended(outcome):
                    self.outcomes["receiver"] = outcome
                    self.receiver = None

    def _start_decode(self) -> None:
        self.num_decodes += 1
        if self.memory.owner != "transfer":
            self.violations.append(f"decode in blocks of {self.memory.owner}")
        if self.memory.content != self.source:
            self.violations.append(f"decode reads {self.memory.content}")
        self.memory.owner = "decode"

    def _free(self) -> None:
        if self.memory.owner != "transfer":
            self.violations.append(f"freed blocks of {self.memory.owner}")
        if self.write is not None:
            self.violations.append("freed blocks that a write is going into")
        if self.verify is not None:
            self.violations.append("freed blocks that a verification reads")
        self.memory.owner = "free"

    # ---- outcomes of effects ---------------------------------------------------------------------

    def end_write(self, *, fails: bool, damages: bool) -> None:
        """The copy in flight ends; a damaged one leaves other bytes than it tells."""
        assert self.write is not None
        places = range(self.write.first, self.write.first + self.write.num_blocks)
        self.write = None
        if fails:
            self.to_sender(WriteFailed("no pool"))
            return
        if self.is_decode_alive:
            if self.memory.owner != "transfer":
                self.violations.append(f"wrote into blocks of {self.memory.owner}")
            for place in places:
                self.memory.content[place] = GARBAGE if damages else self.source[place]
        self.to_sender(WriteFinished([self.source[place] for place in places]))

    def end_verify(self) -> None:
        """The comparison of blocks and checksums ends."""
        assert self.verify is not None
        expected = [*self.source[: self.num_cached], *self.verify.checksums]
        self.verify = None
        wrong = [place for place, got in enumerate(self.memory.content) if got != expected[place]]
        self.to_receiver(VerifyFailed(wrong[0]) if wrong else Verified())

    # ---- deaths ----------------------------------------------------------------------------------

    def kill_prefill(self) -> None:
        """The prefill side is gone at once, with its write."""
        self.is_prefill_alive = False
        self.sender = None
        self.write = None
        self.down.clear()

    def kill_decode(self) -> None:
        """The decode side is gone at once, with its memory."""
        self.is_decode_alive = False
        self.receiver = None
        self.verify = None
        self.memory = Memory()
        self.up.clear()
