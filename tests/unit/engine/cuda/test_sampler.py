"""Draws on a device equal those of the CPU engine's sampler, for every parameter."""

import pytest
import torch

from common.engine.cuda.sampler import DeviceSampler, Draw, is_plain
from common.engine.interface import SampleSpec
from common.engine.sampler import sample
from common.sampling import SampledToken
from tests.support.sampling_cases import CASES, VOCAB, assert_same, params, specs_of


def draw(logits: torch.Tensor, specs: list[tuple[int, SampleSpec]]) -> list[SampledToken | None]:
    draws = [Draw(row, spec) for row, spec in specs]
    values, ids = logits.max(dim=1)
    sampler = DeviceSampler(logits.shape[1], torch.device("cpu"))
    return sampler.draw(logits, (values, ids), draws).to_host().tokens(draws)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


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
