"""Decodes that are frozen, moved to another worker, and go on there or here."""

from collections.abc import Callable

import pytest

from common.errors import ErrorCode, LocalProtocolError
from common.ids import RequestId
from common.messages.handoff import AbortReason, FirstToken
from common.sampling import FinishReason, SampledToken
from common.scheduler.effects import (
    DecodeBegan,
    DecodeFrozen,
    Effect,
    RequestBroke,
    RequestEnded,
    StopHandoff,
)
from common.scheduler.migration import Migration
from common.scheduler.request import RequestPhase
from common.scheduler.steps import StepPlan
from common.worker.stepping import step_rows
from tests.support.scheduler_bench import EOS, Bench, new_request

A = RequestId("a")
FROZEN = DecodeFrozen(A)
CANCELLED = RequestEnded(A, was_cancelled=True)


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def planned(bench: Bench) -> StepPlan:
    plan, _ = bench.plan()
    assert plan is not None
    return plan


def decoding(num_steps: int = 3, **params: object) -> Bench:
    """A bench whose request "a" has drawn as many tokens as there were steps."""
    bench = Bench(num_blocks=32)
    bench.add(new_request("a", prompt(6), **{"max_tokens": 9, **params}))
    for _ in range(num_steps):
        bench.step()
    return bench


def freeze(bench: Bench, name: str = "a") -> list[Effect]:
    return bench.take(bench.scheduler.freeze(RequestId(name)))


def thaw(bench: Bench, name: str = "a") -> None:
    assert bench.take(bench.scheduler.thaw(RequestId(name))) == []


def target_of(source: Bench) -> Bench:
    """Another worker, with the same gateway."""
    target = Bench(num_blocks=32, token_of=source.token_of)
    target.streams = source.streams
    return target


def is_idle(bench: Bench) -> bool:
    counts = bench.blocks.counts()
    bench.blocks.validate()
    bench.scheduler.validate()
    return counts.referenced == counts.in_transfer == 0 and not bench.scheduler.request_ids()


# ---- freezing ------------------------------------------------------------------------------------


def test_a_decode_between_steps_is_frozen_at_once_and_planned_no_more() -> None:
    bench = decoding()
    assert freeze(bench) == [FROZEN]
    assert bench.plan() == (None, [])
    counts = bench.blocks.counts()
    assert (counts.referenced, counts.in_transfer) == (0, 2)
    assert bench.scheduler.load(num_sending=0, num_receiving=0).num_decoding == 1


def test_a_decode_in_two_steps_is_frozen_when_the_later_one_ends() -> None:
    bench = decoding()
    first, second = planned(bench), planned(bench)
    assert freeze(bench) == []
    assert FROZEN not in bench.finish(first)
    assert bench.plan() == (None, [])
    assert bench.finish(second)[-1] == FROZEN
    assert len(bench.tokens("a")) == 5


def test_a_decode_that_ends_before_it_is_still_is_never_frozen() -> None:
    bench = decoding(3, max_tokens=4)
    plan = planned(bench)
    assert freeze(bench) == []
    effects = bench.finish(plan)
    assert FROZEN not in effects
    assert effects[-1] == RequestEnded(A, was_cancelled=False)
    thaw(bench)
    assert is_idle(bench)


def test_other_decodes_go_on_beside_a_frozen_one() -> None:
    bench = decoding()
    bench.add(new_request("b", prompt(5, 70), max_tokens=4))
    bench.step()
    freeze(bench)
    bench.run()
    assert len(bench.tokens("b")) == 4
    assert len(bench.tokens("a")) == 4
    assert bench.scheduler.request_ids() == (A,)


def waits(bench: Bench) -> None:
    bench.add(new_request("a", prompt(6)))


def computes(bench: Bench) -> None:
    bench.add(new_request("a", prompt(30)))
    bench.step()


def is_sent(bench: Bench) -> None:
    bench.add(new_request("a", prompt(6)), is_remote=True)
    bench.step()


def has_two_choices(bench: Bench) -> None:
    bench.add(new_request("a", prompt(6), num_choices=2))
    bench.step()


def is_frozen(bench: Bench) -> None:
    bench.add(new_request("a", prompt(6)))
    bench.step()
    freeze(bench)


def is_over(bench: Bench) -> None:
    bench.add(new_request("a", prompt(6)))
    bench.step()
    bench.plan()
    bench.cancel("a")


@pytest.mark.parametrize(
    "prepare", [waits, computes, is_sent, has_two_choices, is_frozen, is_over, lambda _: None]
)
def test_only_one_live_decoding_choice_can_be_frozen(prepare: Callable[[Bench], None]) -> None:
    bench = Bench(num_blocks=32)
    prepare(bench)
    with pytest.raises(LocalProtocolError, match="request a is not one live decoding choice"):
        bench.scheduler.freeze(A)


@pytest.mark.parametrize("num_slots", [0, 8])
def test_a_preempted_decode_cannot_be_frozen(num_slots: int) -> None:
    bench = Bench(num_blocks=6, budget=32, num_slots=num_slots)
    bench.add(new_request("old", prompt(10), max_tokens=8))
    bench.add(new_request("a", prompt(10, 50), max_tokens=8))
    bench.step_until(lambda _: not bench.blocks.is_held("a/0"))
    with pytest.raises(LocalProtocolError):
        bench.scheduler.freeze(A)


