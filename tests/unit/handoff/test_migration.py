"""A decode that leaves its worker: every cell of the table, and what each outcome leads to."""

from typing import get_args

import pytest

from common.errors import ErrorCode, IllegalTransitionError
from common.handoff.events import Aborted, Failed, HandedOver, Outcome, PeerGone, Refused
from common.handoff.machine import Ignored, Illegal, Legal
from common.handoff.migration import (
    MIGRATION_TABLE,
    BeginHandoff,
    CancelHere,
    DecodeStill,
    EndHere,
    GoOn,
    HandoffOver,
    LeavingDecode,
    LetGo,
    MigrationEffect,
    MigrationEvent,
    MigrationPhase,
    OrderRepeated,
    RequestOver,
)
from common.messages.handoff import AbortReason

OUTCOMES: tuple[Outcome, ...] = (
    HandedOver(),
    Refused(ErrorCode.NO_ROOM, "full"),
    Aborted(AbortReason.CANCELLED, by_peer=True),
    Aborted(AbortReason.CANCELLED, by_peer=False),
    Aborted(AbortReason.CORRUPT, by_peer=True),
    PeerGone("died"),
    Failed("no space"),
)
EXAMPLES: dict[str, tuple[MigrationEvent, ...]] = {
    "OrderRepeated": (OrderRepeated(),),
    "DecodeStill": (DecodeStill(),),
    "RequestOver": (RequestOver(),),
    "HandoffOver": tuple(HandoffOver(outcome) for outcome in OUTCOMES),
}
STILL, OVER, DONE = DecodeStill(), RequestOver(), HandoffOver(HandedOver())
PATHS: dict[MigrationPhase, tuple[tuple[MigrationEvent, ...], ...]] = {
    MigrationPhase.FREEZING: ((), (OrderRepeated(),)),
    MigrationPhase.MOVING: ((STILL,), (STILL, OrderRepeated())),
    MigrationPhase.STOPPING: ((STILL, OVER), (STILL, OVER, OVER)),
    MigrationPhase.ENDED: ((OVER,), (STILL, DONE), (STILL, OVER, DONE)),
}


def brought(path: tuple[MigrationEvent, ...]) -> LeavingDecode:
    machine = LeavingDecode()
    for event in path:
        machine.handle(event)
    return machine


def test_the_table_decides_every_event_in_every_phase_and_nothing_else() -> None:
    events = {event.__name__ for event in get_args(MigrationEvent)}
    assert set(EXAMPLES) == events
    assert set(MIGRATION_TABLE) == {(phase, name) for phase in MigrationPhase for name in events}


@pytest.mark.parametrize("cell", sorted(MIGRATION_TABLE), ids="-".join)
def test_a_cell_does_what_the_table_says(cell: tuple[MigrationPhase, str]) -> None:
    verdict = MIGRATION_TABLE[cell]
    reached = set()
    for path in PATHS[cell[0]]:
        for event in EXAMPLES[cell[1]]:
            machine = brought(path)
            assert machine.phase is cell[0]
            match verdict:
                case Legal():
                    machine.handle(event)
                    reached.add(machine.phase)
                case Ignored(reason):
                    assert len(reason) > 8
                    assert machine.handle(event) == []
                    assert machine.phase is cell[0]
                case Illegal():
                    with pytest.raises(IllegalTransitionError):
                        machine.handle(event)
                    assert machine.phase is cell[0]
                case _:
                    pytest.fail(f"no peer is talked to here: {verdict}")
    if isinstance(verdict, Legal):
        assert reached == set(verdict.to)


def test_a_still_decode_is_handed_over() -> None:
    assert LeavingDecode().handle(STILL) == [BeginHandoff()]


EFFECTS: tuple[MigrationEffect, ...] = (
    LetGo(),
    GoOn("no_room: full"),
    CancelHere(),
    GoOn("the handoff was ended: cancelled"),
    GoOn("the handoff was ended: corrupt"),
    GoOn("died"),
    GoOn("no space"),
)


@pytest.mark.parametrize(("outcome", "effect"), list(zip(OUTCOMES, EFFECTS, strict=True)))
def test_an_outcome_leads_to(outcome: Outcome, effect: MigrationEffect) -> None:
    assert brought((STILL,)).handle(HandoffOver(outcome)) == [effect]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=str)
def test_a_request_that_ended_meanwhile_ends_here_whatever_became_of_the_handoff(
    outcome: Outcome,
) -> None:
    assert brought((STILL, OVER)).handle(HandoffOver(outcome)) == [EndHere()]
