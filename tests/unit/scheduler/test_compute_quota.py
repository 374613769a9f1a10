"""What prompts may take of a step's time, on a clock by hand."""

import pytest

from common.scheduler.attention_cost import AttentionCost, Chunk
from common.scheduler.quota import Allowance
from common.scheduler.steps import StepPlan
from tests.support.scheduler_bench import Bench, new_request

PAIR, TOKEN, CHUNK = 1e-5, 1e-3, 2e-3


def prompt(length: int, kind: int = 0) -> list[int]:
    return [1000 * kind + place for place in range(length)]


def seconds_of(plan: StepPlan) -> float:
    """What a step takes here: decodes 4 ms each, prompts by pairs, tokens and chunks."""
    truth = AttentionCost(CHUNK, PAIR, TOKEN)
    return sum(
        0.004 if row.is_decode else truth.seconds(Chunk(row.start, row.num_tokens))
        for row in plan.rows
    )


def run(bench: Bench, max_steps: int = 1000) -> list[StepPlan]:
    """Run to the end; return what was planned."""
    plans: list[StepPlan] = []
    while len(plans) < max_steps:
        plan, _ = bench.plan()
        if plan is None:
            break
        plans.append(plan)
        bench.finish(plan)
        bench.scheduler.note_step(seconds_of(plan), plan)
    assert bench.violations == []
    return plans


def chunks_of(plan: StepPlan) -> list[int]:
    return [row.num_tokens for row in plan.rows if not row.is_decode]


def learn(bench: Bench, kind: int = 50) -> None:
    """Compute prompts of several lengths, so that the three parts of the cost are known."""
    for number, length in enumerate((3, 9, 20, 33, 64, 90, 120, 200, 7, 150)):
        bench.add(new_request(f"l{kind}-{number}", prompt(length, kind + number), max_tokens=1))
        run(bench)


def test_without_a_quota_tokens_alone_bound_a_step() -> None:
    bench = Bench(budget=64, num_blocks=400)
    learn(bench)
    bench.add(new_request("a", prompt(200), max_tokens=1))
    assert [chunks_of(plan) for plan in run(bench)] == [[64], [64], [64], [8]]
    assert bench.scheduler.quota_error == 0


def test_attention_is_the_part_of_a_prompts_time_that_grows_with_what_it_attends_to() -> None:
    bench = Bench(budget=256, num_blocks=800)
    bench.add(new_request("a", prompt(40), max_tokens=3))
    plan, _ = bench.plan()
    assert plan is not None
    assert bench.scheduler.attention_seconds(plan) == 0, "nothing was measured yet"
    bench.finish(plan)
    run(bench)
    for kind in (50, 60, 70):
        learn(bench, kind)
    assert bench.scheduler.attention_seconds(plan) == pytest.approx(PAIR * 40 * 20, rel=0.1)
    bench.add(new_request("b", prompt(8, 1), max_tokens=3))
    decode = run(bench)[-1]
    assert decode.rows[0].is_decode
    assert bench.scheduler.attention_seconds(decode) == 0


def test_the_first_step_is_bounded_by_tokens_and_later_ones_by_their_time() -> None:
    bench = Bench(budget=64, num_blocks=400, quota_seconds=0.02)
    bench.add(new_request("a", prompt(200), max_tokens=1))
    plans = run(bench)
    assert chunks_of(plans[0]) == [64]
    assert max(seconds_of(plan) for plan in plans[1:]) < 2 * 0.02
    assert sum(plan.num_tokens for plan in plans) == 200


def test_steps_keep_to_a_quota_once_it_is_known_what_prompts_cost() -> None:
    bench = Bench(budget=256, num_blocks=800, quota_seconds=0.05)
    learn(bench)
    for number, length in enumerate((300, 20, 20, 4, 150)):
        bench.add(new_request(f"r{number}", prompt(length, number), max_tokens=1))
    plans = run(bench)
    taken = [seconds_of(plan) for plan in plans]
    assert max(taken) < 0.05 * 1.05
    assert sum(taken) / len(taken) > 0.6 * 0.05, "and they use it"
    first = [row.sequence.request.request_id for plan in plans for row in plan.rows]
    assert list(dict.fromkeys(first)) == [f"r{number}" for number in range(5)]