def test_a_frozen_decode_is_not_preempted() -> None:
    """The newest that is not frozen gives way instead."""
    bench = Bench(num_blocks=6, budget=32)
    bench.add(new_request("old", prompt(10), max_tokens=8))
    bench.add(new_request("a", prompt(10, 50), max_tokens=8))
    bench.step()
    freeze(bench)
    for _ in range(6):
        bench.step()
    assert bench.blocks.is_held("a/0")
    assert not bench.blocks.is_held("old/0")
    thaw(bench)
    bench.run()
    assert [len(bench.tokens(name)) for name in ("old", "a")] == [8, 8]
    assert bench.violations == []


# ---- thawing -------------------------------------------------------------------------------------


def test_a_thawed_decode_goes_on_as_if_nothing_had_been() -> None:
    bench = decoding()
    freeze(bench)
    thaw(bench)
    assert bench.blocks.counts().in_transfer == 0
    bench.run()
    assert bench.tokens("a") == [2000 + index for index in range(9)]
    assert bench.violations == []
    assert is_idle(bench)


def test_a_decode_thawed_while_steps_are_open_is_never_told_frozen() -> None:
    bench = decoding()
    plan = planned(bench)
    freeze(bench)
    thaw(bench)
    assert FROZEN not in bench.finish(plan)
    bench.run()
    assert len(bench.tokens("a")) == 9


def test_a_thawed_decode_is_as_old_as_it_was() -> None:
    """When the pool is full, the one that came after it gives way."""
    bench = Bench(num_blocks=6, budget=32)
    bench.add(new_request("a", prompt(10), max_tokens=8))
    bench.add(new_request("b", prompt(10, 50), max_tokens=8))
    bench.step()
    freeze(bench)
    thaw(bench)
    bench.step_until(lambda _: not bench.blocks.is_held("b/0"))
    assert bench.blocks.is_held("a/0")


def test_a_request_that_is_gone_or_not_frozen_thaws_silently() -> None:
    bench = decoding()
    thaw(bench)
    thaw(bench, "unknown")
    bench.run()
    assert len(bench.tokens("a")) == 9


def test_a_decode_does_not_thaw_while_a_handoff_reads_it() -> None:
    bench = decoding()
    freeze(bench)
    bench.scheduler.open_handoff(A)
    with pytest.raises(LocalProtocolError, match="a handoff reads the blocks of request a"):
        bench.scheduler.thaw(A)
    bench.close_handoff("a", was_accepted=False)
    thaw(bench)
    bench.run()
    assert len(bench.tokens("a")) == 9
    assert is_idle(bench)


# ---- what is handed over -------------------------------------------------------------------------


def test_all_tokens_but_the_last_drawn_one_are_the_prompt_of_a_migration() -> None:
    bench = decoding(3)
    freeze(bench)
    assert bench.scheduler.migration_of(A) == Migration(
        tokens=(*prompt(6), 2000, 2001),
        first_token=FirstToken(choice=0, token=SampledToken(token_id=2002)),
        params=new_request("a", prompt(6), max_tokens=9, num_drawn=2).params,
        owner="a/0",
    )


def test_the_choice_that_is_left_keeps_its_number() -> None:
    bench = decoding(3, num_choices=3)
    bench.cancel("a", 0)
    bench.cancel("a", 2)
    freeze(bench)
    migration = bench.scheduler.migration_of(A)
    assert migration.first_token.choice == 1
    assert (migration.params.first_choice, migration.params.num_choices) == (1, 1)
    assert migration.owner == "a/1"


def test_what_is_not_frozen_yet_cannot_be_handed_over() -> None:
    bench = decoding()
    plan = planned(bench)
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="request a is not frozen"):
            bench.scheduler.migration_of(A)
        if bench.scheduler.find(A).phase is not RequestPhase.FROZEN:  # type: ignore[union-attr]  # it is here
            freeze(bench)
    bench.finish(plan)
    assert bench.scheduler.migration_of(A).owner == "a/0"


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8])
def test_a_migrated_decode_gives_the_same_tokens_and_ends_alike(num_steps: int) -> None:
    source = decoding(num_steps)
    freeze(source)
    migration = source.move_out("a")
    assert is_idle(source)
    assert source.reports == {}, "the receiver tells the end"
    target = target_of(source)
    assert target.move_in("a", migration) == [DecodeBegan(A)]
    target.run()
    assert target.tokens("a") == [2000 + index for index in range(9)]
    assert target.reason("a") is FinishReason.LENGTH
    assert source.violations + target.violations == []
    assert is_idle(target)


def test_a_decode_may_move_again_and_again() -> None:
    bench, benches = decoding(1), []
    while bench.reason("a") is None:
        benches.append(bench)
        freeze(bench)
        migration = bench.move_out("a")
        bench = target_of(bench)
        bench.move_in("a", migration)
        bench.step()
    assert len(benches) == 8
    assert bench.tokens("a") == [2000 + index for index in range(9)]
    assert [violation for each in benches for violation in each.violations] == []


