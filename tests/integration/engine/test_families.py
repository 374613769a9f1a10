"""Our decoder against transformers, for random models of every family and rotary scaling."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.engine_runs import PooledEngine, assert_logprobs_match, row
from tests.support.tiny_models import VARIANTS, save_tiny_model


@dataclass(frozen=True)
class Pair:
    ours: PooledEngine
    reference: PreTrainedModel

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.reference(torch.tensor([token_ids])).logits[0]
        return logits


@pytest.fixture(scope="module", params=list(VARIANTS))
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp(request.param)
    return path, save_tiny_model(request.param, path)


@pytest.fixture
def pair(folder: tuple[Path, PreTrainedModel]) -> Pair:
    return Pair(PooledEngine(folder[0]), folder[1])


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


def test_a_mixed_step_gives_every_row_the_logits_it_would_have_alone(pair: Pair) -> None:
    """Prefills, a chunk on a shared prefix, a chunk on its own prefix, and decodes together."""
    ours = pair.ours
    shared, decoding, short = tokens(48, 1), tokens(70, 2), tokens(3, 3)
    shared_blocks = ours.blocks_for(48)
    decoding_blocks = ours.blocks_for(80)
    short_blocks = ours.blocks_for(8)
    ours.execute(
        row(shared, 0, shared_blocks, params=None),
        row(decoding, 0, decoding_blocks, params=None),
        row(short, 0, short_blocks, params=None),
    )

    fresh, on_shared, again = tokens(33, 4), tokens(20, 5), tokens(5, 6)
    chunked = tokens(60, 7)
    chunked_blocks = ours.blocks_for(60)
    ours.execute(row(chunked[:37], 0, chunked_blocks, params=None))
    results = ours.execute(
        row([11], 70, decoding_blocks),
        row(fresh, 0, ours.blocks_for(33)),
        row(on_shared, 48, shared_blocks + ours.blocks_for(20)),
        row([12], 3, short_blocks),
        row(chunked[37:], 37, chunked_blocks),
        row(again, 48, shared_blocks + ours.blocks_for(5)),
        row(tokens(2, 8), 0, ours.blocks_for(2)),
        row(tokens(9, 9), 0, ours.blocks_for(9), params=None),
    )

    contexts = [
        [*decoding, 11],
        fresh,
        shared + on_shared,
        [*short, 12],
        chunked,
        shared + again,
        tokens(2, 8),
    ]
    assert results[-1] == ()
    for (token,), context in zip(results[:-1], contexts, strict=True):
        assert_logprobs_match(token, pair.logits(context)[-1])


def test_a_long_prompt_in_chunks_and_its_decodes_match(pair: Pair) -> None:
    ours = pair.ours
    prompt = tokens(400, 10)
    blocks = ours.blocks_for(420)
    bounds = [0, 130, 131, 395, 400]
    for first, last in itertools.pairwise(bounds):
        ours.execute(row(prompt[first:last], first, blocks, params=None))
    output = [ours.execute(row(prompt[395:], 395, blocks))[0][0]]
    while len(output) < 8:
        at = len(prompt) + len(output) - 1
        output.append(ours.execute(row([output[-1].token_id], at, blocks))[0][0])

    logits = pair.logits(prompt + [token.token_id for token in output])
    for index, token in enumerate(output):
        assert_logprobs_match(token, logits[len(prompt) - 1 + index])


def test_a_whole_prefill_and_a_step_per_token_give_one_result(pair: Pair) -> None:
    ours = pair.ours
    prompt = tokens(45, 11)
    whole = ours.execute(row(prompt, 0, ours.blocks_for(45)))[0][0]
    blocks = ours.blocks_for(45)
    for at, token_id in enumerate(prompt):
        result = ours.execute(row([token_id], at, blocks))[0][0]
    assert result.token_id == whole.token_id
    assert_logprobs_match(result, pair.logits(prompt)[-1])
    assert_logprobs_match(whole, pair.logits(prompt)[-1])
