"""The worker that a running decode leaves: from the order to its end.

Theory of operation. The decode is frozen first: open steps end, and then nothing writes its blocks
any more. They are handed over like a prompt that was just prefilled, whose first token is the last
one drawn. An accepted handoff ends it here; any other outcome lets it go on here, unless it has
ended meanwhile. Who asked is told of every failure, but not where the request's own end is told.
"""

from dataclasses import dataclass
from enum import StrEnum

from common.handoff.events import Aborted, HandedOver, Outcome, PeerGone, Refused
from common.handoff.machine import Ignored, Illegal, Legal, Story, Table, decide
from common.messages.handoff import AbortReason


class MigrationPhase(StrEnum):
    """Where a decode that is to leave stands."""

    FREEZING = "freezing"
    MOVING = "moving"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class OrderRepeated:
    """The controller ordered the migration of this request again."""


@dataclass(frozen=True, slots=True)
class DecodeStill:
    """No step has the request any more."""


@dataclass(frozen=True, slots=True)
class RequestOver:
    """The request ended here: finished by a step that was open, cancelled or failed."""


@dataclass(frozen=True, slots=True)
class HandoffOver:
    """The handoff ended, and nothing reads the blocks any more."""

    outcome: Outcome


MigrationEvent = OrderRepeated | DecodeStill | RequestOver | HandoffOver


@dataclass(frozen=True, slots=True)
class BeginHandoff:
    """Hand the frozen request over."""


@dataclass(frozen=True, slots=True)
class LetGo:
    """The request is another worker's; let its blocks go here."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Decode here as before, and tell who ordered it why."""

    message: str


@dataclass(frozen=True, slots=True)
class EndHere:
    """The request ended while it was handed over: let its blocks go."""


@dataclass(frozen=True, slots=True)
class CancelHere:
    """The other worker heard of the request's cancellation first."""


MigrationEffect = BeginHandoff | LetGo | GoOn | EndHere | CancelHere

_P = MigrationPhase
_AGAIN = Ignored("it is under way")
_NO_HANDOFF = Illegal("no handoff was begun")
_TWICE = Illegal("it was still already")
_OVER = Ignored("the migration has ended")

MIGRATION_TABLE: Table = {
    (_P.FREEZING, "OrderRepeated"): _AGAIN,
    (_P.FREEZING, "DecodeStill"): Legal((_P.MOVING,)),
    (_P.FREEZING, "RequestOver"): Legal((_P.ENDED,)),
    (_P.FREEZING, "HandoffOver"): _NO_HANDOFF,
    (_P.MOVING, "OrderRepeated"): _AGAIN,
    (_P.MOVING, "DecodeStill"): _TWICE,
    (_P.MOVING, "RequestOver"): Legal((_P.STOPPING,)),
    (_P.MOVING, "HandoffOver"): Legal((_P.ENDED,)),
    (_P.STOPPING, "OrderRepeated"): Ignored("the request has ended"),
    (_P.STOPPING, "DecodeStill"): _TWICE,
    (_P.STOPPING, "RequestOver"): Ignored("it has ended already"),
    (_P.STOPPING, "HandoffOver"): Legal((_P.ENDED,)),
    (_P.ENDED, "OrderRepeated"): _OVER,
    (_P.ENDED, "DecodeStill"): _OVER,
    (_P.ENDED, "RequestOver"): _OVER,
    (_P.ENDED, "HandoffOver"): _OVER,
}


class LeavingDecode:
    """One migration at the worker that the decode leaves; the freeze was asked for when made."""

    def __init__(self) -> None:
        self.phase = MigrationPhase.FREEZING
        self._story = Story()

    def handle(self, event: MigrationEvent) -> list[MigrationEffect]:
        """Take one event and return what to do. The only mutator.

        Raises IllegalTransitionError, with nothing changed.
        """
        name = type(event).__name__
        verdict = decide(MIGRATION_TABLE, "leaving decode", self.phase, name, self._story)
        self._story.add(self.phase, name)
        return [] if isinstance(verdict, Ignored) else self._apply(event)

    def _apply(self, event: MigrationEvent) -> list[MigrationEffect]:
        match event:
            case OrderRepeated():
                return []
            case DecodeStill():
                self.phase = MigrationPhase.MOVING
                return [BeginHandoff()]
            case RequestOver():
                is_moving = self.phase is MigrationPhase.MOVING
                self.phase = MigrationPhase.STOPPING if is_moving else MigrationPhase.ENDED
                return []
            case HandoffOver(outcome):
                is_over = self.phase is MigrationPhase.STOPPING
                self.phase = MigrationPhase.ENDED
                return [EndHere() if is_over else _consequence(outcome)]


def _consequence(outcome: Outcome) -> MigrationEffect:
    match outcome:
        case HandedOver():
            return LetGo()
        case Aborted(AbortReason.CANCELLED, by_peer=True):
            return CancelHere()
        case Refused(code, message):
            return GoOn(f"{code}: {message}")
        case PeerGone(reason):
            return GoOn(reason)
        case Aborted(reason, _):
            return GoOn(f"the handoff was ended: {reason}")
        case _:
            return GoOn(outcome.message)
