"""The table of conformance cases against real clusters: split and combined answer alike."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
from tokenizers import Tokenizer

from tests.support.answers import Answer, ChoiceAnswer, Json
from tests.support.cluster import Cluster
from tests.support.conformance import (
    ANSWERED,
    CHAT,
    REFUSED,
    TEXT,
    Case,
    Tokens,
)
from tests.support.conformance_checks import problems, refusal_problems
from tests.support.json_schema import schema_problems

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

LOGPROB_TOLERANCE = 1e-3
MAX_CONCURRENT = 24
SCHEMAS = {CHAT: "ChatCompletion", TEXT: "TextCompletion"}


@pytest.fixture(scope="module")
def tokens(model_folder) -> Tokens:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))

    def of(letter: str) -> int:
        (token_id,) = tokenizer.encode(letter, add_special_tokens=False).ids
        return int(token_id)

    return Tokens(of, of("<|im_end|>"))


async def _ask_all(
    cluster: Cluster, cases: Sequence[Case], tokens: Tokens, *, streamed: int
) -> list[Answer]:
    """Ask for all, many at a time, so that prefills and decodes of different cases mix.

    Of two cases that follow each other one is streamed: the first (0) or the second (1).
    """
    turns = asyncio.Semaphore(MAX_CONCURRENT)

    async def ask(place: int, case: Case) -> Answer:
        body = case.body(tokens)
        if place % 2 == streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with turns:
            return await cluster.ask(case.path, body)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(place, case)) for place, case in enumerate(cases)]
    return [task.result() for task in tasks]


def _differences(case: Case, first: Answer, second: Answer) -> Iterator[str]:
    for index, (one, other) in enumerate(zip(first.choices, second.choices, strict=True)):
        for found in _choice_differences(one, other):
            yield f"{case}, choice {index}: {found}"
    counts = [
        None if answer.usage is None else dataclasses.replace(answer.usage, num_cached_tokens=0)
        for answer in (first, second)
    ]
    if counts[0] != counts[1]:
        yield f"{case}: usage {counts[0]}, not {counts[1]}"


def _choice_differences(one: ChoiceAnswer, other: ChoiceAnswer) -> Iterator[str]:
    for name in ("text", "token_ids", "finish_reason"):
        if getattr(one, name) != getattr(other, name):
            yield f"{name} {getattr(one, name)!r}, not {getattr(other, name)!r}"
    if not _are_near(one.logprobs, other.logprobs):
        yield f"logprobs {one.logprobs}, not {other.logprobs}"
    for mine, theirs in zip(one.top_logprobs, other.top_logprobs, strict=False):
        # The last places of two lists may be taken by tokens that are equally likely.
        shared = sorted(set(mine) & set(theirs))
        if not (
            _are_near(sorted(mine.values()), sorted(theirs.values()))
            and _are_near([mine[token] for token in shared], [theirs[token] for token in shared])
        ):
            yield f"top logprobs {mine}, not {theirs}"


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        abs(mine - theirs) <= LOGPROB_TOLERANCE for mine, theirs in zip(one, other, strict=True)
    )


async def test_split_and_combined_streamed_or_whole_answer_every_case_alike(
    split: Cluster, combined: Cluster, tokens: Tokens, note: Callable[[str], None]
) -> None:
    """Every case is streamed by one of the two and answered as a whole by the other."""
    cases = [case for case in ANSWERED if not case.is_random]
    by_split = await _ask_all(split, cases, tokens, streamed=0)
    by_combined = await _ask_all(combined, cases, tokens, streamed=1)
    found: list[str] = []
    for case, one, other in zip(cases, by_split, by_combined, strict=True):
        for answer in (one, other):
            found += problems(case, case.body(tokens), answer)
        found += _differences(case, one, other)
    note(f"conformance: {len(cases)} cases, {len(found)} problems")
    assert not found, "\n".join(found)
    await split.wait_idle()
    await combined.wait_idle()


async def test_a_list_of_prompts_answers_as_each_prompt_alone(
    split: Cluster, combined: Cluster
) -> None:
    prompts = ["The sea", "안녕하세요", "def f(x):", "The sea"]
    fields: Json = {
        "max_tokens": 8,
        "temperature": 0.8,
        "seed": 3,
        "n": 2,
        "return_token_ids": True,
    }
    for cluster in (split, combined):
        together = await cluster.ask(TEXT, {"prompt": prompts, "stream": True, **fields})
        alone = [await cluster.ask(TEXT, {"prompt": prompt, **fields}) for prompt in prompts]
        assert together.choices == tuple(choice for answer in alone for choice in answer.choices)


async def test_answers_without_a_seed_hold_what_all_answers_hold(
    split: Cluster, tokens: Tokens
) -> None:
    for case in (case for case in ANSWERED if case.is_random):
        body = case.body(tokens)
        assert problems(case, body, await split.ask(case.path, body)) == []


async def test_split_and_combined_refuse_every_case_by_name(
    split: Cluster, combined: Cluster, tokens: Tokens
) -> None:
    found: list[str] = []
    for cluster in (split, combined):
        for case in REFUSED:
            body = {"model": cluster.model_name, **case.body(tokens)}
            response = await cluster.client.post(case.path, json=body)
            found += refusal_problems(case, response.status_code, response.json())
    assert not found, "\n".join(found)


async def test_real_answers_are_as_the_openapi_document_says(
    split: Cluster, tokens: Tokens
) -> None:
    document = (await split.client.get("/openapi.json")).json()
    for case in ANSWERED[:: len(ANSWERED) // 12]:
        body = {"model": split.model_name, **case.body(tokens)}
        answer = (await split.client.post(case.path, json=body)).json()
        assert schema_problems(document, SCHEMAS[case.path], answer) == []


async def test_tokenize_tells_the_ids_of_a_completion_and_detokenize_their_text(
    split: Cluster,
) -> None:
    text = "Grüße <|im_end|> 안녕 👩‍👩‍👧‍👦"
    prompts: tuple[tuple[str, Json], ...] = (
        (TEXT, {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
    )
    for path, prompt in prompts:
        tokenized = (await split.client.post("/tokenize", json=prompt)).json()
        counted = await split.ask(path, {**prompt, "max_tokens": 1})
        assert counted.usage is not None
        assert tokenized["count"] == counted.usage.num_prompt_tokens == len(tokenized["tokens"])
        joined = await split.client.post("/detokenize", json={"tokens": tokenized["tokens"]})
        assert text in joined.json()["prompt"]
