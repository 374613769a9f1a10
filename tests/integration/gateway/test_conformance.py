"""The table of conformance cases against a scripted cluster, whole and streamed."""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from common.sampling import SampledToken, SamplingParams
from services.gateway.app import build_app
from services.gateway.fake_backend import FakeBackend, FakeBehaviour
from services.gateway.fields import HARMLESS, NEUTRAL_VALUES
from services.gateway.http_settings import HttpSettings
from services.gateway.schema import ChatRequest, TextRequest
from tests.support.answers import Answer, events_of, gather_stream, read_whole
from tests.support.conformance import (
    ANSWERED,
    CASES,
    CHAT,
    REFUSED,
    TEXT,
    Case,
    Tokens,
)
from tests.support.conformance_checks import problems, refusal_problems
from tests.support.fake_backend import (
    END,
    MODEL_NAME,
    asgi_client,
    plain_tokenizer,
    served_model,
)
from tests.support.json_schema import Json, schema_problems

FIRST_TEXT_TOKEN = 2
"""The tiny vocabulary's ids before are special."""
SCHEMAS = {
    CHAT: ("ChatRequest", "ChatCompletion", "ChatCompletionChunk"),
    TEXT: ("TextRequest", "TextCompletion", "TextCompletionChunk"),
}


@pytest.fixture(scope="module")
def tokens(tiny_folder: Path) -> Tokens:
    tokenizer = plain_tokenizer(tiny_folder)

    def of(letter: str) -> int:
        (token_id,) = tokenizer.encode(letter).ids
        return token_id

    return Tokens(of, of(END))


def backend_of(folder: Path) -> FakeBackend:
    """Draw what (prompt, seed, choice) say, and obey a bias of +100 as any model must."""
    model = dataclasses.replace(served_model(folder), max_model_len=2048)

    def script(
        prompt: Sequence[int], params: SamplingParams, choice: int
    ) -> Sequence[SampledToken]:
        is_greedy = params.temperature == 0
        drawing = random.Random(str((prompt, None if is_greedy else (params.seed, choice))))
        forced = next((i for i, bias in params.logit_bias.items() if bias == 100), None)
        eos = () if params.ignore_eos else params.eos_token_ids
        drawn: list[SampledToken] = []
        for position in range(params.max_tokens):
            token_id = drawing.randrange(FIRST_TEXT_TOKEN, model.vocab_size)
            if forced is not None and not (forced in eos and position < params.min_tokens):
                token_id = forced
            drawn.append(token_of(token_id, params.num_logprobs))
            if token_id in (*eos, *params.stop_token_ids):
                break
        return drawn

    return FakeBackend(model, script, FakeBehaviour(num_cached_tokens=1))


def token_of(token_id: int, num_logprobs: int | None) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token_id)
    top = tuple((FIRST_TEXT_TOKEN + rank, -0.1 * (rank + 1)) for rank in range(num_logprobs))
    return SampledToken(token_id, -3.0, top)


@pytest.fixture(scope="module")
def document(tiny_folder: Path) -> Json:
    return json.loads(json.dumps(build_app(backend_of(tiny_folder), HttpSettings()).openapi()))


async def streamed(
    client: httpx.AsyncClient, path: str, body: Json, has_usage: bool
) -> tuple[list[Json], Answer]:
    request = {**body, "stream": True}
    if has_usage:
        request["stream_options"] = {"include_usage": True}
    response = await client.post(path, json=request)
    assert response.status_code == 200, response.text
    events = [event async for event in events_of(response)]
    return events, gather_stream(events, response.headers["x-request-id"])


@pytest.mark.parametrize("case", ANSWERED, ids=str)
async def test_a_case_is_answered_alike_whole_and_streamed(
    tiny_folder, tokens, document, case: Case
):
    body = {"model": MODEL_NAME, **case.body(tokens)}
    request_schema, answer_schema, chunk_schema = SCHEMAS[case.path]
    async with asgi_client(backend_of(tiny_folder)) as client:
        response = await client.post(case.path, json=body)
        assert response.status_code == 200, response.text
        answer = read_whole(response.json(), "")
        events, of_stream = await streamed(client, case.path, body, has_usage=True)
    assert problems(case, body, answer) == []
    if not case.is_random:
        assert dataclasses.replace(of_stream, request_id="") == answer
    assert schema_problems(document, request_schema, body) == []
    assert schema_problems(document, answer_schema, response.json()) == []
    for event in events:
        assert schema_problems(document, chunk_schema, event) == []


@pytest.mark.parametrize("case", REFUSED, ids=str)
async def test_a_case_is_refused_by_name(tiny_folder, tokens, document, case: Case):
    body = {"model": MODEL_NAME, **case.body(tokens)}
    backend = backend_of(tiny_folder)
    async with asgi_client(backend) as client:
        response = await client.post(case.path, content=json.dumps(body))
    assert refusal_problems(case, response.status_code, response.json()) == []
    assert schema_problems(document, "Error", response.json()) == []
    assert backend.submissions == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_comes_in_a_stream_only_when_asked_for(tiny_folder, path):
    case = next(case for case in ANSWERED if case.path == path)
    body = {"model": MODEL_NAME, **case.body(Tokens(lambda _: 0, 0))}
    async with asgi_client(backend_of(tiny_folder)) as client:
        events, answer = await streamed(client, path, body, has_usage=False)
    assert answer.usage is None
    assert all("usage" not in event for event in events)


def test_the_table_has_every_field_of_both_routes():
    for path, request_type in ((CHAT, ChatRequest), (TEXT, TextRequest)):
        used: set[str] = {"model"}
        for case in CASES:
            if case.path == path:
                used |= set(case.body(Tokens(lambda _: 0, 0)))
        known = {*request_type.model_fields, *NEUTRAL_VALUES, *HARMLESS}
        assert known - used == set()


def test_cases_have_different_names():
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)