def test_a_decode_that_has_just_arrived_may_move_on_before_its_first_step() -> None:
    source = decoding(2)
    freeze(source)
    first = source.move_out("a")
    middle = target_of(source)
    middle.move_in("a", first)
    freeze(middle)
    assert middle.move_out("a") == first._replace(owner="in-a")
    target = target_of(source)
    target.move_in("a", first)
    target.run()
    assert target.tokens("a") == [2000 + index for index in range(9)]


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 5), (4, 5), (5, 7)])
def test_the_ends_count_what_was_drawn_elsewhere(min_tokens: int, num_tokens: int) -> None:
    source = Bench(
        num_blocks=32, token_of=lambda _r, _c, index: EOS if index in (4, 6) else 2000 + index
    )
    source.add(new_request("a", prompt(6), max_tokens=9, min_tokens=min_tokens))
    for _ in range(3):
        source.step()
    freeze(source)
    migration = source.move_out("a")
    target = target_of(source)
    target.move_in("a", migration)
    target.run()
    assert len(target.tokens("a")) == num_tokens
    assert target.reason("a") is FinishReason.STOP


def test_a_draw_elsewhere_reads_the_same_tokens_at_the_same_place() -> None:
    """What the sampler is given: choice, prompt, outputs, and so penalties and position."""

    def samples(bench: Bench, params: dict[str, object]) -> list[tuple[int, list[int], list[int]]]:
        seen = []
        while bench.reason("a") is None:
            plan = planned(bench)
            (row,) = step_rows(plan, lambda number: number)
            for spec in row.samples:
                assert spec.params.has_penalties == bool(params)
                outputs = list(spec.output_token_ids)
                seen.append((spec.choice, list(spec.prompt_token_ids), outputs))
            bench.finish(plan)
        return seen

    penalties: dict[str, object] = {"presence_penalty": 0.5}
    undisturbed = samples(decoding(1, **penalties), penalties)
    source = decoding(4, **penalties)
    freeze(source)
    migration = source.move_out("a")
    target = target_of(source)
    target.move_in("a", migration)
    assert samples(target, penalties) == undisturbed[3:]


def test_a_migrated_decode_is_preempted_and_computed_again_like_any_other() -> None:
    source = decoding(4)
    freeze(source)
    migration = source.move_out("a")
    target = Bench(num_blocks=6, budget=32)
    target.streams = source.streams
    target.add(new_request("old", prompt(8, 50), max_tokens=12))
    target.step()
    assert target.move_in("a", migration) is not None
    target.run()
    assert target.tokens("a") == [2000 + index for index in range(9)]
    assert len(target.tokens("old")) == 12
    assert target.violations == []
    assert is_idle(target)


# ---- ends while frozen ---------------------------------------------------------------------------


def test_a_frozen_request_is_cancelled_at_once() -> None:
    bench = decoding()
    freeze(bench)
    assert bench.cancel("a") == [CANCELLED]
    assert is_idle(bench)


def test_a_cancel_while_the_open_steps_end_waits_for_them_and_freezes_nothing() -> None:
    bench = decoding()
    plan = planned(bench)
    freeze(bench)
    assert bench.cancel("a") == []
    assert bench.finish(plan) == [CANCELLED]
    assert bench.frozen == []
    assert is_idle(bench)


@pytest.mark.parametrize("was_accepted", [False, True])
def test_a_cancel_while_a_handoff_reads_the_frozen_blocks_waits_for_it(
    was_accepted: bool,
) -> None:
    bench = decoding()
    freeze(bench)
    bench.scheduler.open_handoff(A)
    assert bench.cancel("a") == [StopHandoff(A, AbortReason.CANCELLED)]
    assert bench.blocks.is_held("a/0")
    closed = bench.close_handoff("a", was_accepted=was_accepted)
    assert closed == ([] if was_accepted else [CANCELLED])
    thaw(bench)
    assert is_idle(bench)


def test_a_failure_while_a_handoff_reads_the_frozen_blocks_is_told_once() -> None:
    bench = decoding()
    freeze(bench)
    bench.scheduler.open_handoff(A)
    broke, stop = bench.take(bench.scheduler.fail(A, ErrorCode.INTERNAL, "no gateway"))
    assert isinstance(broke, RequestBroke)
    assert stop == StopHandoff(A, AbortReason.CANCELLED)
    assert bench.close_handoff("a", was_accepted=False) == []
    assert is_idle(bench)


def test_a_row_that_breaks_ends_a_decode_that_was_to_be_frozen() -> None:
    bench = decoding()
    plan = planned(bench)
    freeze(bench)
    (broke,) = bench.finish(plan, failing=[0])
    assert isinstance(broke, RequestBroke)
    assert is_idle(bench)


def test_no_handoff_opens_for_a_request_that_is_not_here() -> None:
    with pytest.raises(LocalProtocolError, match="request a is not here"):
        Bench().scheduler.open_handoff(A)
