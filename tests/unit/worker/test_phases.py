"""Phases follow one another without a gap: their sum is the time that the request took."""

import pytest

from common.ids import RequestId, WorkerId
from common.messages.fields import PhaseName, PhaseRecord, Phases
from common.messages.tokens import TokenDelta
from common.sampling import FinishReason, SampledToken
from common.worker.phases import PhaseLedger, PrefixCopied, PrefixLoaded

R = RequestId("r")
WRITTEN = PhaseRecord(name=PhaseName.TRANSFER, worker="p", seconds=0.1, num_bytes=9, num_calls=1)


def delta(num_tokens: int = 1, *, choice: int = 0, is_last: bool = False) -> TokenDelta:
    return TokenDelta(
        request_id=R,
        choice=choice,
        index=0,
        tokens=(SampledToken(1),) * num_tokens,
        finish_reason=FinishReason.LENGTH if is_last else None,
    )


def short(phases: Phases) -> list[tuple[str, float, int]]:
    return [(p.name.value, round(p.seconds, 6), p.num_tokens) for p in phases]


def prefilled(ledger: PhaseLedger, choices: range = range(1)) -> Phases:
    ledger.received(R, choices, 2.0, 10.0)
    ledger.prefill_started(R, 50, 11.0)
    found: Phases = ()
    for choice in choices:
        found += ledger.attach(delta(choice=choice), 11.0, 14.0).phases
    return found


def test_a_prefill_tells_its_queue_and_itself_with_the_first_token() -> None:
    assert short(prefilled(PhaseLedger(WorkerId("p")))) == [("queue", 3.0, 0), ("prefill", 3.0, 50)]


def test_the_wait_for_a_prefix_is_no_part_of_the_queue() -> None:
    ledger = PhaseLedger(WorkerId("p"))
    ledger.received(R, range(1), 2.0, 10.0)
    ledger.prefix_ended(R, PrefixCopied(64, 4096, 2), 10.5)
    ledger.prefill_started(R, 50, 11.0)
    phases = ledger.attach(delta(), 11.0, 14.0).phases
    assert short(phases) == [("queue", 2.5, 0), ("prefix", 0.5, 64), ("prefill", 3.0, 50)]
    assert (phases[1].num_bytes, phases[1].num_calls) == (4096, 2)


def test_a_decode_here_follows_the_prefill_at_once_and_is_told_with_the_last_token() -> None:
    ledger = PhaseLedger(WorkerId("w"))
    prefilled(ledger)
    ledger.decode_began(R, 14.0)
    assert ledger.attach(delta(), 14.0, 15.0).phases == ()
    assert short(ledger.attach(delta(2, is_last=True), 15.0, 17.5).phases) == [("decode", 3.5, 3)]


def test_a_decode_that_found_no_other_worker_tells_its_wait() -> None:
    ledger = PhaseLedger(WorkerId("w"))
    prefilled(ledger)
    ledger.decode_began(R, 16.0)
    assert short(ledger.attach(delta(), 16.0, 17.0).phases) == [("decode_wait", 2.0, 0)]
    assert short(ledger.attach(delta(is_last=True), 17.0, 18.0).phases) == [("decode", 2.0, 2)]


def test_a_decode_after_a_handoff_waits_until_its_first_step_begins() -> None:
    ledger = PhaseLedger(WorkerId("d"))
    ledger.taken_over(R, (0,), 14.0, is_migration=False, phases=(WRITTEN,))
    ledger.decode_began(R, 14.5)
    first = ledger.attach(delta(2), 15.0, 16.0)  # the first token again, and the next one
    assert first.phases[0] == WRITTEN
    assert short(first.phases)[1:] == [("decode_wait", 1.0, 0)]
    assert short(ledger.attach(delta(is_last=True), 16.0, 18.0).phases) == [("decode", 3.0, 2)]


def test_the_decode_ends_with_the_last_choice_that_goes_on() -> None:
    ledger = PhaseLedger(WorkerId("w"))
    phases = prefilled(ledger, range(3))
    assert [phase.name for phase in phases] == [PhaseName.QUEUE, PhaseName.PREFILL]
    ledger.decode_began(R, 14.0)
    assert ledger.attach(delta(choice=0, is_last=True), 14.0, 15.0).phases == ()
    ledger.choice_cancelled(R, 1)
    last = ledger.attach(delta(choice=2, is_last=True), 15.0, 16.0)
    assert short(last.phases) == [("decode", 2.0, 2)]


