import pytest

from common.errors import ErrorCode
from common.handoff.events import (
    Aborted,
    AbortReceived,
    AcceptedReceived,
    BlocksComputed,
    CancelRequested,
    CommitRefusedReceived,
    Ended,
    Failed,
    HandedOver,
    LeaseExpired,
    PeerGone,
    PeerLost,
    Refused,
    ReservedReceived,
    ReserveRefusedReceived,
    SendAbort,
    SendAborted,
    SendCommit,
    SenderEffect,
    SenderEvent,
    SendRelease,
    StartWrite,
    WriteFailed,
    WriteFinished,
)
from common.handoff.sender import MAX_UNANSWERED_RENEWALS, HandoffSender, SenderPhase
from common.messages.handoff import AbortReason
from tests.support.handoff_stories import (
    CANCEL,
    CHECKSUMS,
    FINISHED,
    LEASE_DEADLINE,
    LOST,
    PEER_ABORT,
    RESERVED,
    SENDER,
    TARGETS,
    written,
)


def told(*events: SenderEvent) -> tuple[HandoffSender, list[SenderEffect]]:
    """Return the machine after these events, and the effects of the last one."""
    machine = SENDER.make()
    effects: list[SenderEffect] = []
    for event in events:
        effects = machine.handle(event)
    return machine, effects


def last(*events: SenderEvent) -> list[SenderEffect]:
    return told(*events)[1]


ALL_WRITTEN = (FINISHED, RESERVED, written(0, 4))


def test_chunks_are_written_while_the_next_is_computed_and_the_last_one_commits() -> None:
    machine = SENDER.make()
    steps: list[tuple[SenderEvent, list[SenderEffect]]] = [
        (RESERVED, []),
        (BlocksComputed(1), [StartWrite(0, 1)]),
        (BlocksComputed(2), []),
        (BlocksComputed(3), []),
        (written(0, 1), [StartWrite(1, 2)]),
        (FINISHED, []),
        (written(1, 2), [StartWrite(3, 1)]),
        (written(3, 1), [SendCommit(FINISHED, CHECKSUMS)]),
        (AcceptedReceived(), [SendRelease(), Ended(HandedOver())]),
    ]
    for event, effects in steps:
        assert machine.handle(event) == effects, event
    assert machine.phase is SenderPhase.ENDED


def test_blocks_computed_before_the_answer_are_written_when_it_comes() -> None:
    assert last(BlocksComputed(3), RESERVED) == [StartWrite(0, 3)]


def test_cached_blocks_of_the_decode_side_are_never_written() -> None:
    cached = ReservedReceived(TARGETS, 2)
    assert last(cached, BlocksComputed(2)) == []
    assert last(cached, BlocksComputed(3)) == [StartWrite(2, 1)]
    commit = last(cached, FINISHED, written(2, 2))
    assert commit == [SendCommit(FINISHED, CHECKSUMS[2:])]


def test_a_prompt_that_the_decode_side_has_whole_is_committed_without_a_write() -> None:
    assert last(ReservedReceived(TARGETS, 4), FINISHED) == [SendCommit(FINISHED, ())]


def test_a_late_count_of_blocks_never_takes_computed_blocks_back() -> None:
    assert last(BlocksComputed(3), BlocksComputed(1), RESERVED) == [StartWrite(0, 3)]


def test_a_refusal_of_the_reservation_ends_with_its_reason_and_without_an_abort() -> None:
    refused = ReserveRefusedReceived(ErrorCode.NO_ROOM, "full")
    assert last(refused) == [Ended(Refused(ErrorCode.NO_ROOM, "full"))]


@pytest.mark.parametrize(
    "reserved", [ReservedReceived(TARGETS[:3], 0), ReservedReceived(TARGETS, 5)]
)
def test_an_answer_of_the_wrong_size_ends_and_frees_what_was_reserved(
    reserved: ReservedReceived,
) -> None:
    abort, ended = last(reserved)
    assert abort == SendAbort(AbortReason.WRITE_FAILED)
    assert isinstance(ended, Ended)
    assert isinstance(ended.outcome, Failed)


