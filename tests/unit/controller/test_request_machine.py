from typing import get_args

import pytest

from common.errors import ErrorCode, IllegalTransitionError, RemoteProtocolError
from common.handoff.machine import Ignored, Illegal, Legal, PeerFault
from common.ids import Epoch
from services.controller import request_machine as machine
from services.controller.effects import PeerKey
from services.controller.policy.views import RequestView
from services.controller.request_machine import REQUEST_TABLE, RequestEvent, RequestPhase
from services.controller.request_record import RequestRecord
from tests.unit.controller.cluster import submit

P: PeerKey = ("p0", Epoch(1))
D: PeerKey = ("d0", Epoch(1))
T: PeerKey = ("d1", Epoch(1))
G: PeerKey = ("g", Epoch(1))
VIEW = RequestView(num_prompt_tokens=64, num_blocks=2, block_size=64)
CODE = (ErrorCode.WORKER_DIED, "gone")

EVENTS: dict[str, RequestEvent] = {
    type(event).__name__: event
    for event in (
        machine.Submitted(),
        machine.LookUpStarted(P),
        machine.LookUpAnswered(3),
        machine.LookUpLost(),
        machine.Dispatched(P, D),
        machine.Requeued(),
        machine.PrefixLost(),
        machine.DecodeRefusedReceived(),
        machine.DecodePlaced(D),
        machine.DecodeStartedReceived(),
        machine.PrefillSideFinished(),
        machine.DecodeSideFinished(),
        machine.PrefillSideFailed(*CODE),
        machine.DecodeSideFailed(*CODE),
        machine.PrefillSideGone(*CODE),
        machine.DecodeSideGone(*CODE),
        machine.MigrationStarted(T),
        machine.MigrationLanded(),
        machine.MigrationFailedReceived(),
        machine.MigrationTargetGone(),
        machine.CancelReceived("left"),
        machine.ChoiceCancelReceived(0, "stop"),
        machine.GatewayGone("gone"),
        machine.DeadlinePassed(ErrorCode.NO_ROOM, "late"),
        machine.CancelTimedOut(),
    )
}
PATHS: dict[RequestPhase, tuple[str, ...]] = {
    RequestPhase.QUEUED: (),
    RequestPhase.LOOKING_UP: ("LookUpStarted",),
    RequestPhase.PLACED: ("Dispatched",),
    RequestPhase.WAITING: ("Dispatched", "DecodeRefusedReceived"),
    RequestPhase.DECODING: ("Dispatched", "DecodeStartedReceived"),
    RequestPhase.MIGRATING: ("Dispatched", "DecodeStartedReceived", "MigrationStarted"),
    RequestPhase.CANCELLING_PREFILL: ("Dispatched", "CancelReceived"),
    RequestPhase.CANCELLING_DECODE: (
        *("Dispatched", "DecodeStartedReceived", "MigrationStarted"),
        "CancelReceived",
    ),
}


def record_in(phase: RequestPhase) -> RequestRecord:
    record = RequestRecord(submit("r"), G, VIEW, (bytes(256),), 0.0)
    for name in PATHS[phase]:
        record.handle(EVENTS[name], "test", 0.0)
    assert record.phase is phase
    return record


def state_of(record: RequestRecord) -> dict[str, object]:
    return {key: repr(value) for key, value in vars(record).items() if key != "_story"}


def test_the_table_decides_every_cell_of_every_phase_and_event() -> None:
    names = {event.__name__ for event in get_args(RequestEvent)}
    assert names == set(EVENTS)
    assert set(REQUEST_TABLE) == {(phase, name) for phase in RequestPhase for name in names}


@pytest.mark.parametrize(
    "cell", [c for c in REQUEST_TABLE if c[0] != RequestPhase.UNKNOWN], ids=str
)
def test_a_record_does_in_each_cell_what_the_table_says(cell: tuple[RequestPhase, str]) -> None:
    phase, name = cell
    record = record_in(phase)
    before = state_of(record)
    match REQUEST_TABLE[cell]:
        case Legal(to):
            record.handle(EVENTS[name], "test", 1.0)
            assert record.phase in to
        case Ignored(reason):
            effects = record.handle(EVENTS[name], "test", 1.0)
            assert [effect.event for effect in effects] == ["event_ignored"]  # type: ignore[union-attr]  # one Note
            assert reason in str(effects)
            assert state_of(record) == before
        case PeerFault():
            with pytest.raises(RemoteProtocolError, match=name):
                record.handle(EVENTS[name], "test", 1.0)
            assert state_of(record) == before
        case Illegal():
            with pytest.raises(IllegalTransitionError, match=name):
                record.handle(EVENTS[name], "test", 1.0)
            assert state_of(record) == before


def test_an_illegal_event_carries_the_story_that_led_to_it() -> None:
    record = record_in(RequestPhase.DECODING)
    with pytest.raises(IllegalTransitionError) as caught:
        record.handle(EVENTS["DecodePlaced"], "test", 1.0)
    assert caught.value.story == ("queued:Dispatched", "placed:DecodeStartedReceived")


def test_a_combined_worker_is_the_side_that_owns_the_request() -> None:
    record = RequestRecord(submit("r"), G, VIEW, (bytes(256),), 0.0)
    assert record.side_of(P) is None
    record.handle(machine.Dispatched(P, P), "test", 0.0)
    assert record.side_of(P) == "prefill"
    record.handle(EVENTS["DecodeStartedReceived"], "test", 0.0)
    assert record.side_of(P) == "decode"
    assert record.side_of(D) is None


def test_what_was_found_stored_stays_known_and_the_worker_that_was_asked_is_out_of_it() -> None:
    record = record_in(RequestPhase.LOOKING_UP)
    assert record.side_of(P) == "asked"
    record.handle(machine.LookUpAnswered(3), "test", 0.0)
    assert (record.num_stored_blocks, record.side_of(P)) == (3, None)
    record.handle(machine.Dispatched(D, D), "test", 0.0)
    record.handle(machine.Requeued(), "test", 0.0)
    assert record.num_stored_blocks == 3
