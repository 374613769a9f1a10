"""What happens to placed requests: reports, cancels, deaths and deadlines."""

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.control import (
    Cancel,
    CancelRequest,
    DecodeStarted,
    MigrationFailed,
    PrefixNotCopied,
    RequestFailed,
    RequestFinished,
)
from common.messages.fields import Role
from services.controller import request_machine as machine
from services.controller.effects import Effect, Fact, Note, PeerKey, Send
from services.controller.limits import ControllerLimits
from services.controller.members import Members
from services.controller.request_book import RequestBook, ignored
from services.controller.request_machine import (
    CANCELLING,
    WITH_PREFILL,
    RequestEvent,
    RequestPhase,
)
from services.controller.request_record import CANCEL_REPORT_SECONDS

MOVE_REPORT_SECONDS = 3.0
"""How long a decode side may take to say that a decode whose target is gone goes on there."""


class RequestLifecycle:
    """Turns messages and deaths into the events of the records in ``book``."""

    def __init__(self, book: RequestBook, limits: ControllerLimits, members: Members) -> None:
        self._book = book
        self._limits = limits
        self._members = members

    def cancel(
        self, sender: PeerKey, message: CancelRequest, cause: str, now: float
    ) -> list[Effect]:
        """Pass a cancel on to every side that is involved."""
        record = self._book.requests.get(message.request_id)
        if record is not None and record.gateway != sender:
            return [ignored(message.request_id, cause, "another gateway's request")]
        if message.choice is not None:
            choice = machine.ChoiceCancelReceived(message.choice, message.reason)
            return self._book.step(message.request_id, choice, cause, now)
        event = machine.CancelReceived(message.reason or "cancelled")
        return self._book.step(message.request_id, event, cause, now)

    def decode_started(
        self, sender: PeerKey, message: DecodeStarted, cause: str, now: float
    ) -> list[Effect]:
        """Note that the decode side, or the target of a move, owns the request."""
        record = self._book.requests.get(message.request_id)
        if record is None and self._book.was_stopped(message.request_id):
            cancel = Cancel(
                request_id=message.request_id, choice=None, reason="it has been ended already"
            )
            return [Send(sender, cancel, cause)]
        if record is not None and record.target == sender:
            return self._book.step(message.request_id, machine.MigrationLanded(), cause, now)
        if record is not None and record.decode != sender:
            return [ignored(message.request_id, cause, "not its decode side")]
        return self._book.step(message.request_id, machine.DecodeStartedReceived(), cause, now)

    def finished(
        self, sender: PeerKey, message: RequestFinished, cause: str, now: float
    ) -> list[Effect]:
        """End a record on its owner's report, and tell a gateway that still waits for tokens."""
        event: RequestEvent = machine.PrefillSideFinished()
        if self._book.side_of(message.request_id, sender) == "decode":
            event = machine.DecodeSideFinished()
        record = self._book.requests.get(message.request_id)
        is_awaited = record is not None and record.phase not in CANCELLING
        effects = self._reported(sender, message.request_id, event, cause, now)
        if record is None or not is_awaited or message.request_id in self._book.requests:
            return effects
        return [*effects, Send(record.gateway, message, cause)]

    def failed(
        self, sender: PeerKey, message: RequestFailed, cause: str, now: float
    ) -> list[Effect]:
        """End a request on a side's error."""
        event: RequestEvent = machine.PrefillSideFailed(message.code, message.message)
        if self._book.side_of(message.request_id, sender) == "decode":
            event = machine.DecodeSideFailed(message.code, message.message)
        return self._reported(sender, message.request_id, event, cause, now)

    def migration_failed(
        self, sender: PeerKey, message: MigrationFailed, cause: str, now: float
    ) -> list[Effect]:
        """Note that a decode stays where it is.

        Where it did not, its new worker's answer was lost to the old one, which goes on in vain.
        """
        record = self._book.requests.get(message.request_id)
        if record is None or record.decode != sender:
            told = "another worker decodes it" if record else "it has ended"
            cancel = Cancel(request_id=message.request_id, choice=None, reason=told)
            return [ignored(message.request_id, cause, told), Send(sender, cancel, cause)]
        facts: tuple[Fact, ...] = (("decode", sender[0]), ("message", message.message))
        return [
            Note("migration_failed", cause, message.request_id, facts, "warning"),
            *self._book.step(message.request_id, machine.MigrationFailedReceived(), cause, now),
        ]

    def prefix_not_copied(
        self, sender: PeerKey, message: PrefixNotCopied, cause: str, now: float
    ) -> list[Effect]:
        """Let a prefill side know that the prefix which it waits for will not come."""
        record = self._book.requests.get(message.request_id)
        if record is not None and record.prefix_from != sender:
            return [ignored(message.request_id, cause, f"{sender[0]} was not to write a prefix")]
        facts: tuple[Fact, ...] = (("worker", sender[0]), ("reason", message.message))
        return [
            Note("prefix_not_copied", cause, message.request_id, facts),
            *self._book.step(message.request_id, machine.PrefixLost(), cause, now),
        ]

    def worker_gone(
        self, key: PeerKey, code: ErrorCode, reason: str, cause: str, now: float
    ) -> list[Effect]:
        """End every request that needed this worker.

        But a decode side that left in order holds nothing for requests whose decode has not
        started: those are to be placed again.
        """
        effects: list[Effect] = []
        for record in list(self._book.requests.values()):
            side = record.side_of(key)
            is_queued = record.phase is RequestPhase.PLACED and side == "decode"
            if is_queued and code is ErrorCode.SHUTTING_DOWN:
                event = machine.DecodeRefusedReceived()
                effects += self._book.step(record.request_id, event, cause, now)
            elif side == "target":
                gone = machine.MigrationTargetGone()
                effects += self._book.step(record.request_id, gone, cause, now)
            elif side == "asked":
                effects += self._book.step(record.request_id, machine.LookUpLost(), cause, now)
            elif side is not None:
                lost = machine.DecodeSideGone if side == "decode" else machine.PrefillSideGone
                effects += self._book.step(record.request_id, lost(code, reason), cause, now)
            if record.prefix_from == key and record.phase in WITH_PREFILL:
                effects += self._book.step(record.request_id, machine.PrefixLost(), cause, now)
        return effects

    def gateway_gone(self, key: PeerKey, reason: str, cause: str, now: float) -> list[Effect]:
        """Cancel every request that nobody listens to."""
        effects: list[Effect] = []
        for record in list(self._book.requests.values()):
            if record.gateway == key:
                event = machine.GatewayGone(reason)
                effects += self._book.step(record.request_id, event, cause, now)
        return effects

    def tick(self, cause: str, now: float) -> list[Effect]:
        """End what took too long."""
        limits = self._limits
        effects: list[Effect] = []
        for record in list(self._book.requests.values()):
            if record.cancelled_at is not None:
                if now - record.cancelled_at > CANCEL_REPORT_SECONDS:
                    event: RequestEvent = machine.CancelTimedOut()
                    effects += self._book.step(record.request_id, event, cause, now)
                continue
            timeout = limits.request_timeout_seconds
            if timeout and now - record.submitted_at > timeout:
                told = f"the request took over request_timeout_seconds = {timeout:g}"
                event = machine.DeadlinePassed(ErrorCode.DEADLINE_EXCEEDED, told)
                effects += self._book.step(record.request_id, event, cause, now)
            elif record.phase is RequestPhase.QUEUED and record.unserved_since is not None:
                if now - record.unserved_since > limits.no_worker_wait_seconds:
                    told = f"no worker could serve it within {limits.no_worker_wait_seconds:g} s"
                    event = machine.DeadlinePassed(ErrorCode.NO_WORKER, told)
                    effects += self._book.step(record.request_id, event, cause, now)
            elif record.phase is RequestPhase.MIGRATING and record.target_lost_at is not None:
                if now - record.target_lost_at > MOVE_REPORT_SECONDS:
                    told = "the worker that the decode moved to is gone, and perhaps took it along"
                    event = machine.DeadlinePassed(ErrorCode.WORKER_DIED, told)
                    effects += self._book.step(record.request_id, event, cause, now)
            elif record.phase is RequestPhase.WAITING and record.waiting_since is not None:
                late = self._waited_too_long(now - record.waiting_since)
                if late is not None:
                    effects += self._book.step(record.request_id, late, cause, now)
        return effects

    def _waited_too_long(self, seconds: float) -> machine.DeadlinePassed | None:
        """Judge how long a request has waited for a decode worker."""
        limits = self._limits
        if seconds > limits.room_wait_seconds:
            told = f"no decode worker had room within {limits.room_wait_seconds:g} s"
            return machine.DeadlinePassed(ErrorCode.NO_ROOM, told)
        has_one = self._members.num_able(Role.DECODE)
        if not has_one and seconds > limits.no_worker_wait_seconds:
            told = f"no decode worker was ready within {limits.no_worker_wait_seconds:g} s"
            return machine.DeadlinePassed(ErrorCode.NO_WORKER, told)
        return None

    def _reported(
        self, sender: PeerKey, request_id: RequestId, event: RequestEvent, cause: str, now: float
    ) -> list[Effect]:
        has_part = self._book.side_of(request_id, sender) in ("prefill", "decode")
        if request_id in self._book.requests and not has_part:
            return [ignored(request_id, cause, f"{sender[0]} has no part in it")]
        return self._book.step(request_id, event, cause, now)
