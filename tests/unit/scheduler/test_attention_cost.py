"""What attention costs, as learnt from chunks."""

import math
from random import Random

import pytest

from common.scheduler.attention_cost import (
    DEFAULT_COST,
    MAX_FACTOR,
    AttentionCost,
    AttentionCostFit,
    Chunk,
)

PLACES = [Chunk(0, 64), Chunk(1000, 512), Chunk(30_000, 429), Chunk(0, 8192), Chunk(60_000, 2048)]


def drawn(dice: Random) -> list[Chunk]:
    return [
        Chunk(dice.randrange(64_000), dice.randrange(1, 4096)) for _ in range(dice.randrange(1, 5))
    ]


def taught(true: AttentionCost, count: int, noise: float = 0.0, seed: int = 1) -> AttentionCostFit:
    fit, dice = AttentionCostFit(), Random(seed)
    for _ in range(count):
        chunks = drawn(dice)
        seconds = sum(map(true.seconds, chunks)) * math.exp(dice.gauss(0, noise))
        fit.observe(chunks, seconds)
    return fit


def worst(fit: AttentionCostFit, true: AttentionCost) -> float:
    """Largest error over chunks of all kinds, as a share of their time or of a short step's."""
    short = true.seconds(Chunk(1000, 1024))
    return max(
        abs(fit.cost.seconds(c) - true.seconds(c)) / max(true.seconds(c), short) for c in PLACES
    )


def test_pairs_are_counted_as_the_paper_counts_them() -> None:
    assert Chunk(100, 10).num_pairs == 10 * 105
    assert AttentionCost(1.0, 2.0, 3.0).seconds(Chunk(100, 10)) == 1 + 2 * 1050 + 30
    assert AttentionCost(1.0, 2.0, 3.0).seconds(Chunk(100, 0)) == 0.0


@pytest.mark.parametrize("parts", [(0, 0, 0), (1, 0, 0), (-1, 1, 1), (0, math.nan, 1)])
def test_a_cost_that_does_not_grow_with_the_tokens_is_refused(
    parts: tuple[float, float, float],
) -> None:
    with pytest.raises(ValueError, match=r"cost time|not negative"):
        AttentionCost(*parts)


@pytest.mark.parametrize(
    "true",
    [
        DEFAULT_COST,
        AttentionCost(5e-5, 4e-9, 2e-7),
        AttentionCost(2e-2, 3e-7, 4e-4),  # a CPU: hundreds of times slower
        AttentionCost(0.0, 2e-10, 1e-6),
    ],
)
def test_it_learns_any_machine_from_some_hundred_steps(true: AttentionCost) -> None:
    assert worst(taught(true, 300), true) < 0.03
    assert worst(taught(true, 300, noise=0.1), true) < 0.15


def test_one_observation_gives_the_scale() -> None:
    true = AttentionCost(2e-2, 1e-7, 1e-4)  # a hundred times the default
    fit = taught(true, 1)
    assert worst(fit, true) < 0.05


def test_chunks_that_are_all_alike_still_give_a_cost_that_grows() -> None:
    fit = AttentionCostFit()
    for _ in range(200):
        fit.observe([Chunk(1000, 512)], 0.2)
    assert fit.cost.seconds(Chunk(1000, 512)) == pytest.approx(0.2, rel=0.01)
    sizes = [fit.cost.seconds(Chunk(1000, size)) for size in range(1, 2000, 50)]
    assert sizes == sorted(sizes)
    assert fit.cost.seconds(Chunk(50_000, 512)) > 0.2


def test_times_that_fall_with_the_length_do_not_make_a_coefficient_negative() -> None:
    fit = AttentionCostFit()
    for size in range(1, 400):
        fit.observe([Chunk(0, size)], 1.0 / size)
    cost = fit.cost
    assert min(cost.chunk_seconds, cost.pair_seconds, cost.token_seconds) >= 0
    assert cost.seconds(Chunk(0, 400)) >= cost.seconds(Chunk(0, 1)) > 0


def test_one_slow_step_changes_little() -> None:
    true = DEFAULT_COST
    fit = taught(true, 200)
    fit.observe([Chunk(1000, 512)], 3600.0)
    assert worst(fit, true) < 0.25


def test_a_machine_that_became_slower_is_noticed() -> None:
    fit = taught(DEFAULT_COST, 200)
    slower = AttentionCost(2e-3, 1e-8, 1e-5)
    dice = Random(2)
    for _ in range(2000):
        chunks = drawn(dice)
        fit.observe(chunks, sum(map(slower.seconds, chunks)))
    assert worst(fit, slower) < 0.05


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_took_no_time_teaches_nothing(seconds: float) -> None:
    fit = AttentionCostFit()
    fit.observe([Chunk(0, 10)], seconds)
    fit.observe([], 1.0)
    fit.observe([Chunk(5, 0)], 1.0)
    assert (fit.num_observed, fit.cost) == (0, DEFAULT_COST)


def test_coefficients_stay_within_bounds_of_the_first_model_at_the_scale_seen() -> None:
    fit, dice = AttentionCostFit(), Random(3)
    for _ in range(300):
        fit.observe(drawn(dice), math.exp(dice.uniform(-12, 12)))
    cost = fit.cost
    assert all(
        math.isfinite(part) and part >= 0
        for part in (cost.chunk_seconds, cost.pair_seconds, cost.token_seconds)
    )
    # The times seen are within e^12 of a second, and those expected above 1e-7 seconds.
    assert cost.pair_seconds <= MAX_FACTOR * DEFAULT_COST.pair_seconds * math.exp(12) / 1e-7
