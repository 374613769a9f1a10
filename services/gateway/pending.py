"""What has come for one request and was not taken yet. Pure.

A client that stops reading stops its answer from being written, and tokens go on to come: so
they are joined to one delta per choice, which ``max_tokens`` bounds, whatever their number.
"""

from collections.abc import Iterable

from common.errors import RequestError
from common.sampling import FinishReason, SampledToken
from services.gateway.backend import PromptDone, TokenDelta


class PendingEvents:
    """Holds at most one ``PromptDone``, one delta per choice and one error, in this order."""

    def __init__(self) -> None:
        self._prompt_done: PromptDone | None = None
        self._deltas: dict[int, TokenDelta | _Joined] = {}
        self._error: RequestError | None = None

    def add(self, events: Iterable[PromptDone | TokenDelta]) -> None:
        """Put events behind those that wait, each choice's in order."""
        for event in events:
            if isinstance(event, PromptDone):
                self._prompt_done = event
                continue
            waiting = self._deltas.get(event.choice)
            if waiting is None:
                self._deltas[event.choice] = event
                continue
            if isinstance(waiting, TokenDelta):
                waiting = self._deltas[event.choice] = _Joined(waiting)
            waiting.add(event)

    def fail(self, error: RequestError) -> None:
        """Put an error at the end."""
        self._error = error

    def pop(self) -> PromptDone | TokenDelta | None:
        """Return what is to be taken next, or None; raises the error when nothing is before it."""
        if self._prompt_done is not None:
            event, self._prompt_done = self._prompt_done, None
            return event
        if self._deltas:
            choice = next(iter(self._deltas))
            waiting = self._deltas.pop(choice)
            return waiting if isinstance(waiting, TokenDelta) else waiting.delta()
        if self._error is not None:
            raise self._error
        return None


class _Joined:
    """Deltas of one choice as they are joined."""

    def __init__(self, first: TokenDelta) -> None:
        self._choice = first.choice
        self._tokens: list[SampledToken] = list(first.tokens)
        self._finish_reason: FinishReason | None = first.finish_reason

    def add(self, delta: TokenDelta) -> None:
        self._tokens += delta.tokens
        self._finish_reason = delta.finish_reason

    def delta(self) -> TokenDelta:
        return TokenDelta(self._choice, tuple(self._tokens), self._finish_reason)
