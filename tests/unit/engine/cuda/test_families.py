"""The CUDA engine's own way through a step, on a CPU, against transformers and the CPU engine."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.cuda_runs import PooledCudaEngine
from tests.support.engine_runs import PooledEngine, assert_logprobs_match, row
from tests.support.tiny_models import VARIANTS, save_tiny_model

Saved = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=list(VARIANTS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp(request.param)
    return path, save_tiny_model(request.param, path)


def logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return found


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


def test_a_mixed_step_gives_every_row_the_logits_it_would_have_alone(saved: Saved) -> None:
    """Decodes, fresh prompts, chunks on shared and on own prefixes, sampled and not, together."""
    ours, reference = PooledCudaEngine(saved[0]), saved[1]
    shared, decoding, short = tokens(48, 1), tokens(70, 2), tokens(3, 3)
    shared_blocks, decoding_blocks = ours.blocks_for(48), ours.blocks_for(80)
    short_blocks = ours.blocks_for(8)
    ours.execute(
        row(shared, 0, shared_blocks, params=None),
        row(decoding, 0, decoding_blocks, params=None),
        row(short, 0, short_blocks, params=None),
    )
    fresh, on_shared, chunked = tokens(33, 4), tokens(20, 5), tokens(60, 7)
    chunked_blocks = ours.blocks_for(60)
    ours.execute(row(chunked[:37], 0, chunked_blocks, params=None))

    results = ours.execute(
        row([11], 70, decoding_blocks),
        row(fresh, 0, ours.blocks_for(33)),
        row(tokens(9, 9), 0, ours.blocks_for(9), params=None),
        row(on_shared, 48, shared_blocks + ours.blocks_for(20)),
        row([12], 3, short_blocks),
        row(chunked[37:], 37, chunked_blocks),
        row([7], 0, ours.blocks_for(1)),
    )

    contexts = [[*decoding, 11], fresh, shared + on_shared, [*short, 12], chunked, [7]]
    assert results.pop(2) == ()
    for (token,), context in zip(results, contexts, strict=True):
        assert_logprobs_match(token, logits(reference, context)[-1])


def test_a_long_prompt_in_chunks_and_its_decodes_match(saved: Saved) -> None:
    ours, reference = PooledCudaEngine(saved[0]), saved[1]
    prompt = tokens(400, 10)
    blocks = ours.blocks_for(420)
    for first, last in itertools.pairwise([0, 130, 131, 395]):
        assert ours.execute(row(prompt[first:last], first, blocks, params=None)) == [()]
    output = [ours.execute(row(prompt[395:], 395, blocks))[0][0]]
    while len(output) < 6:
        at = len(prompt) + len(output) - 1
        output.append(ours.execute(row([output[-1].token_id], at, blocks))[0][0])

    expected = logits(reference, prompt + [token.token_id for token in output])
    for index, token in enumerate(output):
        assert_logprobs_match(token, expected[len(prompt) - 1 + index])


def test_the_pool_holds_what_the_cpu_engine_puts_there(saved: Saved) -> None:
    ours, cpu = PooledCudaEngine(saved[0]), PooledEngine(saved[0])
    prompt, table = tokens(40, 12), [3, 1, 2]
    ours.execute(row(prompt, 0, table, params=None))
    cpu.execute(row(prompt, 0, table, params=None))
    size = ours.layout.block_bytes
    for block in table[:2]:
        part = slice(block * size, (block + 1) * size)
        torch.testing.assert_close(
            ours.pool[part].view(torch.float32),
            cpu.pool[part].view(torch.float32),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_logits_stay_near_the_references(saved: Saved, dtype: str) -> None:
    ours, reference = PooledCudaEngine(saved[0], dtype=dtype), saved[1]
    prompt = tokens(50, 13)
    ((token,),) = ours.execute(row(prompt, 0, ours.blocks_for(50)))
    expected = logits(reference, prompt)[-1].log_softmax(0)
    assert token.logprob is not None
    tolerance = 0.5 if dtype == "bfloat16" else 0.1
    assert abs(token.logprob - float(expected[token.token_id])) < tolerance
