"""Preempted sequences whose K and V wait in host memory."""

import pytest

from common.errors import InvariantViolationError, LocalProtocolError
from common.scheduler.effects import Effect, Preempted, RequestEnded, SwapIn, SwapOut
from common.scheduler.swap import SwapSpace
from tests.support.scheduler_bench import Bench, new_request

# ---- the slots -----------------------------------------------------------------------------------


def test_slots_are_taken_all_or_none_and_used_again() -> None:
    swap = SwapSpace(3)
    assert swap.try_take(2) == (0, 1)
    assert swap.try_take(2) is None
    assert (swap.num_free, swap.num_used) == (1, 2)
    swap.give_back((0, 1))
    assert swap.try_take(3) == (0, 1, 2)
    assert swap.try_take(1) is None
    assert swap.try_take(0) == ()


def test_a_free_slot_cannot_be_given_back() -> None:
    swap = SwapSpace(2)
    with pytest.raises(LocalProtocolError, match=r"some of the slots \[1\] are free already"):
        swap.give_back((1,))


@pytest.mark.parametrize("in_use", [[], [0, 0], [0, 1], [2]])
def test_a_slot_that_is_neither_free_nor_in_use_once_is_noticed(in_use: list[int]) -> None:
    swap = SwapSpace(3)
    assert swap.try_take(1) == (0,)
    swap.validate([0])
    with pytest.raises(InvariantViolationError, match="of 3 host slots 2 are free"):
        swap.validate(in_use)


# ---- the scheduler with them ---------------------------------------------------------------------


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def crowded(num_slots: int, num_blocks: int = 6) -> Bench:
    """Two requests that do not fit the pool together to their ends."""
    bench = Bench(num_blocks=num_blocks, budget=32, num_slots=num_slots)
    bench.add(new_request("old", prompt(10), max_tokens=8))
    bench.add(new_request("new", prompt(10, 50), max_tokens=8))
    return bench


def of_kind(effects: list[Effect], *kinds: type[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kinds)]


def has_preempted(effects: list[Effect]) -> bool:
    return bool(of_kind(effects, Preempted))


def computed_tokens(bench: Bench) -> int:
    """Run to the end and count what was computed."""
    total = 0
    for _ in range(100):
        plan, effects = bench.plan()
        if plan is None and not effects:
            break
        if plan is not None:
            total += plan.num_tokens
            bench.finish(plan)
    return total


def test_a_preempted_sequence_is_copied_out_and_back_and_computes_nothing_again() -> None:
    bench = crowded(num_slots=4)
    out, preempted = of_kind(bench.step_until(has_preempted), SwapOut, Preempted)
    assert isinstance(out, SwapOut)
    assert isinstance(preempted, Preempted)
    assert (out.request_id, preempted.request_id, len(out.pairs)) == ("new", "new", 3)
    load = bench.scheduler.load(num_sending=0, num_receiving=0)
    assert (load.num_swapped, load.num_waiting, load.uncomputed_tokens) == (1, 0, 0)
    assert not bench.scheduler.can_reserve()
    effects = bench.step_until(lambda effects: bool(of_kind(effects, SwapIn, RequestEnded)))
    while not of_kind(effects, SwapIn):
        effects = bench.step()
    (back,) = of_kind(effects, SwapIn)
    assert isinstance(back, SwapIn)
    assert {slot for _, slot in back.pairs} <= {slot for _, slot in out.pairs}
    bench.run()
    assert bench.violations == []
    for name in ("old", "new"):
        assert bench.tokens(name) == [2000 + index for index in range(8)]
    assert bench.blocks.counts().referenced == 0


def test_swapping_saves_the_tokens_that_would_be_computed_again() -> None:
    """Both prompts, and each output but the last one, once."""
    num_needed = 2 * (10 + 7)
    assert computed_tokens(crowded(num_slots=3)) == num_needed
    assert computed_tokens(crowded(num_slots=2)) > num_needed


def test_what_does_not_fit_the_slots_is_computed_again() -> None:
    bench = crowded(num_slots=2)
    effects = bench.step_until(has_preempted)
    assert of_kind(effects, SwapOut) == []
    load = bench.scheduler.load(num_sending=0, num_receiving=0)
    assert (load.num_swapped, load.num_waiting, load.uncomputed_tokens) == (0, 1, 13)
    bench.run()
    assert bench.violations == []
    assert len(bench.tokens("new")) == 8


def test_blocks_that_are_found_in_the_prefix_cache_are_not_copied_back() -> None:
    """The pool was full, but only one of the swapped sequence's blocks was needed."""
    bench = crowded(num_slots=4)
    bench.step_until(has_preempted)
    bench.cancel("old")
    (back,) = of_kind(bench.step(), SwapIn)
    assert isinstance(back, SwapIn)
    assert len(back.pairs) < 3
    bench.run()
    assert bench.violations == []
    assert len(bench.tokens("new")) == 8


def test_a_swapped_sequence_comes_back_before_new_prompts() -> None:
    bench = crowded(num_slots=4)
    bench.step_until(has_preempted)
    bench.add(new_request("late", prompt(2, 90), max_tokens=1))
    bench.step_until(lambda _: "late" in bench.reports)
    assert bench.blocks.is_held("new/0")
    bench.run()
    assert bench.violations == []


def test_a_swapped_sequence_is_cancelled_and_its_slots_are_free() -> None:
    bench = crowded(num_slots=3)
    bench.step_until(has_preempted)
    assert bench.cancel("new") == [RequestEnded(bench.reports["new"][0].request_id, True)]  # type: ignore[union-attr]  # RequestEnded
    bench.scheduler.validate()
    bench.run()
    assert len(bench.tokens("old")) == 8


def test_choices_are_swapped_one_by_one_and_share_what_is_cached() -> None:
    bench = Bench(num_blocks=7, budget=32, num_slots=20)
    bench.add(new_request("a", prompt(10), num_choices=3, max_tokens=9))
    bench.run()
    assert [len(bench.tokens("a", choice)) for choice in range(3)] == [9, 9, 9]
    assert bench.violations == []


@pytest.mark.parametrize("num_slots", [0, 3, 5, 100])
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_the_same_tokens_come_out_however_many_slots_there_are(
    num_slots: int, num_ahead: int
) -> None:
    bench = Bench(num_blocks=8, budget=16, num_slots=num_slots)
    for number in range(5):
        bench.add(new_request(f"r{number}", prompt(5, 100 * number), max_tokens=14))
    bench.run(num_ahead=num_ahead)
    assert bench.violations == []
    for number in range(5):
        assert bench.tokens(f"r{number}") == [2000 + index for index in range(14)]
    assert bench.blocks.counts().referenced == 0


def test_of_two_swapped_sequences_the_older_comes_back_first() -> None:
    bench = Bench(num_blocks=9, budget=32, num_slots=20)
    for number, name in enumerate(("old", "middle", "new")):
        bench.add(new_request(name, prompt(10, 100 * number), max_tokens=14))
    effects: list[Effect] = []
    for _ in range(60):
        effects += bench.step()
    moves = [
        (type(effect).__name__, effect.request_id)
        for effect in effects
        if isinstance(effect, SwapOut | SwapIn)
    ]
    assert moves == [
        ("SwapOut", "new"),
        ("SwapOut", "middle"),
        ("SwapIn", "middle"),
        ("SwapIn", "new"),
        ("SwapOut", "new"),
        ("SwapIn", "new"),
    ]
    assert bench.violations == []
