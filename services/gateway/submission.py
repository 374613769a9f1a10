"""One request of the gateway in the cluster: its stream, its deadlines, and its resumes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Protocol

from common.errors import ErrorCode, RequestError
from common.ids import GatewayId, RequestId
from common.messages.fields import PhaseRecord
from common.messages.tokens import TokenDelta as WireDelta
from services.gateway.attempts import Attempt, Attempts
from services.gateway.backend import PromptDone, TokenDelta
from services.gateway.ledger import PhaseLedger
from services.gateway.ordering import StreamOrder
from services.gateway.pending import PendingEvents
from services.gateway.whereabouts import Incarnation, Whereabouts

ANSWER_SECONDS = 10.0
"""How long the controller may take to queue, place or refuse."""
SILENCE_SECONDS = 10.0
"""Controller and tokens both silent this long: nobody would tell us of a dead worker. Tokens that
are late by as much are lost: a broken connection is mended, and has sent what it kept, before."""
ORPHAN_SILENCE_SECONDS = 30.0
"""A request of an earlier controller without a token for this long is given up."""
RESUMED = (
    *(ErrorCode.WORKER_DIED, ErrorCode.SHUTTING_DOWN, ErrorCode.TRANSFER_FAILED),
    ErrorCode.NO_WORKER,
)
"""What is no fault of the request, once it was taken in: it goes on elsewhere."""
RETRIED = (*RESUMED, ErrorCode.QUEUE_FULL, ErrorCode.NO_ROOM)
"""Refusals of a request that goes on which may be other ones a moment later."""
RESUME_SECONDS = 30.0
"""How long another worker is looked for: the only one of its role must start anew first."""
RESUME_RETRY_SECONDS = 0.2
POLL_SECONDS = 1.0
"""Time between two looks at the deadlines."""


class ClusterLink(Protocol):
    """What a submission asks of the channels that it shares with the others."""

    request_timeout_seconds: float
    """How long a request may take; 0 for ever."""
    gateway_id: GatewayId
    max_resumes: int
    """How often what loses its workers is placed again, to go on elsewhere."""

    @property
    def controller_silence_seconds(self) -> float:
        """Time since the controller was last heard from."""
        ...

    def readiness(self) -> tuple[bool, str]:
        """Whether requests can be served now, and the reason when they cannot."""
        ...

    @property
    def living_workers(self) -> frozenset[Incarnation] | None:
        """The workers that live; None while that is not known."""
        ...

    def adopt(self, owner: "ClusterSubmission", attempt: Attempt, error: RequestError) -> None:
        """Give what comes for an attempt, which goes on after an error, to its owner."""
        ...

    def send(self, attempt: Attempt) -> bool:
        """Hand an attempt in; False when the controller takes no messages."""
        ...

    def cancel(self, request_id: RequestId, choice: int | None, reason: str) -> None:
        """Tell the controller that a request, or one choice of it, is no longer wanted."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that has ended; what was under way for it is ignored."""
        ...


@dataclass(slots=True)
class _Loss:
    """Why an attempt was made that nobody has taken in yet.

    It fails with ``error`` when nobody has by ``deadline``. ``is_asked`` while the controller owes
    an answer, ``is_waiting`` while a timer is to ask it; never both.
    """

    error: RequestError
    deadline: float
    is_asked: bool = False
    is_waiting: bool = False


