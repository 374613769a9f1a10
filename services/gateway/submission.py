"""One request of the gateway in the cluster: its stream, its deadlines, and its resumes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Protocol

from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.messages.tokens import TokenDelta as WireDelta
from services.gateway.attempts import Attempt, Attempts
from services.gateway.backend import PromptDone, TokenDelta
from services.gateway.ordering import StreamOrder
from services.gateway.pending import PendingEvents

ANSWER_SECONDS = 10.0
"""How long the controller may take to place or refuse."""
SILENCE_SECONDS = 10.0
"""Controller and tokens both silent this long: nobody would tell us of a dead worker. Tokens that
are late by as much are lost: a broken connection is mended, and has sent what it kept, before."""
ORPHAN_SILENCE_SECONDS = 30.0
"""A request of an earlier controller without a token for this long is given up."""
RESUMED = (ErrorCode.WORKER_DIED, ErrorCode.SHUTTING_DOWN, ErrorCode.TRANSFER_FAILED)
"""What is no fault of the request: it goes on elsewhere."""
RESUME_SECONDS = 10.0
"""How long another worker is looked for."""
RESUME_RETRY_SECONDS = 0.2
POLL_SECONDS = 1.0
"""Time between two looks at the deadlines."""


class ClusterLink(Protocol):
    """What a submission asks of the channels that it shares with the others."""

    request_timeout_seconds: float
    """How long a request may take; 0 for ever."""
    max_resumes: int

    @property
    def controller_silence_seconds(self) -> float:
        """Time since the controller was last heard from."""
        ...

    def resume(
        self, submission: "ClusterSubmission", attempt: Attempt, error: RequestError
    ) -> None:
        """Hand a request in again that goes on where another one failed."""
        ...

    def cancel(self, request_id: RequestId, choice: int | None, reason: str) -> None:
        """Tell the controller that a request, or one choice of it, is no longer wanted."""
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drop a closed submission; what still comes for it is ignored."""
        ...


@dataclass(frozen=True, slots=True)
class _Loss:
    """Why choices go on elsewhere, and until when somebody must have taken them."""

    error: RequestError
    deadline: float


class ClusterSubmission:
    """One request in the cluster (see ``Submission``)."""

    def __init__(self, link: ClusterLink, attempts: Attempts) -> None:
        self.request_id = attempts.first.request_id
        self._link = link
        self._attempts = attempts
        self._num_resumed = 0
        self._order = StreamOrder(attempts.first.params.num_choices)
        self._pending = PendingEvents()
        self._arrived = asyncio.Event()
        self._placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_closed = False
        self._cancelled_choices: set[int] = set()
        self._heard_at = monotonic()
        self._gap_since: float | None = None
        self._ended_at: float | None = None
        self._is_orphan = False
        self._losses: dict[RequestId, _Loss] = {}
        self._finished: set[RequestId] = set()
        timeout = link.request_timeout_seconds
        self._deadline = monotonic() + timeout if timeout else None

    async def wait_placed(self) -> None:
        """Wait until the controller has placed the request; raises RequestError when refused."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._placed
        except TimeoutError:
            raise RequestError(
                ErrorCode.NO_WORKER,
                f"the controller did not answer within {ANSWER_SECONDS:g} s",
                retry_after_seconds=POLL_SECONDS,
            ) from None

    def placed(self) -> None:
        """The controller chose workers."""
        if not self._placed.done():
            self._placed.set_result(None)

    def refuse(self, error: RequestError) -> None:
        """Nobody has taken the request in."""
        if not self._placed.done():
            self._placed.set_exception(error)

    def take(self, delta: WireDelta) -> None:
        """Put a delta in order. Raises RemoteProtocolError when it cannot belong here."""
        self._heard_at = monotonic()
        self._pending.add(self._order.add(delta))
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

    def lost(self, request_id: RequestId, error: RequestError) -> None:
        """One of its requests failed: let its choices go on elsewhere, where that can be."""
        attempt = self._attempts.end(request_id)
        if attempt is None or self._is_closed or self._order.is_finished:
            return
        self._link.forget(request_id)
        may_resume = self._placed.done() and self._num_resumed < self._link.max_resumes
        if not may_resume or error.code not in RESUMED:
            self.fail(error)
            return
        self._num_resumed += 1
        self._go_on(self._order.restart(attempt.choices), error, monotonic() + RESUME_SECONDS)

    def refused(self, request_id: RequestId, error: RequestError) -> None:
        """Nobody takes one of its requests in."""
        loss = self._losses.pop(request_id, None)
        if loss is None:
            self.fail(error)
            return
        attempt = self._attempts.end(request_id)
        if attempt is None:
            return
        self._link.forget(request_id)
        if monotonic() > loss.deadline or self._is_closed:
            self.fail(loss.error)
            return
        choices = self._order.restart(attempt.choices)
        retry = partial(self._go_on, choices, loss.error, loss.deadline)
        asyncio.get_running_loop().call_later(RESUME_RETRY_SECONDS, retry)

    def _go_on(self, choices: Sequence[int], error: RequestError, deadline: float) -> None:
        choices = self._order.restart(choices)
        if self._is_closed or not choices:
            return
        self._gap_since = self._ended_at = None
        self._heard_at = monotonic()
        for attempt in self._attempts.go_on(choices, self._order.emitted):
            self._losses[attempt.request_id] = _Loss(error, deadline)
            self._link.resume(self, attempt, error)

    async def events(self) -> AsyncIterator[PromptDone | TokenDelta]:
        """Yield what happens until every choice has finished; raises ``RequestError``."""
        while True:
            while (event := self._pending.pop()) is not None:
                yield event
            if self._order.is_finished:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def orphan(self) -> None:
        """The controller that placed the request is gone; the new one does not know it."""
        self._is_orphan = True

    def ended(self, request_id: RequestId) -> None:
        """A request's worker has finished it; its last tokens are here or on their way."""
        self._finished.add(request_id)
        if all(attempt.request_id in self._finished for attempt in self._attempts.live):
            self._ended_at = monotonic()

    def check_deadlines(self, now: float) -> None:
        """Fail the request when its time is over, or when nobody would tell of its end."""
        if self._deadline is not None and now > self._deadline:
            message = f"not finished within {self._link.request_timeout_seconds:g} s"
            self.fail(RequestError(ErrorCode.DEADLINE_EXCEEDED, message))
            return
        if self._is_late(now):
            message = "tokens were lost on their way to the gateway"
            self.fail(RequestError(ErrorCode.TRANSFER_FAILED, message))
            return
        if self._is_orphan and now - self._heard_at > ORPHAN_SILENCE_SECONDS:
            message = "nothing was heard of the request since the controller was started anew"
            self.fail(RequestError(ErrorCode.WORKER_DIED, message))
            return
        silent = self._link.controller_silence_seconds
        if silent > SILENCE_SECONDS and now - self._heard_at > SILENCE_SECONDS:
            message = "neither the controller nor the request's worker has been heard from"
            self.fail(RequestError(ErrorCode.WORKER_DIED, message))

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
            if not self._order.is_finished:
                self._link.cancel(attempt.request_id, None, "client left or request failed")
            self._link.forget(attempt.request_id)
