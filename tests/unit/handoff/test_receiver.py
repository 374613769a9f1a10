import pytest

from common.handoff.events import (
    Aborted,
    AbortedReceived,
    AbortReceived,
    CancelRequested,
    Ended,
    Failed,
    FreeBlocks,
    HandedOver,
    LeaseExpired,
    Outcome,
    PeerGone,
    ReceiverEffect,
    ReceiverEvent,
    ReleaseReceived,
    ReserveRepeated,
    SendAbort,
    SendAccepted,
    SendCommitRefused,
    SendReserved,
    StartDecode,
    StartVerify,
    Verified,
    VerifyFailed,
)
from common.handoff.receiver import HandoffReceiver, ReceiverPhase
from common.messages.handoff import AbortReason
from tests.support.handoff_stories import (
    CANCEL,
    CHECKSUMS,
    COMMIT,
    LEASE_DEADLINE,
    LOST,
    PEER_ABORT,
    RECEIVER,
)

BY_US = Aborted(AbortReason.CANCELLED, by_peer=False)
BY_PEER = Aborted(AbortReason.CANCELLED, by_peer=True)


def told(*events: ReceiverEvent) -> tuple[HandoffReceiver, list[ReceiverEffect]]:
    """Return the machine after these events, and the effects of the last one."""
    machine = RECEIVER.make()
    effects: list[ReceiverEffect] = []
    for event in events:
        effects = machine.handle(event)
    return machine, effects


def last(*events: ReceiverEvent) -> list[ReceiverEffect]:
    return told(*events)[1]


def freed(outcome: Outcome) -> list[ReceiverEffect]:
    return [FreeBlocks(), Ended(outcome)]


def test_a_commit_is_verified_before_anything_decodes() -> None:
    machine = RECEIVER.make()
    steps: list[tuple[ReceiverEvent, list[ReceiverEffect]]] = [
        (COMMIT, [StartVerify(CHECKSUMS)]),
        (Verified(), [SendAccepted(), StartDecode(COMMIT)]),
        (ReleaseReceived(), [Ended(HandedOver())]),
    ]
    for event, effects in steps:
        assert machine.handle(event) == effects, event


def test_a_repeated_reserve_is_answered_again_until_the_commit() -> None:
    assert last(ReserveRepeated()) == [SendReserved()]
    assert last(COMMIT, ReserveRepeated()) == []


def test_a_repeated_commit_of_an_accepted_transfer_is_answered_and_decodes_once() -> None:
    assert last(COMMIT, Verified(), COMMIT) == [SendAccepted()]


def test_a_damaged_block_is_asked_for_once_more() -> None:
    assert last(COMMIT, VerifyFailed(2)) == [SendCommitRefused(2)]
    again = last(COMMIT, VerifyFailed(2), COMMIT, Verified())
    assert again == [SendAccepted(), StartDecode(COMMIT)]


def test_a_second_damage_ends_the_handoff_and_frees_the_blocks() -> None:
    effects = last(COMMIT, VerifyFailed(2), COMMIT, VerifyFailed(3))
    failed = Failed("block 3 arrived damaged 2 times")
    assert effects == [SendAbort(AbortReason.CORRUPT), *freed(failed)]


# ---- ends in each phase --------------------------------------------------------------------------


def test_a_reservation_that_the_peer_aborts_is_freed_at_once() -> None:
    assert last(PEER_ABORT) == freed(BY_PEER)


def test_a_reservation_whose_peer_died_is_freed_at_once() -> None:
    assert last(LOST) == freed(PeerGone("died"))


def test_a_reservation_that_we_cancel_drains_until_the_peer_has_stopped_writing() -> None:
    machine, effects = told(CANCEL)
    assert effects == [SendAbort(AbortReason.CANCELLED)]
    assert machine.phase is ReceiverPhase.DRAINING
    assert machine.handle(AbortedReceived()) == freed(BY_US)


@pytest.mark.parametrize(
    "end", [AbortedReceived(), PEER_ABORT, LOST], ids=["aborted", "abort", "lost"]
)
def test_a_drain_ends_with_the_peers_word_or_death_and_keeps_its_first_reason(
    end: ReceiverEvent,
) -> None:
    assert last(CANCEL, end) == freed(BY_US)


