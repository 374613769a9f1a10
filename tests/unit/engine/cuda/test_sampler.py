"""Draws on a device equal those of the CPU engine's sampler, for every parameter."""

from typing import Any

import pytest
import torch

from common.engine.cuda.sampler import DeviceSampler, Draw, is_plain
from common.engine.interface import SampleSpec
from common.engine.sampler import sample
from common.sampling import SampledToken, SamplingParams

VOCAB = 500


def params(**changes: Any) -> SamplingParams:  # Any: fields of several types
    return SamplingParams(**({"seed": 3, "max_tokens": 50, "num_logprobs": 4} | changes))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 5.0},
    "cold": {"temperature": 0.05},
    "greedy": {"temperature": 0.0},
    "no logprobs": {"num_logprobs": None},
    "own logprob": {"num_logprobs": 0},
    "top_k": {"top_k": 7},
    "top_k of all": {"top_k": 10_000},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    "bias": {"logit_bias": {3: 4.0, 499: 5.0, 5000: 9.0, 7: float("inf")}},
    "greedy bias": {"logit_bias": {3: 100.0}, "temperature": 0.0},
    "repetition": {"repetition_penalty": 1.7},
    "greedy repetition": {"repetition_penalty": 0.5, "temperature": 0.0},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": -0.4},
    "frequency": {"frequency_penalty": 2.0, "temperature": 0.0},
    "min_tokens": {"min_tokens": 9, "eos_token_ids": (1, 2), "stop_token_ids": (600,)},
    "greedy min_tokens": {"min_tokens": 9, "eos_token_ids": (11,), "temperature": 0.0},
    "everything": {
        "temperature": 1.3,
        "top_k": 100,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {9: 1.0},
        "min_tokens": 20,
        "eos_token_ids": (9,),
    },
}


def draw(logits: torch.Tensor, specs: list[tuple[int, SampleSpec]]) -> list[SampledToken | None]:
    draws = [Draw(row, spec) for row, spec in specs]
    values, ids = logits.max(dim=1)
    sampler = DeviceSampler(logits.shape[1], torch.device("cpu"))
    return sampler.draw(logits, (values, ids), draws).to_host().tokens(draws)


def assert_same(ours: list[SampledToken | None], expected: list[SampledToken | None]) -> None:
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [i for i, _ in one.top_logprobs] == [i for i, _ in other.top_logprobs]
        assert [v for _, v in one.top_logprobs] == pytest.approx(
            [v for _, v in other.top_logprobs], abs=1e-5
        )


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def specs_of(name: str) -> list[tuple[int, SampleSpec]]:
    output = [5, 6, 6, 11, 600]
    return [
        (row, SampleSpec(params(seed=seed, **CASES[name]), choice, (1, 2, 5, 300), output))
        for row in range(4)
        for seed, choice in ((1, 0), (2, 0), (2, 1))
    ]


@pytest.mark.parametrize("name", list(CASES))
def test_each_parameter_draws_what_the_cpu_draws(name: str, logits: torch.Tensor) -> None:
    specs = specs_of(name)
    kept = logits.clone()
    assert_same(draw(logits, specs), sample(logits, specs))
    assert torch.equal(logits, kept)


def test_all_parameters_in_one_step_do_not_disturb_each_other(logits: torch.Tensor) -> None:
    """More draws than are computed at a time, in an order that mixes the kinds."""
    specs = [pair for name in CASES for pair in specs_of(name)]
    specs.sort(key=lambda pair: pair[0])
    assert len(specs) > 3 * 64
    assert_same(draw(logits, specs), sample(logits, specs))


def test_pending_tokens_count_for_the_position_of_a_draw(logits: torch.Tensor) -> None:
    drawn = params(temperature=2.0)
    pending = [(0, SampleSpec(drawn, 0, (), [4, 4], num_pending=3))]
    collected = [(0, SampleSpec(drawn, 0, (), [4] * 5))]
    assert draw(logits, pending) == draw(logits, collected)
    assert draw(logits, pending) != draw(logits, [(0, SampleSpec(drawn, 0, (), [4, 4]))])
    banned = params(temperature=0.0, min_tokens=5, eos_token_ids=(int(logits[0].argmax()),))
    assert is_plain([Draw(0, SampleSpec(params(temperature=0.0, num_logprobs=None), 0, (), ()))], 1)
    free = [(0, SampleSpec(banned, 0, (), [4, 4], num_pending=3))]
    assert_same(draw(logits, free), sample(logits, free))


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 41, 300]] = 2.0
    logits[0, 7] = -0.0
    for changes in ({"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.01}, {}):
        specs = [(0, SampleSpec(params(num_logprobs=6, **changes), 0, (), ()))]
        assert_same(draw(logits, specs), sample(logits, specs))


def test_rows_that_are_no_numbers_have_no_token(logits: torch.Tensor) -> None:
    logits[0, 3] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = -float("inf")
    kinds = [params(), params(temperature=0.0), params(temperature=0.0, logit_bias={1: 1.0})]
    bans_all = params(min_tokens=9, eos_token_ids=tuple(range(VOCAB)))
    specs = [(row, SampleSpec(kind, 0, (), ())) for row in range(4) for kind in kinds]
    specs.append((3, SampleSpec(bans_all, 0, (), ())))
    ours = draw(logits, specs)
    assert_same(ours, sample(logits, specs))
    assert [token is None for token in ours] == [True] * 9 + [False] * 3 + [True]