def test_chunks_get_smaller_where_they_attend_to_more() -> None:
    bench = Bench(budget=256, num_blocks=2000, quota_seconds=0.05)
    learn(bench)
    bench.add(new_request("a", prompt(600), max_tokens=1))
    sizes = [chunks_of(plan)[0] for plan in run(bench)]
    assert sizes[0] > 2 * sizes[-2] > 0
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert all(size % bench.block_size == 0 for size in sizes[:-1])


def test_a_quota_that_is_too_small_leaves_a_block_a_step() -> None:
    bench = Bench(budget=64, num_blocks=400, quota_seconds=1e-6)
    learn(bench)
    bench.add(new_request("a", prompt(18), max_tokens=1))
    assert [chunks_of(plan) for plan in run(bench)] == [[4], [4], [4], [4], [2]]


def test_a_prompt_is_not_admitted_to_a_step_that_has_no_time_left() -> None:
    bench = Bench(budget=64, num_blocks=400, quota_seconds=0.02)
    learn(bench)
    bench.add(new_request("a", prompt(100), max_tokens=1))
    bench.add(new_request("b", prompt(100, 1), max_tokens=1))
    plan, _ = bench.plan()
    assert plan is not None
    load = bench.scheduler.load(num_sending=0, num_receiving=0)
    assert (load.num_prefilling, load.num_waiting) == (1, 1)
    bench.finish(plan)
    run(bench)


def test_steps_with_decodes_teach_nothing_and_their_decodes_are_not_counted() -> None:
    bench = Bench(budget=64, num_blocks=400, quota_seconds=0.03)
    learn(bench)
    before = bench.scheduler._quota.cost
    bench.add(new_request("d", prompt(1, 7), max_tokens=40))
    first = run(bench, 1)
    after = bench.scheduler._quota.cost
    assert after != before, "it computed a prompt alone"
    bench.add(new_request("a", prompt(120), max_tokens=1))
    plans = run(bench)
    assert bench.scheduler._quota.cost == after
    both = [plan for plan in plans if len(plan.rows) == 2]
    prompts = [seconds_of(plan) - 0.004 for plan in both]
    assert first
    assert 0.6 * 0.03 < max(prompts) < 1.05 * 0.03


def test_the_error_of_predictions_is_told_and_falls() -> None:
    bench = Bench(budget=256, num_blocks=800, quota_seconds=0.05)
    bench.add(new_request("a", prompt(600), max_tokens=1))
    run(bench)
    first = bench.scheduler.quota_error
    assert first > 0.02
    for kind in (50, 60, 70):
        learn(bench, kind)
    assert bench.scheduler.quota_error < 0.05
    assert bench.scheduler.quota_error < first


def test_an_allowance_closes_with_the_first_prompt_that_does_not_fit() -> None:
    allowance = Allowance(AttentionCost(1.0, 0.0, 1.0), 10.0, min_tokens=4)
    assert (allowance.take(Chunk(0, 3)), allowance.is_spent) == (3, False)
    assert (allowance.take(Chunk(0, 9)), allowance.is_spent) == (5, True)
    assert allowance.take(Chunk(0, 1)) == 0


def test_an_allowance_is_spent_when_not_even_one_token_fits() -> None:
    allowance = Allowance(AttentionCost(1.0, 0.0, 1.0), 10.0)
    assert not allowance.is_spent
    assert (allowance.take(Chunk(0, 8)), allowance.is_spent) == (8, True)


def test_the_least_of_a_first_prompt_is_taken_whatever_it_costs() -> None:
    cost = AttentionCost(1.0, 0.0, 1.0)
    assert Allowance(cost, 0.5, min_tokens=4).take(Chunk(0, 9)) == 4
    assert Allowance(cost, 0.5, min_tokens=4).take(Chunk(0, 2)) == 2
    with pytest.raises(ValueError, match="at least 0"):
        Allowance(cost, 0.5, min_tokens=0)
