"""Puts the tokens of one request in order: two workers send them, each on its own. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import RemoteProtocolError
from common.messages.tokens import TokenDelta as WireDelta
from common.sampling import FinishReason, SampledToken
from services.gateway.backend import PromptDone, TokenDelta

MAX_HELD_DELTAS = 4096
"""Deltas of one choice that may wait for an earlier one."""


@dataclass(slots=True)
class _Choice:
    emitted: list[int] = field(default_factory=list)
    """Ids of the tokens that have gone on."""
    held: dict[int, WireDelta] = field(default_factory=dict)
    is_finished: bool = False

    @property
    def num_emitted(self) -> int:
        return len(self.emitted)


class StreamOrder:
    """One request's deltas: repeats are dropped, gaps are waited for."""

    def __init__(self, num_choices: int) -> None:
        self._choices = [_Choice() for _ in range(num_choices)]
        self._is_prompt_done = False

    @property
    def is_finished(self) -> bool:
        """Whether every choice has finished."""
        return all(choice.is_finished for choice in self._choices)

    @property
    def has_gap(self) -> bool:
        """Whether tokens wait for earlier ones that have not come."""
        return any(choice.held and not choice.is_finished for choice in self._choices)

    def finish(self, index: int) -> None:
        """End a choice from this side: what still comes for it is dropped."""
        self._choices[index].is_finished = True

    def emitted(self, index: int) -> list[int]:
        """Return the token ids of a choice that have gone on."""
        return list(self._choices[index].emitted)

    def restart(self, indexes: Iterable[int]) -> list[int]:
        """Drop what waits in these choices, and return those that have not finished.

        They go on after what was emitted, by other workers.
        """
        for index in indexes:
            self._choices[index].held.clear()
        return [index for index in indexes if not self._choices[index].is_finished]

    def add(self, delta: WireDelta) -> list[PromptDone | TokenDelta]:
        """Take a delta and return what can go on now, in order.

        Raises RemoteProtocolError for a choice that was not asked for, or too wide a gap.
        """
        if delta.choice >= len(self._choices):
            raise RemoteProtocolError(f"choice {delta.choice} of {len(self._choices)}")
        events: list[PromptDone | TokenDelta] = []
        if delta.num_cached_tokens is not None and not self._is_prompt_done:
            self._is_prompt_done = True
            events.append(PromptDone(delta.num_cached_tokens))
        choice = self._choices[delta.choice]
        if choice.is_finished:
            return events
        choice.held[delta.index] = _longer(choice.held.get(delta.index), delta)
        if len(choice.held) > MAX_HELD_DELTAS:
            raise RemoteProtocolError(f"token {choice.num_emitted} never came")
        return events + _release(delta.choice, choice)


def _longer(first: WireDelta | None, second: WireDelta) -> WireDelta:
    if first is None or len(second.tokens) > len(first.tokens) or second.finish_reason is not None:
        return second
    return first


def _release(index: int, choice: _Choice) -> list[TokenDelta]:
    released: list[TokenDelta] = []
    tokens: list[SampledToken] = []
    reason: FinishReason | None = None
    while not choice.is_finished:
        fitting = [start for start in choice.held if start <= choice.num_emitted]
        if not fitting:
            break
        for start in sorted(fitting):
            delta = choice.held.pop(start)
            fresh = delta.tokens[max(0, choice.num_emitted - start) :]
            tokens += fresh
            choice.emitted += [token.token_id for token in fresh]
            at_end = start + len(delta.tokens) == choice.num_emitted
            if delta.finish_reason is not None and at_end:
                reason = delta.finish_reason
                choice.is_finished = True
                break
    if tokens or reason is not None:
        released.append(TokenDelta(index, tuple(tokens), reason))
    if choice.is_finished:
        choice.held.clear()
    return released
