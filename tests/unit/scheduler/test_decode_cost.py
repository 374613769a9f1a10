"""What steps that only decode cost, learned from their times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.scheduler.decode_cost import HALF_LIFE_SECONDS, MAX_TIMES, CostMeter, DecodeCost

TRUE = DecodeCost(0.0045, 0.00001, 3e-8)


def learn(meter: CostMeter, batches: list[tuple[int, int]], true: DecodeCost = TRUE) -> None:
    for number, tokens in batches:
        meter.add(number, number * tokens, true.at(number, number * tokens))


def ramp(num_tokens: int, most: int = 40) -> list[tuple[int, int]]:
    """Batches that grow by one sequence, of contexts that grow by some tokens a step."""
    return [(n, num_tokens + 5 * step) for n in range(1, most) for step in range(4)]


def test_nothing_is_known_before_the_first_step() -> None:
    assert CostMeter().cost() == DecodeCost()
    assert not DecodeCost().is_known


def test_batches_of_one_size_and_context_tell_no_slope() -> None:
    meter = CostMeter()
    learn(meter, [(8, 1000)] * 20)
    cost = meter.cost()
    assert not cost.is_known
    assert cost.base == pytest.approx(TRUE.at(8, 8000))


def test_steps_of_one_context_predict_others_of_it() -> None:
    meter = CostMeter()
    learn(meter, ramp(5000))
    for number in (1, 10, 30, 60):
        tokens = number * 5010
        assert meter.cost().at(number, tokens) == pytest.approx(TRUE.at(number, tokens), rel=0.05)


def test_who_saw_short_contexts_alone_expects_no_less_of_long_ones() -> None:
    """Of one sequence and its 1 000 tokens together 0.04 ms is known; 5 000 cost 0.16 ms."""
    meter = CostMeter()
    learn(meter, ramp(1000, most=100))
    expected, true = meter.cost().at(40, 40 * 5000), TRUE.at(40, 40 * 5000)
    assert true * 0.9 < expected < true * 1.5


def test_steps_of_several_contexts_predict_any() -> None:
    """A worker that decoded short prompts knows what long ones cost, once it saw both."""
    meter = CostMeter()
    for tokens in (1000, 5000, 1000, 5000):
        learn(meter, ramp(tokens))
    for number, tokens in ((1, 1000), (200, 1000), (30, 5000), (20, 10_000)):
        known = meter.cost().at(number, number * tokens)
        assert known == pytest.approx(TRUE.at(number, number * tokens), rel=0.1), (number, tokens)


def test_an_even_load_goes_on_from_what_was_learned() -> None:
    meter = CostMeter()
    learn(meter, ramp(1000))
    learn(meter, [(20, 1000)] * 4000)
    cost = meter.cost()
    assert cost.at(20, 20_000) == pytest.approx(TRUE.at(20, 20_000), rel=1e-3)
    for number in (1, 60):
        tokens = number * 1000
        assert cost.at(number, tokens) == pytest.approx(TRUE.at(number, tokens), rel=0.05)


def test_contexts_that_grow_leave_what_a_sequence_costs_as_it_was() -> None:
    """Long answers of one batch: its size says nothing, its tokens do."""
    true = DecodeCost(0.02, 0.004, 2e-6)
    meter = CostMeter()
    learn(meter, [(n, 300) for _ in range(8) for n in range(1, 25)], true)
    learn(meter, [(24, 128 + step) for step in range(800)], true)
    assert meter.cost().at(12, 12 * 900) == pytest.approx(true.at(12, 12 * 900), rel=0.05)
    assert meter.cost().at(1, 900) == pytest.approx(true.at(1, 900), rel=0.05)


def test_steps_that_are_far_shorter_than_all_before_begin_anew() -> None:
    """The first step of a worker compiles what it needs."""
    meter = CostMeter()
    meter.add(1, 100, 60.0)
    learn(meter, ramp(1000))
    assert meter.cost().at(20, 20_000) == pytest.approx(TRUE.at(20, 20_000), rel=0.05)


def test_the_plane_goes_through_the_steps_of_late_however_steep_it_was() -> None:
    meter = CostMeter()
    learn(meter, ramp(10, most=10), DecodeCost(0.0, 0.4, 0.0))
    for _ in range(60):
        meter.add(9, 90, 1.2)
    cost = meter.cost()
    assert cost.at(9, 90) == pytest.approx(1.2, rel=0.1)
    assert cost.base >= 0


def test_a_host_that_stood_still_counts_as_a_few_steps() -> None:
    meter = CostMeter()
    learn(meter, ramp(1000))
    expected = meter.cost().at(20, 20_000)
    meter.add(20, 20_000, 60.0)
    assert meter.cost().at(20, 20_000) < (1 + MAX_TIMES) * expected


@given(
    st.lists(
        st.tuples(
            st.integers(1, 256), st.integers(1, 100_000), st.floats(1e-5, 3 * HALF_LIFE_SECONDS)
        ),
        min_size=1,
        max_size=60,
    )
)
def test_no_times_make_a_cost_negative(steps: list[tuple[int, int, float]]) -> None:
    meter = CostMeter()
    for number, tokens, seconds in steps:
        meter.add(number, number * tokens, seconds)
    assert min(meter.cost()) >= 0
    assert max(meter.cost()) < 1e6
