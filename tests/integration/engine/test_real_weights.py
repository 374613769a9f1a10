"""The default model's real weights against transformers' own generation."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.models.default_model import ensure_default_model
from tests.support.engine_runs import PooledEngine, assert_logprobs_match, row

NUM_NEW = 12
PROMPTS = (
    "Hello",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Der schnelle braune Fuchs springt über den faulen Hund. " * 4,
    "吾輩は猫である。名前はまだ無い。",
    "def fibonacci(n):\n    if n < 2:\n        return n\n" * 12,
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(mode=False)
    return model


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def test_greedy_answers_in_one_batch_equal_the_references(
    folder: Path, reference: PreTrainedModel, prompts: list[list[int]]
) -> None:
    """All prompts prefill in one step and decode together; each follows its own reference."""
    pooled = PooledEngine(folder, block_size=64, num_blocks=16)
    tables = [pooled.blocks_for(len(prompt) + NUM_NEW) for prompt in prompts]
    drawn = pooled.execute(*[row(p, 0, table) for p, table in zip(prompts, tables, strict=True)])
    outputs = [[tokens[0]] for tokens in drawn]
    for _ in range(NUM_NEW - 1):
        steps = [
            row([output[-1].token_id], len(prompt) + len(output) - 1, table)
            for prompt, table, output in zip(prompts, tables, outputs, strict=True)
        ]
        for output, tokens in zip(outputs, pooled.execute(*steps), strict=True):
            output.append(tokens[0])

    for prompt, output in zip(prompts, outputs, strict=True):
        ids = prompt + [token.token_id for token in output]
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0]
        for index, token in enumerate(output):
            assert_logprobs_match(token, logits[len(prompt) - 1 + index])


def test_bfloat16_stays_close_to_the_reference(
    folder: Path, reference: PreTrainedModel, prompts: list[list[int]]
) -> None:
    """Rounding to 8 bits moves logprobs of likely tokens by tenths, not by more."""
    pooled = PooledEngine(folder, dtype="bfloat16", block_size=64, num_blocks=16)
    prompt = prompts[1]
    token = pooled.execute(row(prompt, 0, pooled.blocks_for(len(prompt))))[0][0]
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=0)
    assert token.token_id == int(expected.argmax())
    for token_id, logprob in token.top_logprobs[:5]:
        assert abs(logprob - float(expected[token_id])) < 0.5
