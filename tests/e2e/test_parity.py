"""Greedy tokens and logprobs beside transformers' own ``generate``, in fp32."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from tests.support.answers import Answer, Json, Usage
from tests.support.cluster import Cluster
from tests.support.prompts import Encode, all_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

TIE = 1e-3
"""The two best logits so close may be drawn in either order."""
LOGPROB_TOLERANCE = 1e-3
MAX_TIES = 5
MAX_TOKENS = 8
MAX_TOKENS_OF_SHORT = 16
BATCHED_TOKENS = 80
"""Prompts up to so many tokens are generated for in batches of ``BATCH``."""
BATCH = 12


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt; ``max_tokens`` is of its answer."""

    name: str
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reference:
    """What ``generate`` answers. ``gaps`` are between the two best logits, per token."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Answered:
    """Every question with the reference and both clusters' answers, in the same order."""

    questions: list[Question]
    references: list[Reference]
    split: list[Answer]
    combined: list[Answer]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def answered(
    model_folder: Path, encode: Encode, split: Cluster, combined: Cluster
) -> Answered:
    """Ask everybody: ``generate`` on one core, meanwhile the clusters one after the other."""
    questions = []
    for prompt in all_prompts():
        token_ids = prompt.token_ids(encode)
        is_short = len(token_ids) <= BATCHED_TOKENS
        max_tokens = MAX_TOKENS_OF_SHORT if is_short else MAX_TOKENS
        questions.append(Question(prompt.name, token_ids, max_tokens))
    questions.sort(key=lambda question: len(question.prompt))
    async with asyncio.TaskGroup() as group:
        references = group.create_task(
            asyncio.to_thread(_generate_all, model_folder, questions), name="generate"
        )
        split_answers = await _ask_all(split, questions)
        combined_answers = await _ask_all(combined, questions)
    return Answered(questions, references.result(), split_answers, combined_answers)


def _generate_all(folder: Path, questions: Sequence[Question]) -> list[Reference]:
    """Generate for all questions, which come shortest first."""
    torch.set_num_threads(1)  # the other core is the clusters'
    # Any: transformers' models have no types.
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    short = [question for question in questions if question.max_tokens == MAX_TOKENS_OF_SHORT]
    groups = [short[start : start + BATCH] for start in range(0, len(short), BATCH)]
    groups += [[question] for question in questions[len(short) :]]
    return [reference for group in groups for reference in _generate(model, group)]


def _generate(model: Any, questions: Sequence[Question]) -> list[Reference]:
    """Generate for questions of about one length, in one batch that is padded on the left."""
    width = max(len(question.prompt) for question in questions)
    pad, eos = model.generation_config.pad_token_id, model.generation_config.eos_token_id
    padding = [width - len(question.prompt) for question in questions]
    generated = model.generate(
        torch.tensor([[pad] * n + q.prompt for n, q in zip(padding, questions, strict=True)]),
        attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in padding]),
        do_sample=False,
        max_new_tokens=questions[0].max_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(generated.logits, dim=1)
    references = []
    for row in range(len(questions)):
        tokens: list[int] = generated.sequences[row, width:].tolist()
        is_ended = eos in tokens
        if is_ended:
            tokens = tokens[: tokens.index(eos) + 1]
        mine = logits[row, : len(tokens)]
        best = mine.topk(2).values
        drawn = mine.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        gaps = (best[:, 0] - best[:, 1]).tolist()
        reason = "stop" if is_ended else "length"
        references.append(Reference(tokens, drawn.tolist(), gaps, reason))
    return references


async def _ask_all(cluster: Cluster, questions: Sequence[Question]) -> list[Answer]:
    """Ask for all at once, every other one streamed: prefills, chunks and decodes mix."""

    async def ask(place: int, question: Question) -> Answer:
        body: Json = {
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "return_token_ids": True,
            "stream": place % 2 == 0,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        return await cluster.ask("/v1/completions", body)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(i, question)) for i, question in enumerate(questions)]
    return [task.result() for task in tasks]


def _compare(
    question: Question, reference: Reference, answer: Answer
) -> tuple[int | None, str | None]:
    """Return the position of a tie that parted the two, and what is wrong."""
    choice = answer.choices[0]
    drawn = zip(choice.token_ids, choice.logprobs, strict=True)
    for place, (token, logprob) in enumerate(drawn):
        if place >= len(reference.tokens):
            return None, f"token {place} is {token}, after the end"
        wanted, wanted_logprob = reference.tokens[place], reference.logprobs[place]
        if token != wanted:
            gap = reference.gaps[place]
            if gap < TIE:
                return place, None
            return None, f"token {place} is {token}, not {wanted} (gap {gap})"
        if abs(logprob - wanted_logprob) > LOGPROB_TOLERANCE:
            return None, f"logprob {place} is {logprob}, not {wanted_logprob}"
    num_tokens = len(reference.tokens)
    got = (len(choice.token_ids), choice.finish_reason, answer.usage)
    # No two prompts share a whole block, so nothing comes from the prefix cache.
    wanted_end = (num_tokens, reference.finish_reason, Usage(len(question.prompt), num_tokens, 0))
    return None, None if got == wanted_end else f"ended with {got}, not {wanted_end}"


def _check(
    kind: str, answered: Answered, answers: Sequence[Answer], note: Callable[[str], None]
) -> None:
    ties: list[str] = []
    wrong: list[str] = []
    compared = zip(answered.questions, answered.references, answers, strict=True)
    for question, reference, answer in compared:
        tie, found = _compare(question, reference, answer)
        if found is not None:
            wrong.append(f"{question.name}: {found}")
        if tie is not None:
            ties.append(f"{question.name} at token {tie} (gap {reference.gaps[tie]:.1e})")
    num_tokens = sum(len(reference.tokens) for reference in answered.references)
    note(
        f"parity with generate, {kind}: {len(answers)} prompts, {num_tokens} tokens, "
        f"{len(ties)} ties {ties or ''}"
    )
    assert not wrong, "\n".join(wrong)
    assert len(ties) <= MAX_TIES, ties


async def test_there_are_enough_prompts_of_every_length(answered: Answered) -> None:
    lengths = [len(question.prompt) for question in answered.questions]
    assert len(lengths) >= 50
    assert (lengths[0], lengths[-1]) == (1, 4000)


async def test_split_workers_answer_as_generate_does(
    answered: Answered, note: Callable[[str], None]
) -> None:
    _check("split", answered, answered.split, note)


async def test_a_combined_worker_answers_as_generate_does(
    answered: Answered, note: Callable[[str], None]
) -> None:
    _check("combined", answered, answered.combined, note)


async def test_nothing_is_left_of_the_requests(
    answered: Answered, split: Cluster, combined: Cluster
) -> None:
    for cluster in (split, combined):
        for name, kv in (await cluster.wait_idle()).items():
            assert kv.total == kv.free + kv.cached, name
