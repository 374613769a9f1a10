"""What a transition table is made of. Every (phase, event) cell of a machine is decided."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from common.errors import IllegalTransitionError, RemoteProtocolError

STORY_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Legal:
    """The event is expected here; the machine goes on in one of these phases."""

    to: tuple[StrEnum, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """The event may come here and means nothing any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerFault:
    """Only a peer that breaks the protocol sends this here; nothing changes."""

    reason: str


@dataclass(frozen=True, slots=True)
class Illegal:
    """Only a bug of ours brings this event here; nothing changes."""

    reason: str


Verdict = Legal | Ignored | PeerFault | Illegal
Table = Mapping[tuple[StrEnum, str], Verdict]
"""(phase, event class name) → verdict."""


class Story:
    """The last events of one machine, for the error that somebody has to understand."""

    def __init__(self) -> None:
        self._events: deque[str] = deque(maxlen=STORY_LENGTH)

    def add(self, phase: StrEnum, event: str) -> None:
        """Note an event that was handled in a phase."""
        self._events.append(f"{phase}:{event}")

    def told(self) -> tuple[str, ...]:
        """Return the events, oldest first."""
        return tuple(self._events)


def decide(table: Table, machine: str, phase: StrEnum, event: str, story: Story) -> Legal | Ignored:
    """Look a cell up.

    Raises IllegalTransitionError for our own fault and RemoteProtocolError for the peer's; in both
    cases nothing has changed.
    """
    verdict = table[phase, event]
    match verdict:
        case Legal() | Ignored():
            return verdict
        case PeerFault(reason):
            raise RemoteProtocolError(f"{machine}: {event} in phase {phase}: {reason}")
        case Illegal():
            raise IllegalTransitionError(machine, phase, event, story.told())