def test_one_damaged_block_has_everything_written_again_and_a_second_ends_it() -> None:
    again = (*ALL_WRITTEN, CommitRefusedReceived(1))
    assert last(*again) == [StartWrite(0, 4)]
    assert last(*again, written(0, 4)) == [SendCommit(FINISHED, CHECKSUMS)]
    assert last(*again, written(0, 4), AcceptedReceived()) == [SendRelease(), Ended(HandedOver())]
    abort, ended = last(*again, written(0, 4), CommitRefusedReceived(1))
    assert abort == SendAbort(AbortReason.CORRUPT)
    assert ended == Ended(Failed("block 1 arrived damaged 2 times"))


def test_blocks_that_were_cached_there_are_not_written_after_a_damage_either() -> None:
    damaged = last(ReservedReceived(TARGETS, 2), FINISHED, written(2, 2), CommitRefusedReceived(2))
    assert damaged == [StartWrite(2, 2)]


def test_a_failed_write_ends_and_says_that_nothing_is_written_any_more() -> None:
    effects = last(RESERVED, BlocksComputed(1), WriteFailed("no pool"))
    assert effects == [SendAbort(AbortReason.WRITE_FAILED), Ended(Failed("no pool"))]


QUIET = [(), (RESERVED,), ALL_WRITTEN]


@pytest.mark.parametrize("path", QUIET, ids=["reserving", "ready", "committing"])
def test_without_a_write_in_flight_a_cancel_ends_at_once(path: tuple[SenderEvent, ...]) -> None:
    cancelled = Ended(Aborted(AbortReason.CANCELLED, by_peer=False))
    assert last(*path, CANCEL) == [SendAbort(AbortReason.CANCELLED), cancelled]


@pytest.mark.parametrize("path", QUIET, ids=["reserving", "ready", "committing"])
def test_without_a_write_in_flight_the_peers_abort_is_answered_at_once(
    path: tuple[SenderEvent, ...],
) -> None:
    aborted = Ended(Aborted(AbortReason.CANCELLED, by_peer=True))
    assert last(*path, PEER_ABORT) == [SendAborted(), aborted]


@pytest.mark.parametrize("path", QUIET[1:], ids=["ready", "committing"])
def test_a_dead_peer_is_told_nothing(path: tuple[SenderEvent, ...]) -> None:
    assert last(*path, LOST) == [Ended(PeerGone("died"))]


def test_a_peer_that_is_gone_before_it_reserved_leaves_the_prompt_for_another() -> None:
    assert last(LOST) == [Ended(Refused(ErrorCode.WORKER_DIED, "died"))]


WRITING = (BlocksComputed(2), RESERVED)


@pytest.mark.parametrize(
    ("end", "effects"),
    [
        (
            CANCEL,
            [
                SendAbort(AbortReason.CANCELLED),
                Ended(Aborted(AbortReason.CANCELLED, by_peer=False)),
            ],
        ),
        (PEER_ABORT, [SendAborted(), Ended(Aborted(AbortReason.CANCELLED, by_peer=True))]),
        (LOST, [Ended(PeerGone("died"))]),
        (
            LeaseExpired(),
            [
                SendAbort(AbortReason.LEASE_EXPIRED),
                Ended(PeerGone("the decode side did not renew its lease")),
            ],
        ),
    ],
    ids=["cancel", "peer-abort", "peer-lost", "lease"],
)
@pytest.mark.parametrize("outcome", [written(0, 2), WriteFailed("broken")], ids=["done", "failed"])
def test_a_write_in_flight_is_waited_for_before_the_last_word(
    end: SenderEvent, effects: list[SenderEffect], outcome: SenderEvent
) -> None:
    machine, at_once = told(*WRITING, end)
    assert at_once == []
    assert machine.phase is SenderPhase.STOPPING
    assert machine.handle(outcome) == effects


