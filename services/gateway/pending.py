"""What has come for one request and was not taken yet. Pure.

A client that stops reading stops its answer from being written, and tokens go on to come: so
they are joined to one delta per choice, which ``max_tokens`` bounds, whatever their number. They
leave a bounded number at a time, so that a client that comes back holds nobody up.
"""

from collections.abc import Iterable

from common.errors import RequestError
from common.sampling import FinishReason, SampledToken
from services.gateway.backend import PromptDone, TokenDelta

MAX_TOKENS_AT_ONCE = 256
"""Tokens of one joined delta."""


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
            done, self._prompt_done = self._prompt_done, None
            return done
        if self._deltas:
            choice = next(iter(self._deltas))
            waiting = self._deltas.pop(choice)
            if isinstance(waiting, TokenDelta):
                return waiting
            event = waiting.take()
            if not waiting.is_empty:
                self._deltas[choice] = waiting  # behind the other choices
            return event
        if self._error is not None:
            raise self._error
        return None


class _Joined:
    """Deltas of one choice as they are joined."""

    def __init__(self, first: TokenDelta) -> None:
        self._choice = first.choice
        self._tokens: list[SampledToken] = list(first.tokens)
        self._finish_reason: FinishReason | None = first.finish_reason
        self._num_taken = 0

    def add(self, delta: TokenDelta) -> None:
        self._tokens += delta.tokens
        self._finish_reason = delta.finish_reason

    @property
    def is_empty(self) -> bool:
        return self._num_taken == len(self._tokens)

    def take(self) -> TokenDelta:
        """Return the next tokens; the finish reason comes with the last ones."""
        first, self._num_taken = self._num_taken, self._num_taken + MAX_TOKENS_AT_ONCE
        self._num_taken = min(self._num_taken, len(self._tokens))
        tokens = tuple(self._tokens[first : self._num_taken])
        return TokenDelta(self._choice, tokens, self._finish_reason if self.is_empty else None)