@pytest.mark.parametrize(
    "event", [LeaseExpired(), CANCEL, ReserveRepeated()], ids=["lease", "cancel", "reserve"]
)
def test_nothing_else_ends_a_drain(event: ReceiverEvent) -> None:
    machine, effects = told(CANCEL, event)
    assert effects == []
    assert machine.phase is ReceiverPhase.DRAINING


def test_a_peer_that_commits_into_a_drain_missed_the_abort_and_is_told_again() -> None:
    shutting_down = CancelRequested(AbortReason.SHUTTING_DOWN)
    assert last(shutting_down, COMMIT) == [SendAbort(AbortReason.SHUTTING_DOWN)]
    assert last(LeaseExpired(), COMMIT) == [SendAbort(AbortReason.LEASE_EXPIRED)]


@pytest.mark.parametrize("end", [Verified(), VerifyFailed(1)], ids=["right", "wrong"])
def test_a_cancel_while_verifying_frees_when_the_verification_has_let_go(
    end: ReceiverEvent,
) -> None:
    machine, effects = told(COMMIT, CANCEL)
    assert effects == [SendAbort(AbortReason.CANCELLED)]
    assert machine.phase is ReceiverPhase.STOPPING
    assert machine.handle(AbortedReceived()) == []
    assert machine.handle(end) == freed(BY_US)


@pytest.mark.parametrize("end", [Verified(), VerifyFailed(1)], ids=["right", "wrong"])
def test_the_peers_abort_while_verifying_frees_when_the_verification_has_let_go(
    end: ReceiverEvent,
) -> None:
    assert last(COMMIT, PEER_ABORT) == []
    assert last(COMMIT, PEER_ABORT, end) == freed(BY_PEER)


def test_a_peer_that_dies_after_its_commit_is_not_needed() -> None:
    machine, effects = told(COMMIT, LOST, Verified())
    assert effects == [StartDecode(COMMIT), Ended(HandedOver())]
    assert machine.phase is ReceiverPhase.ENDED


def test_a_damaged_block_of_a_dead_peer_ends_the_handoff() -> None:
    effects = last(COMMIT, LOST, VerifyFailed(1))
    assert effects == freed(PeerGone("block 1 is damaged and its writer is gone"))


def test_an_accepted_request_is_not_touched_by_late_ends_of_its_handoff() -> None:
    for event in (CANCEL, PEER_ABORT, LeaseExpired()):
        machine, effects = told(COMMIT, Verified(), event)
        assert effects == [], event
        assert machine.phase is ReceiverPhase.ACCEPTED
    assert last(COMMIT, Verified(), LOST) == [Ended(HandedOver())]


# ---- leases --------------------------------------------------------------------------------------


def test_a_reservation_whose_lease_ran_out_drains_and_asks_the_peer_to_stop() -> None:
    machine = RECEIVER.make()
    assert machine.tick(LEASE_DEADLINE) == []
    assert machine.tick(LEASE_DEADLINE + 0.001) == [SendAbort(AbortReason.LEASE_EXPIRED)]
    assert machine.phase is ReceiverPhase.DRAINING
    assert machine.tick(LEASE_DEADLINE + 1) == []
    late = AbortReceived(AbortReason.CANCELLED)
    assert machine.handle(late) == freed(PeerGone("the prefill side did not renew its lease"))


def test_a_renewed_reservation_holds_longer() -> None:
    machine = RECEIVER.make()
    machine.renew(LEASE_DEADLINE + 10)
    assert machine.tick(LEASE_DEADLINE + 10) == []
    assert machine.tick(LEASE_DEADLINE + 11) != []


@pytest.mark.parametrize(
    "path", [(COMMIT,), (COMMIT, CANCEL), (CANCEL,), (COMMIT, Verified()), (LOST,)]
)
def test_only_a_reservation_can_run_out_of_its_lease(path: tuple[ReceiverEvent, ...]) -> None:
    machine, _ = told(*path)
    before = machine.phase
    assert machine.tick(LEASE_DEADLINE + 1000) == []
    assert machine.phase is before


def test_a_lease_that_ran_out_while_verifying_counts_once_a_block_is_damaged() -> None:
    machine, _ = told(COMMIT)
    assert machine.tick(LEASE_DEADLINE + 1) == []
    assert machine.handle(VerifyFailed(0)) == [SendCommitRefused(0)]
    assert machine.tick(LEASE_DEADLINE + 1) == [SendAbort(AbortReason.LEASE_EXPIRED)]