class ClusterSubmission:
    """One request in the cluster (see ``Submission``)."""

    def __init__(self, link: ClusterLink, attempts: Attempts) -> None:
        self.request_id = attempts.first.request_id
        self._link = link
        self._attempts = attempts
        self._order = StreamOrder(attempts.first.params.num_choices)
        self._pending = PendingEvents()
        self._ledger = PhaseLedger(link.gateway_id, monotonic())
        self._arrived = asyncio.Event()
        self._taken_in: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_closed = False
        self._cancelled_choices: set[int] = set()
        self._heard_at = monotonic()
        self._gap_since: float | None = None
        self._ended_at: float | None = None
        self._whereabouts = Whereabouts()
        self._orphans: set[RequestId] = set()
        self._losses: dict[RequestId, _Loss] = {}
        self._placed: set[RequestId] = set()
        self._successors: set[RequestId] = set()
        self._finished: set[RequestId] = set()
        timeout = link.request_timeout_seconds
        self._deadline = monotonic() + timeout if timeout else None

    @property
    def phases(self) -> tuple[PhaseRecord, ...]:
        """Where its time went, as far as that was told."""
        return self._ledger.records

    def hold(self) -> None:
        """Hand the request in once the controller knows this gateway; nobody was asked yet."""
        message = f"no controller took the request in within {ANSWER_SECONDS:g} s"
        error = RequestError(ErrorCode.NO_WORKER, message, retry_after_seconds=POLL_SECONDS)
        self._seek(self._attempts.first, _Loss(error, monotonic() + ANSWER_SECONDS))

    async def wait_taken_in(self) -> None:
        """Wait until the controller has queued or placed the request.

        Raises ``RequestError`` when it is refused. How long it is queued then has no bound here.
        """
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._taken_in
        except TimeoutError:
            raise RequestError(
                ErrorCode.NO_WORKER,
                f"the controller did not answer within {ANSWER_SECONDS:g} s",
                retry_after_seconds=POLL_SECONDS,
            ) from None

    def queued(self, request_id: RequestId) -> None:
        """The controller will choose workers for one of its requests."""
        self._losses.pop(request_id, None)
        self._ledger.taken_in(monotonic())
        if not self._taken_in.done():
            self._taken_in.set_result(None)

    def placed(
        self, request_id: RequestId, prefill: Incarnation | None, decode: Incarnation | None
    ) -> None:
        """The controller chose workers for one of its requests; None for one not known."""
        self.queued(request_id)
        self._placed.add(request_id)
        self._whereabouts.placed(request_id, prefill, decode, monotonic())

    def refuse(self, error: RequestError) -> None:
        """Nobody has taken the request in."""
        if not self._taken_in.done():
            self._taken_in.set_exception(error)

    def take(self, delta: WireDelta, sender: Incarnation) -> None:
        """Put a delta in order. Raises RemoteProtocolError when it cannot belong here."""
        self._heard_at = monotonic()
        if delta.request_id not in self._placed:
            self.queued(delta.request_id)  # the word of it may be lost with its controller
            self._placed.add(delta.request_id)
        self._whereabouts.heard(delta.request_id, sender, self._heard_at)
        self._pending.add(self._order.add(delta))
        if delta.request_id in self._successors:
            self._successors.clear()
            self._ledger.went_on(self._heard_at)
        self._ledger.add(delta.phases)
        if not self._order.has_gap:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = self._heard_at
        self._arrived.set()

    def fail(self, error: RequestError) -> None:
        """End with an error, after what has come so far."""
        self.refuse(error)
        if not self._is_closed and not self._order.is_finished:
            self._pending.fail(error)
            self._arrived.set()

    # ---- going on elsewhere ----------------------------------------------------------------------

    def lost(self, request_id: RequestId, error: RequestError) -> None:
        """One of its requests is over, everywhere: let its choices go on elsewhere.

        Where they cannot, the submission fails.
        """
        attempt = self._end(request_id)
        if attempt is None or self._is_closed or self._order.is_finished:
            return
        may_resume = self._taken_in.done() and attempt.num_resumes < self._link.max_resumes
        if not may_resume or error.code not in RESUMED:
            self.fail(error)
            return
        self._go_on(attempt, _Loss(error, monotonic() + RESUME_SECONDS), attempt.num_resumes + 1)

    def give_up(self, request_id: RequestId, error: RequestError) -> None:
        """End one of its requests, which some worker may still have; else like ``lost``."""
        if self._attempts.find(request_id) is not None:
            self._link.cancel(request_id, None, error.message)
            self.lost(request_id, error)

    def failed(self, request_id: RequestId, error: RequestError) -> None:
        """One of its requests failed. The controller has ended it everywhere, if it knows it."""
        if request_id in self._orphans:
            self.give_up(request_id, error)
        else:
            self.lost(request_id, error)

    def refused(self, request_id: RequestId, error: RequestError) -> None:
        """Nobody takes one of its requests in now.

        It may have been placed before, on a worker that was not reached.
        """
        loss = self._losses.get(request_id)
        if loss is None:
            self.lost(request_id, error)
            return
        attempt = self._attempts.find(request_id)
        if attempt is None or not loss.is_asked:
            return
        if error.code not in RETRIED:
            self.fail(error)
            return
        self._ask_later(attempt, loss)

    def orphan(self, error: RequestError) -> None:
        """The controller is gone; the new one does not know the request.

        What its workers have goes on; what waited in the controller's queue was lost with it.
        """
        for attempt in self._attempts.live:
            request_id = attempt.request_id
            if self._hand_in_anew(attempt, error):
                continue
            if request_id in self._placed:
                self._orphans.add(request_id)
                self._whereabouts.orphaned(request_id, monotonic())
            else:
                self.give_up(request_id, error)

    def fenced(self, error: RequestError) -> None:
        """The controller took the gateway for dead, and cancelled what it had placed for it.

        What an earlier controller placed goes on.
        """
        for attempt in self._attempts.live:
            if attempt.request_id in self._orphans or self._hand_in_anew(attempt, error):
                continue
            self.lost(attempt.request_id, error)

    def _hand_in_anew(self, attempt: Attempt, error: RequestError) -> bool:
        """Whether nobody has taken an attempt in, as far as we know.

        One that was handed in all the same is replaced: a worker may have it without our knowing,
        and would not take its id again.
        """
        loss = self._losses.get(attempt.request_id)
        if loss is None and not self._taken_in.done():
            loss = _Loss(error, monotonic() + ANSWER_SECONDS, is_asked=True)
        if loss is None:
            return False
        if loss.is_asked:
            self._link.cancel(attempt.request_id, None, error.message)
            self._end(attempt.request_id)
            self._go_on(attempt, _Loss(loss.error, loss.deadline), attempt.num_resumes)
        return True

    def _end(self, request_id: RequestId) -> Attempt | None:
        """Forget all of an attempt; None for one that was not under way."""
        attempt = self._attempts.end(request_id)
        if attempt is not None:
            self._link.forget(request_id)
            self._losses.pop(request_id, None)
            self._whereabouts.forget(request_id)
            for ids in (self._orphans, self._placed, self._successors, self._finished):
                ids.discard(request_id)
        return attempt

    def _go_on(self, attempt: Attempt, loss: _Loss, num_resumes: int) -> None:
        """Make the requests that go on with what is left of an attempt's choices."""
        choices = self._order.restart(attempt.choices)
        if not choices:
            return
        self._gap_since = self._ended_at = None
        self._ledger.lost(monotonic())
        made = self._attempts.go_on(choices, self._order.emitted, num_resumes)
        for successor in made:
            self._successors.add(successor.request_id)
            self._link.adopt(self, successor, loss.error)
            self._seek(successor, _Loss(loss.error, loss.deadline))

    def _seek(self, attempt: Attempt, loss: _Loss) -> None:
        self._losses[attempt.request_id] = loss
        self._ask(attempt)

    def _ask(self, attempt: Attempt) -> None:
        loss = self._losses.get(attempt.request_id)
        if loss is None or loss.is_asked or self._is_closed:
            return
        loss.is_waiting = False
        now = self._heard_at = monotonic()
        if now > loss.deadline:
            self.fail(loss.error)
            return
        # While the controller would refuse it, or is gone, it is not asked.
        loss.is_asked = self._link.readiness()[0] and self._link.send(attempt)
        if not loss.is_asked:
            self._ask_later(attempt, loss)

    def _ask_later(self, attempt: Attempt, loss: _Loss) -> None:
        loss.is_asked = False
        if not loss.is_waiting:
            loss.is_waiting = True
            loop = asyncio.get_running_loop()
            loop.call_later(RESUME_RETRY_SECONDS, partial(self._ask, attempt))

    # ---- the stream ------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[PromptDone | TokenDelta]:
        """Yield what happens until every choice has finished; raises ``RequestError``."""
        while True:
            while (event := self._pending.pop()) is not None:
                yield event
            if self._order.is_finished:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def ended(self, request_id: RequestId) -> None:
        """A request's worker has finished it; its last tokens are here or on their way."""
        self._finished.add(request_id)
        if all(attempt.request_id in self._finished for attempt in self._attempts.live):
            self._ended_at = monotonic()

    def check_deadlines(self, now: float) -> None:
        """Fail the request when its time is over; give up workers that nobody would tell of."""
        if self._deadline is not None and now > self._deadline:
            message = f"not finished within {self._link.request_timeout_seconds:g} s"
            self.fail(RequestError(ErrorCode.DEADLINE_EXCEEDED, message))
            return
        over = [loss.error for loss in self._losses.values() if now > loss.deadline]
        if over:
            self.fail(over[0])
            return
        if self._order.is_finished:
            return
        for attempt in self._attempts.live:
            is_placed = attempt.request_id not in self._losses
            error = self._trouble(attempt, now) if is_placed else None
            if error is not None:
                self.give_up(attempt.request_id, error)

    def _trouble(self, attempt: Attempt, now: float) -> RequestError | None:
        """Return why the workers of an attempt are to be given up, if so."""
        if self._is_late(now):
            message = "tokens were lost on their way to the gateway"
            return RequestError(ErrorCode.TRANSFER_FAILED, message)
        if attempt.request_id in self._orphans:
            told = self._trouble_of_orphan(attempt.request_id, now)
            if told is not None:
                return RequestError(ErrorCode.WORKER_DIED, told)
        silent = self._link.controller_silence_seconds
        if silent > SILENCE_SECONDS and now - self._heard_at > SILENCE_SECONDS:
            message = "neither the controller nor the request's worker has been heard from"
            return RequestError(ErrorCode.WORKER_DIED, message)
        return None

    def _trouble_of_orphan(self, request_id: RequestId, now: float) -> str | None:
        """Return what tells, without its controller, that a request will not go on."""
        quiet_seconds = self._whereabouts.quiet_seconds(request_id, now)
        if quiet_seconds > ORPHAN_SILENCE_SECONDS:
            return "nothing was heard of the request since the controller was started anew"
        living = self._link.living_workers
        if living is None or quiet_seconds < POLL_SECONDS:
            return None
        gone = self._whereabouts.gone(request_id, living)
        return None if gone is None else f"worker {gone} died while there was no controller"

    def _is_late(self, now: float) -> bool:
        """Whether tokens are missing that must have been sent long ago."""
        if self._gap_since is not None and now - self._gap_since > SILENCE_SECONDS:
            return True
        if self._ended_at is None:
            return False
        return now - max(self._ended_at, self._heard_at) > SILENCE_SECONDS

    async def cancel_choice(self, choice: int) -> None:
        """End one choice, because a stop string matched. Idempotent."""
        if choice in self._cancelled_choices or self._is_closed:
            return
        self._cancelled_choices.add(choice)
        is_live = not self._order.is_finished
        self._order.finish(choice)
        self._arrived.set()
        attempt = self._attempts.serving(choice)
        if is_live and attempt is not None:
            whole = len(attempt.choices) == 1 and attempt is not self._attempts.first
            self._link.cancel(attempt.request_id, None if whole else choice, "stop string")

    async def aclose(self) -> None:
        """Cancel what is left and free it. Idempotent, and called for every submission."""
        if self._is_closed:
            return
        self._is_closed = True
        for attempt in self._attempts.live:
            loss = self._losses.get(attempt.request_id)
            is_known = loss is None or loss.is_asked
            if is_known and not self._order.is_finished:
                self._link.cancel(attempt.request_id, None, "client left or request failed")
            self._link.forget(attempt.request_id)
