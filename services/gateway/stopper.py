"""Stop strings, matched on text whatever the borders of tokens and deltas.

Each stop string has its own Knuth-Morris-Pratt automaton, so that a character costs O(number of
stop strings) and nothing is scanned twice. The text that may still become a match is exactly the
longest prefix that any automaton has matched: that much is held back, and no more.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStep:
    """``text`` may leave; ``is_matched`` says that a stop string is complete and trimmed off."""

    text: str
    is_matched: bool


class Stopper:
    """Watches one choice's text. Pure: the result does not depend on how the text is cut.

    The match that completes first wins; of several that complete at the same character the
    longest one does, so that nothing of any of them is left in the text.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = tuple(_failure_function(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> StopStep:
        """Take more text. After a match, feed nothing more."""
        if not self._stops:
            return StopStep(text, is_matched=False)
        pending = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            completed = self._advance(char)
            if completed:
                self._held = ""
                return StopStep(pending[: position - completed], is_matched=True)
        num_held = max(self._matched)
        border = len(pending) - num_held
        self._held = pending[border:]
        return StopStep(pending[:border], is_matched=False)

    def flush(self) -> str:
        """Return the text held back, at the end of the choice."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> int:
        """Move every automaton by one character; return the longest completed length, or 0."""
        completed = 0
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            fallback = self._fallbacks[index]
            while matched and stop[matched] != char:
                matched = fallback[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                completed = max(completed, matched)
        return completed


def _failure_function(pattern: str) -> tuple[int, ...]:
    """Return, per prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = table[matched - 1]
        if pattern[matched] == pattern[index]:
            matched += 1
        table[index] = matched
    return tuple(table)