def test_the_peers_abort_while_a_cancel_waits_gets_its_answer_and_the_first_outcome_stays() -> None:
    effects = last(*WRITING, CANCEL, AbortReceived(AbortReason.LEASE_EXPIRED), written(0, 2))
    assert effects == [SendAborted(), Ended(Aborted(AbortReason.CANCELLED, by_peer=False))]


def test_a_peer_that_dies_while_a_cancel_waits_hears_nothing() -> None:
    effects = last(*WRITING, CANCEL, PeerLost("died"), written(0, 2))
    assert effects == [Ended(Aborted(AbortReason.CANCELLED, by_peer=False))]


def test_a_second_cancel_while_one_waits_changes_nothing() -> None:
    effects = last(*WRITING, CANCEL, CancelRequested(AbortReason.SHUTTING_DOWN), written(0, 2))
    assert effects == [
        SendAbort(AbortReason.CANCELLED),
        Ended(Aborted(AbortReason.CANCELLED, by_peer=False)),
    ]


# ---- leases --------------------------------------------------------------------------------------


def test_a_lease_holds_until_its_deadline_and_not_after() -> None:
    machine, _ = told(RESERVED)
    assert machine.tick(LEASE_DEADLINE) == []
    abort, ended = machine.tick(LEASE_DEADLINE + 0.001)
    assert abort == SendAbort(AbortReason.LEASE_EXPIRED)
    assert ended == Ended(PeerGone("the decode side did not renew its lease"))
    assert machine.tick(LEASE_DEADLINE + 1) == []


def test_a_renewed_lease_holds_longer() -> None:
    machine, _ = told(RESERVED)
    machine.renew(LEASE_DEADLINE + 10)
    assert machine.tick(LEASE_DEADLINE + 10) == []
    assert machine.tick(LEASE_DEADLINE + 11) != []


def test_a_lease_that_runs_out_during_a_write_waits_for_it_and_is_noticed_once() -> None:
    machine, _ = told(*WRITING)
    assert machine.tick(LEASE_DEADLINE + 1) == []
    assert machine.phase is SenderPhase.STOPPING
    assert machine.tick(LEASE_DEADLINE + 2) == []
    assert machine.handle(written(0, 2)) != []


def test_a_decode_side_that_never_answers_a_reserve_is_taken_for_a_refusal() -> None:
    machine, _ = told(FINISHED)
    abort, ended = machine.tick(LEASE_DEADLINE + 1)
    assert abort == SendAbort(AbortReason.LEASE_EXPIRED)
    assert ended == Ended(Refused(ErrorCode.TRANSFER_FAILED, "the decode side did not answer"))


@pytest.mark.parametrize("path", [(), ALL_WRITTEN], ids=["reserve", "commit"])
def test_a_peer_that_renews_but_owes_its_answer_is_not_waited_for_for_ever(
    path: tuple[SenderEvent, ...],
) -> None:
    machine, _ = told(*path)
    deadline = LEASE_DEADLINE
    for _ in range(MAX_UNANSWERED_RENEWALS):
        deadline += 1
        machine.renew(deadline)
        assert machine.tick(deadline) == []
    machine.renew(deadline + 100)
    assert machine.tick(deadline + 1) != []
    assert machine.phase is SenderPhase.ENDED


def test_a_long_prefill_is_renewed_without_end_and_its_commit_has_the_full_patience() -> None:
    machine, _ = told(RESERVED)
    for number in range(10 * MAX_UNANSWERED_RENEWALS):
        machine.renew(LEASE_DEADLINE + number)
    machine.handle(FINISHED)
    machine.handle(WriteFinished(CHECKSUMS))
    now = LEASE_DEADLINE + 10_000
    for _ in range(MAX_UNANSWERED_RENEWALS):
        machine.renew(now)
    assert machine.tick(now) == []
