"""The engine for GPUs as several ranks, here on CPUs: all of it but CUDA's own libraries."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.engine.failure import EngineBroken
from common.sampling import SamplingParams
from tests.support.cuda_runs import PooledCudaEngine
from tests.support.engine_runs import row
from tests.support.parallel_runs import HEADS, CudaRanks, count_ties
from tests.support.tiny_models import save_tiny_model

NOISE = 1e-4
PROMPTS = [[*range(3, 8)], [*range(10, 50)], [*range(60, 69)]]
GREEDY = SamplingParams(seed=0, max_tokens=1000, temperature=0.0, num_logprobs=20)
RANDOM = SamplingParams(seed=5, max_tokens=1000, temperature=0.8, top_p=0.95, top_k=40)
PENALISED = SamplingParams(seed=5, max_tokens=1000, temperature=0.8, presence_penalty=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model("qwen3", path, **HEADS)
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[CudaRanks]:
    made = CudaRanks(folder, ("cpu", "cpu"), num_blocks=256)
    yield made
    made.close()


def test_steps_launched_ahead_continue_with_tokens_that_rank_0_draws(
    folder: Path, ranks: CudaRanks
) -> None:
    """The other rank reads each pending token in its own memory."""
    assert ranks.engine.max_in_flight == 2
    outputs = ranks.generate(PROMPTS, GREEDY, 12, ahead=True)
    expected = PooledCudaEngine(folder).generate(PROMPTS, GREEDY, 12, ahead=True)
    for output, reference in zip(outputs, expected, strict=True):
        if [t.token_id for t in output] == [t.token_id for t in reference]:
            assert count_ties(output, reference, NOISE) == 0
            continue
        pytest.fail("a tie, or other tokens; the fixed model has no ties")


@pytest.mark.parametrize("params", [RANDOM, PENALISED], ids=["random", "penalised"])
def test_random_draws_are_those_of_one_rank(
    folder: Path, ranks: CudaRanks, params: SamplingParams
) -> None:
    is_ahead = not params.has_penalties
    outputs = ranks.generate(PROMPTS, params, 12, ahead=is_ahead)
    expected = PooledCudaEngine(folder).generate(PROMPTS, params, 12, ahead=is_ahead)
    assert outputs == expected


def test_chunks_and_steps_without_draws_go_through_all_ranks(
    folder: Path, ranks: CudaRanks
) -> None:
    results = []
    for engine in (ranks, PooledCudaEngine(folder)):
        blocks, short = engine.blocks_for(60), engine.blocks_for(8)
        assert engine.execute(row([*range(3, 40)], 0, blocks, params=None)) == [()]
        drawn = engine.execute(
            row([*range(40, 55)], 37, blocks, params=GREEDY),
            row([5, 6, 7], 0, short, params=None),
            row([9], 0, engine.blocks_for(1), params=GREEDY),
        )
        results.append([drawn[0][0], drawn[2][0]])
    assert count_ties(*results, NOISE) == 0


def test_fp8_ranks_draw_what_one_rank_draws(folder: Path) -> None:
    scales = tuple(0.02 * (1 + at) for at in range(6))
    kind = {"kv_cache_dtype": "float8_e4m3", "scales": scales}
    ranks = CudaRanks(folder, ("cpu", "cpu"), kv_cache_dtype="float8_e4m3", scales=scales)
    try:
        outputs = ranks.generate(PROMPTS, GREEDY, 4, ahead=True)
        alone = PooledCudaEngine(folder, kv_cache_dtype=str(kind["kv_cache_dtype"]), scales=scales)
        expected = alone.generate(PROMPTS, GREEDY, 4, ahead=True)
        for output, reference in zip(outputs, expected, strict=True):
            # What differs in its last bit may be stored as the neighbouring FP8 number.
            assert output[0].logprob == pytest.approx(reference[0].logprob, abs=1e-2)
    finally:
        ranks.close()


def test_a_killed_rank_breaks_the_engine_by_name(folder: Path) -> None:
    ranks = CudaRanks(folder, ("cpu", "cpu"))
    try:
        blocks = ranks.blocks_for(20)
        ranks.execute(row([3, 4, 5], 0, blocks))
        (victim,) = ranks.engine.pids
        os.kill(victim, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineBroken, match=rf"rank 1 \(process {victim}\) was killed"):
                ranks.execute(row([6], 3, blocks))
    finally:
        ranks.close()
