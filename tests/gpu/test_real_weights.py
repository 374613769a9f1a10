"""The default model's weights on a GPU beside the CPU engine's answers."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.sampling import SampledToken, SamplingParams
from tests.support.cuda_runs import PooledCudaEngine
from tests.support.engine_runs import PooledEngine, row
from tests.support.gpu import why_no_gpu
from tests.support.prompts import Encode, all_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_gpu() is not None, reason=str(why_no_gpu())),
]

MIN_PROMPTS = 40
MAX_PROMPT_TOKENS = 1000
NUM_NEW = 16
NUM_THREADS = max(1, len(os.sched_getaffinity(0)) // 2)
TIE = 1e-3
LOGPROB_TOLERANCE = 1e-3
NUM_REQUESTS = 200
GREEDY = SamplingParams(seed=0, max_tokens=1000, temperature=0.0, num_logprobs=20)


@pytest.fixture(scope="module")
def prompts(encode: Encode) -> list[list[int]]:
    encoded = [prompt.token_ids(encode) for prompt in all_prompts()]
    return [ids for ids in encoded if len(ids) <= MAX_PROMPT_TOKENS]


@pytest.fixture(scope="module")
def answers(model_folder: Path, prompts: list[list[int]]) -> list[list[SampledToken]]:
    """What the CPU engine draws in fp32."""
    return generate_on_cpu(model_folder, "float32", prompts, NUM_NEW)


def generate_on_cpu(
    folder: Path, dtype: str, prompts: list[list[int]], num_new: int
) -> list[list[SampledToken]]:
    """Prefill one prompt after the other, then decode all of them together."""
    engine = PooledEngine(
        folder, dtype=dtype, num_blocks=64 * len(prompts), num_threads=NUM_THREADS
    )
    tables = [engine.blocks_for(len(prompt) + num_new) for prompt in prompts]
    outputs = [
        [engine.execute(row(prompt, 0, table, params=GREEDY))[0][0]]
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    for step in range(num_new - 1):
        rows = [
            row([tokens[-1].token_id], len(prompt) + step, table, params=GREEDY)
            for prompt, tokens, table in zip(prompts, outputs, tables, strict=True)
        ]
        for tokens, (token,) in zip(outputs, engine.execute(*rows), strict=True):
            tokens.append(token)
    return outputs


def is_tie(token: SampledToken) -> bool:
    return token.top_logprobs[0][1] - token.top_logprobs[1][1] < TIE


def test_fp32_draws_the_cpu_engines_tokens(
    model_folder: Path,
    prompts: list[list[int]],
    answers: list[list[SampledToken]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = PooledCudaEngine(model_folder, device="cuda", num_blocks=64 * len(prompts))
    num_ties = 0
    for prompt, expected in zip(prompts, answers, strict=True):
        (drawn,) = engine.generate([prompt], GREEDY, NUM_NEW, ahead=False)
        for theirs, ours in zip(expected, drawn, strict=True):
            if ours.token_id != theirs.token_id:
                assert is_tie(theirs), f"{ours.token_id} instead of {theirs.token_id}"
                num_ties += 1
                break  # what follows is another text
            assert ours.logprob == pytest.approx(theirs.logprob, abs=LOGPROB_TOLERANCE)
    with capsys.disabled():
        print(f"\n{len(prompts)} prompts, {NUM_NEW} tokens each, {num_ties} parted by ties")
    assert len(prompts) >= MIN_PROMPTS


def noise(
    expected: Sequence[Sequence[SampledToken]], told: Sequence[Sequence[SampledToken]]
) -> list[float]:
    """Return the largest difference of each prompt's best logprobs after it."""
    found = []
    for theirs, ours in zip(expected, told, strict=True):
        best, other = dict(theirs[0].top_logprobs), dict(ours[0].top_logprobs)
        both = best.keys() & other.keys()
        assert len(both) >= 10, "other tokens are best"
        found.append(max(abs(best[token_id] - other[token_id]) for token_id in both))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_logits_are_fp32_ones_with_the_types_own_noise(
    model_folder: Path,
    prompts: list[list[int]],
    answers: list[list[SampledToken]],
    dtype: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The noise of bfloat16 is what the CPU engine has in it."""
    cpu_noise = noise(answers, generate_on_cpu(model_folder, "bfloat16", prompts, 1))
    engine = PooledCudaEngine(
        model_folder, device="cuda", dtype=dtype, num_blocks=64 * len(prompts)
    )
    drawn = [engine.generate([prompt], GREEDY, 1, ahead=False)[0] for prompt in prompts]
    gpu_noise = noise(answers, drawn)
    mean = (sum(gpu_noise) / len(gpu_noise), sum(cpu_noise) / len(cpu_noise))
    with capsys.disabled():
        print(f"\n{dtype}: mean noise {mean[0]:.4f}, of bfloat16 on the CPU {mean[1]:.4f}")
    assert mean[0] <= 1.5 * mean[1]
    assert max(gpu_noise) <= 2 * max(cpu_noise)


def test_200_requests_draw_numbers(model_folder: Path, prompts: list[list[int]]) -> None:
    engine = PooledCudaEngine(
        model_folder, device="cuda", dtype="bfloat16", num_blocks=64 * NUM_REQUESTS
    )
    many = [prompts[place % len(prompts)] for place in range(NUM_REQUESTS)]
    hot = SamplingParams(seed=3, max_tokens=1000, temperature=1.0, top_p=0.9, num_logprobs=0)
    for start in range(0, NUM_REQUESTS, 8):
        group = [prompt[:120] for prompt in many[start : start + 8]]
        for tokens in engine.generate(group, hot, 24, ahead=True):
            assert len(tokens) == 24
            assert all(token.logprob is not None and token.logprob <= 0 for token in tokens)
