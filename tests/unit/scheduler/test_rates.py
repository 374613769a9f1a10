"""What a worker learns from the times of its steps."""

import pytest

from common.messages.fields import Mode, WorkerRates
from common.scheduler.decode_cost import DecodeCost
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
    assert StepRates(4, 8).prompt_allowance(0.05) is None


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


def test_what_sequences_add_to_a_step_is_learned_from_batches_of_different_sizes() -> None:
    bench = Bench(num_blocks=400, budget=64, max_seqs=16)
    bench.add(new_request("r0", prompt(3), max_tokens=90))
    run_timed(bench, 1.0, 0.006, 0.006)
    for n in range(1, 9):
        bench.add(new_request(f"r{n}", prompt(3, kind=n), max_tokens=90))
        run_timed(bench, 1.0, *[0.005 + 0.001 * (n + 1)] * 4)
    rates, load = bench.scheduler.rates(), bench.scheduler.load(num_sending=0, num_receiving=0)
    assert load.num_decoding == 9
    assert load.num_decode_tokens == (3 + 43) + sum(3 + 5 * n for n in range(1, 9))
    cost = DecodeCost(
        rates.decode_base_seconds, rates.decode_seconds_per_sequence, rates.decode_seconds_per_token
    )
    assert cost.at(9, load.num_decode_tokens) == pytest.approx(0.014, rel=0.05)


def test_steps_that_prompts_share_say_nothing_of_what_a_sequence_adds() -> None:
    bench = Bench(num_blocks=64, budget=16, max_seqs=16)
    bench.add(new_request("a", prompt(3), max_tokens=90))
    run_timed(bench, 0.1, *[0.006] * 4)
    bench.add(new_request("b", prompt(64, kind=1), max_tokens=90))
    run_timed(bench, 0.5, 0.5, 0.5, 0.5)
    rates = bench.scheduler.rates()
    assert rates.decode_base_seconds + rates.decode_seconds_per_token < 0.007


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
    run_timed(bench, *[0.5] * 80)
    assert bench.scheduler.rates().prefill_tokens_per_second == pytest.approx(32, rel=0.05)


def test_what_prompts_add_to_a_decode_step_bounds_them() -> None:
    bench = Bench(budget=64, num_blocks=64)
    bench.add(new_request("a", prompt(3), max_tokens=50))
    run_timed(bench, 0.01, 0.02, 0.02)  # a decode step takes 20 ms
    bench.add(new_request("b", prompt(40, kind=1), max_tokens=50))
    run_timed(bench, 0.06)  # 40 prompt tokens added 40 ms
    assert bench.scheduler.rates().prefill_tokens_per_second == pytest.approx(40 / 0.06)
    rates = bench.scheduler._rates  # what DECODE_LED goes by
    assert rates.prompt_allowance(0.05) == 50, "1 ms a token, for as long as a step may take"
    assert rates.prompt_allowance(0.001) == 25, "a quarter more than decodes alone, if that is more"


def test_prompts_beside_decodes_do_not_count_as_slow_decodes() -> None:
    bench = Bench(budget=64, num_blocks=64)
    bench.add(new_request("a", prompt(3), max_tokens=50))
    run_timed(bench, 0.01, 0.02)
    bench.add(new_request("b", prompt(40, kind=1), max_tokens=50))
    run_timed(bench, 0.5)
    assert bench.scheduler.rates().decode_step_seconds == pytest.approx(0.02)
    assert bench.scheduler._rates.token_seconds > 0.1


def test_decodes_that_lead_keep_to_their_sla_on_average() -> None:
    """A decode takes 10 ms a step and a prompt token 1 ms more; the SLA is 50 ms."""
    bench = Bench(budget=64, num_blocks=400)
    bench.add(new_request("a", prompt(3), max_tokens=300))
    run_timed(bench, 0.01, 0.01, 0.01)
    bench.add(new_request("b", prompt(1200, kind=1), max_tokens=5))
    bench.scheduler.direct(Mode.DECODE_LED, 1000)
    taken: list[float] = []
    num_prompt_tokens: list[int] = []
    while bench.scheduler.load(num_sending=0, num_receiving=0).uncomputed_tokens:
        plan, _ = bench.plan()
        assert plan is not None
        num_prompt_tokens.append(sum(row.num_tokens for row in plan.rows if not row.is_decode))
        taken.append(0.01 + 0.001 * num_prompt_tokens[-1])
        bench.finish(plan)
        bench.scheduler.note_step(taken[-1], plan)
    average = sum(taken) / len(taken)
    assert 0.04 < average < 0.055
    told = bench.scheduler.rates().prefill_tokens_per_second
    assert told == pytest.approx(1200 / sum(taken), rel=0.1), "steps that hold them back count"
    assert min(tokens for tokens in num_prompt_tokens if tokens) >= 8, "no chunk too small"


def test_prompts_are_not_starved_by_decodes_that_are_slower_than_their_sla() -> None:
    bench = Bench(budget=64, num_blocks=400)
    bench.add(new_request("a", prompt(3), max_tokens=300))
    run_timed(bench, 0.2, 0.2, 0.2)
    bench.add(new_request("b", prompt(160, kind=1), max_tokens=5))
    bench.scheduler.direct(Mode.DECODE_LED, 1000)
    run_timed(bench, *[0.2] * 60)
    assert not bench.scheduler.load(num_sending=0, num_receiving=0).uncomputed_tokens


def test_a_second_chunk_waits_for_the_time_of_the_first() -> None:
    bench = Bench(budget=64, num_blocks=400)
    bench.add(new_request("a", prompt(3), max_tokens=300))
    run_timed(bench, 0.01, 0.01, 0.01)
    bench.add(new_request("b", prompt(64, kind=1), max_tokens=5))
    run_timed(bench, 0.07)
    bench.add(new_request("c", prompt(300, kind=2), max_tokens=5))
    bench.scheduler.direct(Mode.DECODE_LED, 1000)
    run_timed(bench, *[0.01] * 10)
    plans = [bench.plan()[0] for _ in range(2)]
    mixed = [plan is not None and any(not row.is_decode for row in plan.rows) for plan in plans]
    assert sum(mixed) <= 1


def test_a_step_of_no_time_is_no_measurement() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(8), max_tokens=9))
    run_timed(bench, 0.0, 0.0)
    assert bench.scheduler.rates().prefill_tokens_per_second == 0.0
    assert bench.scheduler.rates().decode_step_seconds == 0.0
