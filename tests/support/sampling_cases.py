"""Draws with every sampling parameter, and how two samplers are compared."""

from typing import Any

import pytest

from common.engine.interface import SampleSpec
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


def specs_of(name: str) -> list[tuple[int, SampleSpec]]:
    output = [5, 6, 6, 11, 600]
    return [
        (row, SampleSpec(params(seed=seed, **CASES[name]), choice, (1, 2, 5, 300), output))
        for row in range(4)
        for seed, choice in ((1, 0), (2, 0), (2, 1))
    ]


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
