"""What a worker learns from the times of its steps."""

import pytest

from common.messages.fields import Mode, WorkerRates
from common.scheduler.rates import StepRates
from tests.support.scheduler_bench import Bench, new_request


def prompt(length: int, kind: int = 0) -> list[int]:
    return [100 * kind + place for place in range(length)]


def run_timed(bench: Bench, *seconds: float) -> None:
    """Run steps of these durations."""
    for duration in seconds:
        plan, _ = bench.plan()
        assert plan is not None
        bench.finish(plan)
        bench.scheduler.note_step(duration, plan)


def test_nothing_is_known_before_the_first_step() -> None:
    assert Bench().scheduler.rates() == WorkerRates(
        prefill_tokens_per_second=0.0, decode_step_seconds=0.0, decode_tokens_per_second=0.0
    )
    assert StepRates(4).num_prompt_tokens_within(0.05) is None


def test_prompt_tokens_are_counted_per_second_of_steps_that_compute_them() -> None:
    bench = Bench(budget=16)
    bench.add(new_request("a", prompt(32), max_tokens=9))
    run_timed(bench, 0.1, 0.1, 0.01, 0.01)
    rates = bench.scheduler.rates()
    assert rates.prefill_tokens_per_second == pytest.approx(160, rel=1e-6)
    assert rates.decode_tokens_per_second == pytest.approx(100, rel=1e-6)


def test_a_remainder_of_less_than_a_block_says_nothing_of_the_rate() -> None:
    bench = Bench(budget=16)
    bench.add(new_request("a", prompt(18), max_tokens=9))
    run_timed(bench, 0.1, 0.1)
    assert bench.scheduler.rates().prefill_tokens_per_second == pytest.approx(160)


def test_the_time_between_two_tokens_is_an_ewma_that_begins_with_the_first() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=9))
    run_timed(bench, 5.0)
    assert bench.scheduler.rates().decode_step_seconds == 0.0
    run_timed(bench, 0.04)
    assert bench.scheduler.rates().decode_step_seconds == pytest.approx(0.04)
    run_timed(bench, 0.02)
    assert bench.scheduler.rates().decode_step_seconds == pytest.approx(0.7 * 0.04 + 0.3 * 0.02)


def test_decodes_that_take_turns_wait_for_each_other() -> None:
    """Rows for one of three sequences only: each gets a token every third step."""
    bench = Bench(max_seqs=1)
    bench.add(new_request("a", prompt(3), num_choices=3, max_tokens=30))
    run_timed(bench, *[0.01] * 40)
    assert bench.scheduler.rates().decode_step_seconds == pytest.approx(0.03, rel=1e-3)
    assert bench.scheduler.rates().decode_tokens_per_second == pytest.approx(100)


def test_steps_ahead_are_timed_like_others() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=9))
    run_timed(bench, 0.02)
    first, _ = bench.plan()
    second, _ = bench.plan()
    for plan in (first, second):
        assert plan is not None
        bench.finish(plan)
        bench.scheduler.note_step(0.02, plan)
    assert bench.scheduler.rates().decode_step_seconds == pytest.approx(0.02)


def test_one_slow_step_fades() -> None:
    bench = Bench(budget=16, num_blocks=400)
    bench.add(new_request("a", prompt(1600), max_tokens=1))
    run_timed(bench, 2.0, *[0.01] * 9)
    slow = bench.scheduler.rates().prefill_tokens_per_second
    assert slow < 80
    bench = Bench(budget=16, num_blocks=4000)
    bench.add(new_request("b", prompt(16000), max_tokens=1))
    run_timed(bench, 2.0, *[0.05] * 400)
    assert bench.scheduler.rates().prefill_tokens_per_second > 0.95 * 320


def test_what_prompts_add_to_a_decode_step_bounds_them() -> None:
    bench = Bench(budget=64, num_blocks=64)
    bench.add(new_request("a", prompt(3), max_tokens=50))
    run_timed(bench, 0.01, 0.02, 0.02)  # a decode step takes 20 ms
    bench.add(new_request("b", prompt(40, kind=1), max_tokens=50))
    run_timed(bench, 0.06)  # 40 prompt tokens added 40 ms
    assert bench.scheduler.rates().prefill_tokens_per_second == pytest.approx(40 / 0.06)
    rates = bench.scheduler._rates  # what DECODE_LED goes by
    assert rates.num_prompt_tokens_within(0.05) == 30
    assert rates.num_prompt_tokens_within(0.01) == 0


def test_prompts_beside_decodes_do_not_count_as_slow_decodes() -> None:
    bench = Bench(budget=64, num_blocks=64)
    bench.add(new_request("a", prompt(3), max_tokens=50))
    run_timed(bench, 0.01, 0.02)
    bench.add(new_request("b", prompt(40, kind=1), max_tokens=50))
    run_timed(bench, 0.5)
    assert bench.scheduler.rates().decode_step_seconds == pytest.approx(0.02)
    assert bench.scheduler._rates.token_seconds > 0.1


def test_steps_that_took_longer_than_wished_get_fewer_prompt_tokens() -> None:
    bench = Bench(budget=64, num_blocks=200)
    bench.add(new_request("a", prompt(3), max_tokens=90))
    run_timed(bench, 0.01, 0.02, 0.02)
    rates = bench.scheduler._rates
    bench.scheduler.direct(Mode.DECODE_LED, 100)
    bench.add(new_request("b", prompt(600, kind=1), max_tokens=50))
    run_timed(bench, 0.05)
    first = rates.num_prompt_tokens_within(0.05)
    run_timed(bench, *[0.1] * 6)
    later = rates.num_prompt_tokens_within(0.05)
    assert first is not None
    assert later is not None
    assert later < first / 2
    run_timed(bench, *[0.025] * 30)
    assert (rates.num_prompt_tokens_within(0.05) or 0) > later, "and more again once they are short"


def test_a_step_of_no_time_is_no_measurement() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(8), max_tokens=9))
    run_timed(bench, 0.0, 0.0)
    assert bench.scheduler.rates().prefill_tokens_per_second == 0.0
    assert bench.scheduler.rates().decode_step_seconds == 0.0
