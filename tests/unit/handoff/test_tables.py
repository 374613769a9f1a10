"""Every cell of both tables: what it says is what the machine does."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, get_args

import pytest

from common.errors import IllegalTransitionError, ProtocolError, RemoteProtocolError
from common.handoff import events
from common.handoff.machine import Ignored, Illegal, Legal, PeerFault, Table
from common.handoff.receiver import RECEIVER_TABLE, HandoffReceiver, ReceiverPhase
from common.handoff.sender import SENDER_TABLE, HandoffSender, SenderPhase
from tests.support.handoff_stories import RECEIVER, SENDER, Stories, written

AnyStories = Stories[Any, Any, Any]  # Any: both machines are walked by the same code
Cell = tuple[StrEnum, str]
SIDES: Mapping[str, tuple[AnyStories, Table, type[StrEnum], Any]] = {
    "sender": (SENDER, SENDER_TABLE, SenderPhase, events.SenderEvent),
    "receiver": (RECEIVER, RECEIVER_TABLE, ReceiverPhase, events.ReceiverEvent),
}
CELLS = [(side, cell) for side in SIDES for cell in sorted(SIDES[side][1])]
cells = pytest.mark.parametrize(
    ("side", "cell"), CELLS, ids=[f"{side}-{cell[0]}-{cell[1]}" for side, cell in CELLS]
)


def names(union: Any) -> set[str]:
    return {event.__name__ for event in get_args(union)}


def brought(stories: AnyStories, path: tuple[Any, ...]) -> HandoffSender | HandoffReceiver:
    machine: HandoffSender | HandoffReceiver = stories.make()
    for event in path:
        machine.handle(event)
    return machine


def state(machine: HandoffSender | HandoffReceiver) -> dict[str, object]:
    """Everything but the story."""
    parts = {name: value for name, value in vars(machine).items() if name != "_story"}
    return {name: list(v) if isinstance(v, list) else v for name, v in parts.items()}


def examples(stories: AnyStories, machine: HandoffSender | HandoffReceiver, name: str) -> list[Any]:
    if name == "WriteFinished" and isinstance(machine, HandoffSender) and machine._num_in_flight:
        return [written(machine._num_written, machine._num_in_flight)]
    return [event for event in stories.examples if type(event).__name__ == name]


def trials(side: str, cell: Cell) -> list[tuple[HandoffSender | HandoffReceiver, Any]]:
    """A fresh machine in the cell's phase for each path and each example of its event."""
    stories = SIDES[side][0]
    found = [
        (brought(stories, path), event)
        for path in stories.paths[cell[0]]
        for event in examples(stories, brought(stories, path), cell[1])
    ]
    assert found, "each event type has an example"
    return found


@pytest.mark.parametrize("side", SIDES)
def test_a_table_decides_every_event_in_every_phase_and_nothing_else(side: str) -> None:
    _, table, phases, union = SIDES[side]
    assert set(table) == {(phase, name) for phase in phases for name in names(union)}


@pytest.mark.parametrize("side", SIDES)
def test_a_verdict_other_than_legal_gives_its_reason(side: str) -> None:
    for cell, verdict in SIDES[side][1].items():
        if isinstance(verdict, Legal):
            assert verdict.to, cell
        else:
            assert len(verdict.reason) > 8, cell


@pytest.mark.parametrize("side", SIDES)
def test_each_script_ends_in_the_phase_that_it_is_for(side: str) -> None:
    stories, _, phases, _ = SIDES[side]
    assert set(stories.paths) == set(phases)
    for phase, paths in stories.paths.items():
        for path in paths:
            assert brought(stories, path).phase is phase, path


@cells
def test_a_cell_does_what_the_table_says(side: str, cell: Cell) -> None:
    verdict = SIDES[side][1][cell]
    reached: set[StrEnum] = set()
    for machine, event in trials(side, cell):
        before = state(machine)
        match verdict:
            case Legal():
                machine.handle(event)
                machine.validate()
                reached.add(machine.phase)
                continue
            case Ignored():
                assert machine.handle(event) == []
            case PeerFault(reason):
                with pytest.raises(RemoteProtocolError, match=f"{cell[1]} in phase .*{reason}"):
                    machine.handle(event)
            case Illegal():
                with pytest.raises(IllegalTransitionError) as refused:
                    machine.handle(event)
                assert (refused.value.phase, refused.value.event) == cell
                assert refused.value.story == machine._story.told()
        assert state(machine) == before, "the event changed something"
    if isinstance(verdict, Legal):
        assert reached == set(verdict.to), "the table and the machine name the same phases"


@pytest.mark.parametrize("side", SIDES)
def test_an_ended_machine_stays_ended_and_wants_nothing_whatever_comes(side: str) -> None:
    stories, _, _, _ = SIDES[side]
    for path in next(paths for phase, paths in stories.paths.items() if phase == "ended"):
        machine = brought(stories, path)
        for event in stories.examples:
            try:
                assert machine.handle(event) == []
            except ProtocolError:
                continue
        assert machine.phase == "ended"


def test_a_story_tells_the_last_events_of_an_illegal_one_oldest_first() -> None:
    machine = HandoffSender(4, 0.0)
    machine.handle(events.BlocksComputed(1))
    machine.handle(events.ReservedReceived((1, 2, 3, 4), 0))
    machine.handle(events.WriteFinished((5,)))
    with pytest.raises(
        IllegalTransitionError, match="WriteFinished is illegal in phase ready"
    ) as e:
        machine.handle(events.WriteFinished((5,)))
    assert e.value.story == (
        "reserving:BlocksComputed",
        "reserving:ReservedReceived",
        "writing:WriteFinished",
    )


def test_a_story_is_bounded() -> None:
    machine = HandoffSender(4, 0.0)
    for _ in range(1000):
        machine.handle(events.BlocksComputed(0))
    assert len(machine._story.told()) == 32