def test_a_request_of_one_token_tells_no_decode() -> None:
    ledger = PhaseLedger(WorkerId("w"))
    ledger.received(R, range(1), 0.0, 10.0)
    ledger.prefill_started(R, 50, 10.0)
    phases = ledger.attach(delta(is_last=True), 10.0, 11.0).phases
    assert short(phases) == [("queue", 0.0, 0), ("prefill", 1.0, 50)]


def test_a_decode_that_moves_is_told_in_two_parts_with_the_move_between() -> None:
    source, target = PhaseLedger(WorkerId("s")), PhaseLedger(WorkerId("t"))
    prefilled(source)
    source.decode_began(R, 14.0)
    source.attach(delta(), 14.0, 15.0)
    told = source.frozen(R, 15.5)
    assert [(p.worker, *entry) for p, entry in zip(told, short(told), strict=True)] == [
        ("s", "decode", 1.5, 1)
    ]
    target.taken_over(R, (0,), 15.5, is_migration=True, phases=told)
    first = target.attach(delta(2), 16.5, 17.0)
    assert short(first.phases) == [("decode", 1.5, 1), ("migration", 1.0, 0)]
    last = target.attach(delta(is_last=True), 17.0, 18.0)
    assert short(last.phases) == [("decode", 1.5, 2)]


def test_what_a_worker_could_not_tell_before_a_move_goes_with_it() -> None:
    ledger = PhaseLedger(WorkerId("d"))
    ledger.taken_over(R, (0,), 14.0, is_migration=False, phases=(WRITTEN,))
    told = ledger.frozen(R, 14.5)  # before its first step
    assert told[0] == WRITTEN
    assert short(told)[1:] == [("decode_wait", 0.5, 0)]


@pytest.mark.parametrize("is_before_first_step", [True, False])
def test_a_failed_move_is_no_part_of_the_decode(is_before_first_step: bool) -> None:
    ledger = PhaseLedger(WorkerId("d"))
    ledger.taken_over(R, (0,), 14.0, is_migration=False, phases=())
    told: list[tuple[str, float, int]] = []
    if not is_before_first_step:
        told += short(ledger.attach(delta(2), 15.0, 16.0).phases)
    ledger.frozen(R, 16.0)
    ledger.thawed(R, 19.0)
    told += short(ledger.attach(delta(2, is_last=True), 19.0, 20.0).phases)
    assert sum(seconds for _, seconds, _ in told) == pytest.approx(6.0)
    names = [name for name, _, _ in told]
    # Before the first step the whole time is one wait.
    assert names == (
        ["decode_wait", "decode"]
        if is_before_first_step
        else ["decode_wait", "migration", "decode"]
    )


def test_what_is_forgotten_or_was_never_here_tells_nothing() -> None:
    ledger = PhaseLedger(WorkerId("w"))
    plain = delta(is_last=True)
    assert ledger.attach(plain, 1.0, 2.0) is plain
    prefilled(ledger)
    ledger.forget(R)
    assert ledger.attach(plain, 1.0, 2.0) is plain
    assert ledger.frozen(R, 3.0) == ()
    ledger.thawed(R, 3.0)
    ledger.choice_cancelled(R, 0)
    ledger.prefix_ended(R, PrefixCopied(), 3.0)
    assert ledger.done_at(R, otherwise=7.0) == 7.0


def test_a_load_from_the_store_is_told_apart_from_the_queue() -> None:
    ledger = PhaseLedger(WorkerId("p"))
    ledger.received(R, range(1), 0.5, 10.0)
    ledger.prefix_loaded(R, PrefixLoaded(128, 8192, 2, 0.1), 10.75)
    ledger.prefill_started(R, 50, 11.0)
    queue, load = ledger.attach(delta(), 11.0, 12.0).phases[:2]
    assert (queue.name, queue.seconds) == ("queue", 0.75)
    assert (load.name, load.worker, load.seconds) == ("load", "p", 0.75)
    assert (load.num_tokens, load.num_bytes, load.num_calls) == (128, 8192, 2)


def test_a_load_for_another_worker_is_told_by_that_one() -> None:
    (load,) = PhaseLedger(WorkerId("d")).loaded_for_other(PrefixLoaded(64, 4096, 1), 0.25)
    ledger = PhaseLedger(WorkerId("p"))
    ledger.received(R, range(1), 0.0, 10.0)
    ledger.prefix_ended(R, PrefixCopied(64, 4096, 2, (load,)), 10.5)
    ledger.prefill_started(R, 50, 10.5)
    told = ledger.attach(delta(), 10.5, 11.0).phases
    assert [(phase.name, phase.worker, phase.seconds) for phase in told[:3]] == [
        ("queue", "p", 0.0),
        ("load", "d", 0.25),
        ("prefix", "p", 0.5),
    ]
