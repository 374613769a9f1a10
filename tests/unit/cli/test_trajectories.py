"""Made agents have the papers' statistics; trajectories are scaled, cut and copied."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from services.cli.traces.generator import SHAPES, ShapeName, TrajectoryShape, generate
from services.cli.traces.trajectory import (
    FIRST_TOKEN_ID,
    MARK_TOKENS,
    Part,
    Round,
    Statistics,
    Trajectory,
    cut,
    extended,
    scaled,
    statistics_of,
)

MEANS = ("turns", "append", "gen", "total", "context")


def agent(*rounds: tuple[int, int], name: str = "a") -> Trajectory:
    return Trajectory(
        name,
        tuple(
            Round((Part(f"{name} {place}", appended),), generated)
            for place, (appended, generated) in enumerate(rounds)
        ),
    )


def correlation(xs: list[float], ys: list[float]) -> float:
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True))
    spread = sum((x - mx) ** 2 for x in xs) * sum((y - my) ** 2 for y in ys)
    return covariance / spread**0.5


@pytest.mark.parametrize(("name", "seed"), [*((name, 0) for name in SHAPES), (ShapeName.K32, 1)])
def test_500_agents_have_the_means_of_the_table_within_2_percent(name, seed):
    shape = SHAPES[name]
    agents = generate(shape, 500, seed)
    found = statistics_of(agents)
    for mean in MEANS:
        assert getattr(found, mean) == pytest.approx(getattr(shape, mean), rel=0.02), mean
    assert max(of.num_tokens for of in agents) <= shape.max_len
    turns = [float(len(of.rounds)) for of in agents]
    of_turn = [of.num_tokens / len(of.rounds) for of in agents]
    assert correlation(turns, of_turn) < -0.5, "who takes many rounds adds little in each"


def test_the_share_of_a_prompt_that_was_there_before_is_that_of_the_paper():
    found = statistics_of(generate(SHAPES[ShapeName.K64], 100, 0))
    assert found.context / (found.context + found.append) == pytest.approx(0.987, abs=0.002)


def test_a_few_agents_already_have_about_the_means():
    found = statistics_of(generate(SHAPES[ShapeName.K32], 20, 3))
    for mean in MEANS:
        assert getattr(found, mean) == pytest.approx(
            getattr(SHAPES[ShapeName.K32], mean), rel=0.15
        ), mean


def test_a_shape_for_another_context_keeps_its_proportions():
    shape = SHAPES[ShapeName.K32].scaled_to(8192, turns=20)
    assert (shape.max_len, shape.turns) == (8192, 20)
    assert shape.append == pytest.approx(608 / 4 * 3)
    assert shape.log_variance == pytest.approx(SHAPES[ShapeName.K32].log_variance)
    agents = generate(shape, 200, 0)
    found = statistics_of(agents)
    for mean in MEANS:
        assert getattr(found, mean) == pytest.approx(getattr(shape, mean), rel=0.05), mean
    assert max(of.num_tokens for of in agents) <= 8192


@settings(max_examples=60, deadline=None)
@given(
    max_len=st.integers(64, 200_000),
    turns=st.floats(3, 2000),
    count=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_refused_or_made_within_its_bound(max_len, turns, count, seed):
    shape = SHAPES[ShapeName.K48].scaled_to(max_len, turns)
    if min(shape.append, shape.gen) < 1:
        with pytest.raises(ConfigError):
            generate(shape, count, seed)
        return
    agents = generate(shape, count, seed)
    assert len(agents) == count
    for of in agents:
        assert 0 < of.num_tokens <= max_len
        assert all(turn.num_appended_tokens >= 1 for turn in of.rounds)
        assert all(turn.num_generated_tokens >= 1 for turn in of.rounds)


def test_the_same_seed_makes_the_same_agents_and_another_does_not():
    shape = SHAPES[ShapeName.K32]
    assert generate(shape, 5, 1) == generate(shape, 5, 1) != generate(shape, 5, 2)
    prompts = [of.rounds[0].parts[0].token_ids(4096)[:64] for of in generate(shape, 5, 1)]
    assert len({tuple(prompt) for prompt in prompts}) == 5, "agents share no first block"


def test_rounds_too_short_for_the_context_are_refused():
    with pytest.raises(ConfigError, match="157 turns in a context of 256 tokens leave"):
        generate(SHAPES[ShapeName.K64].scaled_to(256), 1, 0)


def test_statistics_are_means_over_agents():
    agents = [agent((10, 2), (4, 2)), agent((100, 20))]
    assert statistics_of(agents) == Statistics(
        num_agents=2, turns=1.5, append=53.5, gen=11.0, total=69.0, context=3.0
    )
    assert {field.name for field in fields(TrajectoryShape)} >= set(MEANS)


def test_a_part_is_the_start_of_a_longer_one_of_its_seed():
    short, long, other = Part("s", 10), Part("s", 30), Part("t", 10)
    ids = long.token_ids(500)
    assert ids[:10] == short.token_ids(500) != other.token_ids(500)
    assert len(ids) == 30
    assert all(FIRST_TOKEN_ID <= token < 500 for token in ids)


def test_scaling_rounds_up_and_leaves_equal_parts_equal():
    shared = Part("system", 101)
    one = Trajectory("one", (Round((shared, Part("x", 7)), 3),))
    two = replace(one, name="two", rounds=(Round((shared, Part("y", 9)), 3),))
    halves = [scaled(of, 0.5).rounds[0] for of in (one, two)]
    assert halves[0].parts[0] == halves[1].parts[0] == Part("system", 51)
    assert [part.num_tokens for turn in halves for part in turn.parts] == [51, 4, 51, 5]
    assert [turn.num_generated_tokens for turn in halves] == [2, 2]
    assert scaled(one, 1.0) == one


def test_an_agent_ends_before_the_round_that_does_not_fit():
    whole = agent((10, 2), (4, 2), (1, 1))
    assert cut(whole, 20) == whole
    assert cut(whole, 19) == cut(whole, 18) == replace(whole, rounds=whole.rounds[:2])
    assert cut(whole, 17) == replace(whole, rounds=whole.rounds[:1])
    assert cut(whole, 100, max_rounds=2) == replace(whole, rounds=whole.rounds[:2])
    assert cut(whole, 11) is None


def test_a_copy_of_an_agent_shares_no_prefix_with_it():
    originals = [agent((10, 2), name="a"), agent((20, 2), name="b")]
    found = extended(originals, 5)
    assert found[:2] == originals
    assert [len(of.rounds) for of in found] == [1, 1, 2, 2, 2]
    assert found[4].rounds[1:] == originals[0].rounds
    marks = [of.rounds[0] for of in found[2:]]
    assert all((m.num_appended_tokens, m.num_generated_tokens) == (MARK_TOKENS, 1) for m in marks)
    assert len({m.parts[0].seed for m in marks}) == 3
    assert len({of.name for of in found}) == 5
    assert extended(originals, 1) == originals[:1]
