"""Sampling semantics, parameter by parameter."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from common.engine.draws import uniform
from common.engine.interface import SampleSpec
from common.engine.sampler import sample
from common.sampling import SampledToken, SamplingParams

EOS, STOP = 4, 5


def spec(
    *, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), choice: int = 0, **changes: Any
) -> SampleSpec:  # Any: whatever field of SamplingParams a case sets
    given = {"seed": 1, "max_tokens": 10, "temperature": 0.0} | changes
    return SampleSpec(SamplingParams(**given), choice, prompt, output)


def draw(logits: list[float], one: SampleSpec) -> SampledToken | None:
    return sample(torch.tensor([logits]), [(0, one)])[0]


def drawn_id(logits: list[float], one: SampleSpec) -> int:
    token = draw(logits, one)
    assert token is not None
    return token.token_id


LOGITS = [1.0, 3.0, 2.5, 2.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param(spec(), 1, id="greedy takes the largest"),
        pytest.param(spec(logit_bias={3: 1.5}), 3, id="a bias lifts a token"),
        pytest.param(spec(logit_bias={1: -100.0}), 2, id="a bias sinks a token"),
        pytest.param(spec(logit_bias={99: 100.0}), 1, id="ids beyond are ignored"),
        pytest.param(spec(logit_bias={0: math.inf, 2: math.nan}), 1, id="no number is ignored"),
        pytest.param(spec(repetition_penalty=2.0, prompt=(1,)), 2, id="repetition sees the prompt"),
        pytest.param(spec(repetition_penalty=2.0, output=(1,)), 2, id="repetition sees the output"),
        pytest.param(
            spec(repetition_penalty=2.0, prompt=(1, 1, 2)), 3, id="repetition counts once"
        ),
        pytest.param(
            spec(repetition_penalty=2.0, prompt=(99, -1)), 1, id="unknown ids are ignored"
        ),
        pytest.param(spec(presence_penalty=1.0, prompt=(1,)), 1, id="presence leaves the prompt"),
        pytest.param(spec(presence_penalty=0.6, output=(1,)), 2, id="presence sees the output"),
        pytest.param(spec(presence_penalty=0.4, output=(1, 1, 1)), 1, id="presence counts once"),
        pytest.param(
            spec(frequency_penalty=0.4, output=(1,)), 1, id="frequency once is too little"
        ),
        pytest.param(spec(frequency_penalty=0.4, output=(1, 1)), 2, id="frequency counts"),
        pytest.param(
            spec(frequency_penalty=-2.0, output=(0, 0)), 0, id="frequency may be negative"
        ),
        pytest.param(spec(min_tokens=1, eos_token_ids=(1,)), 2, id="min_tokens bans eos"),
        pytest.param(spec(min_tokens=1, stop_token_ids=(1,)), 2, id="min_tokens bans stop tokens"),
        pytest.param(
            spec(min_tokens=1, eos_token_ids=(1, 900), output=(0,)), 1, id="min_tokens is over"
        ),
        pytest.param(
            spec(min_tokens=1, eos_token_ids=(1,), logit_bias={1: 100.0}),
            2,
            id="a ban beats a bias",
        ),
        pytest.param(
            spec(logit_bias={1: -3.5}, repetition_penalty=8.0, prompt=(1, 2, 3)),
            0,
            id="the penalty comes after the bias",
        ),
    ],
)
def test_greedy_takes_the_largest_processed_logit(one: SampleSpec, expected: int) -> None:
    assert drawn_id(LOGITS, one) == expected


def test_a_repetition_penalty_makes_negative_logits_smaller() -> None:
    assert drawn_id([-1.0, -1.5], spec(repetition_penalty=2.0, prompt=(0,))) == 1


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert drawn_id([0.0, 2.0, 2.0, 2.0], spec()) == 1
    assert drawn_id([0.0, 2.0, 2.0, 2.0], spec(logit_bias={0: 2.0})) == 0


def kept(logits: list[float], **changes: Any) -> set[int]:  # Any: see spec
    """Return all ids that many draws give."""
    given = {"temperature": 1.0} | changes
    pairs = [(0, spec(choice=choice, **given)) for choice in range(300)]
    tokens = sample(torch.tensor([logits]), pairs)
    return {token.token_id for token in tokens if token is not None}


PROBABILITIES = [0.1, 0.4, 0.05, 0.25, 0.2]
FLAT = [math.log(p) for p in PROBABILITIES]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, {0, 1, 2, 3, 4}, id="all off"),
        pytest.param({"top_k": 2}, {1, 3}, id="top-k"),
        pytest.param({"top_k": 50}, {0, 1, 2, 3, 4}, id="top-k beyond the vocabulary"),
        pytest.param({"top_p": 0.39}, {1}, id="top-p keeps the first"),
        pytest.param({"top_p": 0.41}, {1, 3}, id="top-p keeps the token that crosses"),
        pytest.param({"top_p": 0.86}, {0, 1, 3, 4}, id="top-p near the end"),
        pytest.param({"min_p": 0.3}, {1, 3, 4}, id="min-p is relative to the best"),
        pytest.param({"min_p": 1.0}, {1}, id="min-p of 1"),
        pytest.param({"top_k": 3, "top_p": 0.75}, {1, 3}, id="top-p counts what top-k left"),
        pytest.param({"temperature": 0.05}, {1}, id="a low temperature"),
        pytest.param({"temperature": 1e-9}, {1}, id="a temperature of nearly 0"),
        pytest.param({"logit_bias": {1: -100.0}, "top_k": 1}, {3}, id="a bias comes first"),
    ],
)
def test_filters_keep_exactly_these_tokens(changes: dict[str, Any], expected: set[int]) -> None:
    assert kept(FLAT, **changes) == expected


def test_ties_at_the_edge_of_a_filter_stay() -> None:
    logits = [1.0, 1.0, 1.0, -9.0]
    assert kept(logits, top_k=1) == {0, 1, 2}
    assert kept(logits, top_p=0.1) == {0, 1, 2}


def test_top_p_on_a_large_flat_vocabulary_looks_beyond_its_candidates() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, generator=generator) * 0.1
    order = logits.double().softmax(0).sort(descending=True)
    count = int((order.values.cumsum(0) < 0.5).sum()) + 1
    allowed = set(order.indices[:count].tolist())
    assert count > 1024
    specs = [(0, spec(temperature=1.0, top_p=0.5, choice=choice)) for choice in range(200)]
    tokens = sample(logits.unsqueeze(0), specs)
    assert {token.token_id for token in tokens if token is not None} <= allowed


def test_draws_follow_the_distribution() -> None:
    number = 10_000
    specs = [(0, spec(temperature=1.0, choice=choice)) for choice in range(number)]
    counts = Counter(
        token.token_id for token in sample(torch.tensor([FLAT]), specs) if token is not None
    )
    for token_id, probability in enumerate(PROBABILITIES):
        spread = math.sqrt(probability * (1 - probability) / number)
        assert abs(counts[token_id] / number - probability) < 5 * spread


def test_a_draw_depends_on_seed_choice_and_position_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 500, generator=generator) * 0.1
    one = spec(temperature=1.0, seed=9, choice=2, output=(1, 2, 3))
    alone = sample(logits[1:2], [(0, one)])[0]
    among = sample(logits, [(0, spec()), (1, one), (2, spec(temperature=2.0)), (1, one)])
    assert alone == among[1] == among[3]
    other = [
        spec(temperature=1.0, seed=11, choice=2, output=(1, 2, 3)),
        spec(temperature=1.0, seed=9, choice=3, output=(1, 2, 3)),
        spec(temperature=1.0, seed=9, choice=2, output=(1, 2)),
    ]
    assert all(draw(logits[1].tolist(), changed) != alone for changed in other)


def test_uniform_numbers_are_spread_and_distinct() -> None:
    numbers = [
        uniform(seed, choice, position)
        for seed in (0, 1, 2**63 - 1)
        for choice in range(20)
        for position in range(100)
    ]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0.0
    assert max(numbers) < 1.0
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02


def test_uniform_numbers_never_change() -> None:
    """Streams are resumed by other versions too: these values are part of the contract."""
    assert uniform(0, 0, 0) == 0.9840321660442114
    assert uniform(12345, 1, 2) == 0.5983106965131749
    assert uniform(2**63 - 1, 127, 10**6) == 0.032407844593464574


def test_logprobs_are_of_the_models_own_distribution() -> None:
    token = draw(FLAT, spec(num_logprobs=3, temperature=2.0, top_k=1, logit_bias={2: 50.0}))
    assert token is not None
    assert token.token_id == 2
    assert token.logprob == pytest.approx(math.log(0.05), abs=1e-6)
    assert [token_id for token_id, _ in token.top_logprobs] == [1, 3, 4]
    assert [p for _, p in token.top_logprobs] == pytest.approx(
        [math.log(0.4), math.log(0.25), math.log(0.2)], abs=1e-6
    )


@pytest.mark.parametrize(("count", "expected"), [(0, []), (2, [1, 2]), (20, [1, 2, 3, 0])])
def test_alternatives_come_best_first_and_lower_ids_first(count: int, expected: list[int]) -> None:
    token = draw([0.0, 2.0, 2.0, 2.0], spec(num_logprobs=count))
    assert token is not None
    assert token.logprob == pytest.approx(2.0 - math.log(3 * math.exp(2.0) + 1.0), abs=1e-6)
    assert [token_id for token_id, _ in token.top_logprobs] == expected


def test_no_logprobs_unless_asked() -> None:
    assert draw(FLAT, spec()) == SampledToken(1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_holds_no_numbers_fails_alone(bad: float) -> None:
    logits = torch.tensor([FLAT, [1.0, bad, 0.0, 0.0, 0.0], FLAT])
    specs = [(0, spec()), (1, spec()), (1, spec(temperature=1.0)), (2, spec(temperature=1.0))]
    first, greedy, random, last = sample(logits, specs)
    assert first == SampledToken(1)
    assert greedy is None
    assert random is None
    assert last is not None


def test_a_row_whose_every_token_is_banned_fails() -> None:
    assert draw([1.0, 2.0], spec(min_tokens=1, eos_token_ids=(0,), stop_token_ids=(1,))) is None


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([LOGITS])
    sample(logits, [(0, spec(logit_bias={0: 9.0}, repetition_penalty=3.0, prompt=(1,)))])
    assert torch.equal(logits, torch.tensor([LOGITS]))
