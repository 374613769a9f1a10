"""Lists of prompts on /v1/completions: each is a request of its own in the cluster."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.sampling import SampledToken, SamplingParams
from services.gateway.fake_backend import FakeBackend, FakeBehaviour, FakeSubmission
from services.gateway.http_settings import HttpSettings
from tests.support.answers import events_of, gather_stream, read_whole
from tests.support.fake_backend import (
    MODEL_NAME,
    asgi_client,
    fake_backend,
    plain_tokenizer,
    served,
    served_model,
)

PATH = "/v1/completions"
PROMPTS = ["hello", "the quick fox", "dog"]
LIST = {"model": MODEL_NAME, "prompt": PROMPTS}
DEADLINE_SECONDS = 10


class FailingBackend(FakeBackend):
    """Fails one prompt by its place: at once, or after its first token."""

    def __init__(
        self, folder: Path, place: int, *, is_refused: bool, code: ErrorCode = ErrorCode.NO_ROOM
    ) -> None:
        super().__init__(served_model(folder), saying_the_prompt, FakeBehaviour())
        self._place = place
        self._is_refused = is_refused
        self._code = code

    async def submit(
        self, request_id: RequestId, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> FakeSubmission:
        if not request_id.endswith(f".{self._place}"):
            return await super().submit(request_id, prompt_token_ids, params)
        failure = RequestError(self._code, "no room for this one")
        if self._is_refused:
            raise failure
        healthy = self.behaviour
        self.behaviour = FakeBehaviour(num_tokens_before_wait=1, failure=failure)
        self.behaviour.resume.set()
        try:
            return await super().submit(request_id, prompt_token_ids, params)
        finally:
            self.behaviour = healthy


def saying_the_prompt(
    prompt: Sequence[int], params: SamplingParams, choice: int
) -> Sequence[SampledToken]:
    """Repeat the prompt, once more for each later choice."""
    return [SampledToken(token_id) for token_id in [*prompt] * (choice + 1)]


async def test_choices_are_numbered_prompt_by_prompt_and_usage_is_summed(tiny_folder):
    behaviour = FakeBehaviour(num_cached_tokens=1)
    backend = FakeBackend(served_model(tiny_folder), saying_the_prompt, behaviour)
    async with asgi_client(backend) as client:
        response = await client.post(PATH, json={**LIST, "n": 2})
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == [
        *("hello", "hellohello"),
        *("the quick fox", "the quick foxthe quick fox"),
        *("dog", "dogdog"),
    ]
    lengths = [len(prompt) for prompt in backend.prompts]
    assert body["usage"] == {
        "prompt_tokens": sum(lengths),
        "completion_tokens": 3 * sum(lengths),
        "total_tokens": 4 * sum(lengths),
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    request_id = response.headers["x-request-id"]
    assert [s.request_id for s in backend.submissions] == [f"{request_id}.{i}" for i in range(3)]
    assert all(submission.closed.is_set() for submission in backend.submissions)


async def test_lists_of_token_ids_are_prompts_too(tiny_folder):
    backend = FakeBackend(served_model(tiny_folder), saying_the_prompt)
    tokenizer = plain_tokenizer(tiny_folder)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    async with asgi_client(backend) as client:
        request = {**LIST, "prompt": prompts, "return_token_ids": True}
        body = (await client.post(PATH, json=request)).json()
    assert [choice["text"] for choice in body["choices"]] == PROMPTS
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == prompts


async def test_streams_of_prompts_interleave_under_their_own_indexes(tiny_folder):
    backend = FakeBackend(served_model(tiny_folder), saying_the_prompt)
    request = {**LIST, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with asgi_client(backend) as client:
        whole = read_whole((await client.post(PATH, json={**LIST, "n": 2})).json(), "")
        response = await client.post(PATH, json=request)
        events = [event async for event in events_of(response)]
    assert gather_stream(events, "") == whole
    order = [event["choices"][0]["index"] for event in events if event["choices"]]
    assert len(set(order[:6])) > 2, f"one prompt after the other: {order}"


async def test_a_list_answers_as_each_prompt_alone_would_with_the_same_seed(tiny_folder):
    backend = FakeBackend(served_model(tiny_folder), saying_the_prompt)
    async with asgi_client(backend) as client:
        await client.post(PATH, json={**LIST, "seed": 5})
        await client.post(PATH, json=LIST)
    seeds = [submission.params.seed for submission in backend.submissions]
    assert seeds[:3] == [5, 5, 5]
    assert len(set(seeds[3:])) == 3


@pytest.mark.parametrize("is_stream", [False, True])
async def test_one_refused_prompt_refuses_the_call_and_closes_the_others(tiny_folder, is_stream):
    backend = FailingBackend(tiny_folder, 1, is_refused=True)
    async with asgi_client(backend) as client:
        response = await client.post(PATH, json={**LIST, "stream": is_stream})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_room")
    assert all(submission.closed.is_set() for submission in backend.submissions)


async def test_a_prompt_that_the_cluster_cannot_hold_is_named(tiny_folder):
    backend = FailingBackend(tiny_folder, 1, is_refused=True, code=ErrorCode.CONTEXT_EXCEEDED)
    alone = fake_backend(tiny_folder)
    alone.behaviour.refusal = RequestError(ErrorCode.CONTEXT_EXCEEDED, "too long")
    messages = [{"role": "user", "content": "hello"}]
    async with asgi_client(backend) as client:
        listed = (await client.post(PATH, json=LIST)).json()["error"]
    async with asgi_client(alone) as client:
        single = (await client.post(PATH, json={**LIST, "prompt": "hello"})).json()["error"]
        body = {"model": MODEL_NAME, "messages": messages}
        chat = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert (listed["param"], listed["message"]) == ("prompt[1]", "prompt[1]: no room for this one")
    assert [single["param"], chat["param"]] == ["prompt", "messages"]


async def test_one_failing_prompt_fails_the_call_and_cancels_the_others(tiny_folder):
    for is_stream in (False, True):
        backend = FailingBackend(tiny_folder, 2, is_refused=False)
        async with asgi_client(backend) as client:
            response = await client.post(PATH, json={**LIST, "stream": is_stream})
            events = [event async for event in events_of(response)] if is_stream else []
        assert len(backend.submissions) == 3
        assert all(submission.closed.is_set() for submission in backend.submissions)
        if is_stream:
            assert events[-1]["error"]["code"] == "no_room"
            assert "[DONE]" not in response.text
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_room")


async def test_a_disconnect_cancels_every_prompt(tiny_folder):
    backend = FakeBackend(
        served_model(tiny_folder), saying_the_prompt, FakeBehaviour(num_tokens_before_wait=1)
    )
    async with served(backend) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}{PATH}"
        async with asyncio.timeout(DEADLINE_SECONDS):
            async with client.stream("POST", url, json={**LIST, "stream": True}) as response:
                async for line in response.aiter_lines():
                    if line:
                        break
            for index in range(3):
                submission = await backend.wait_for_submission(index)
                await submission.closed.wait()


async def test_every_prompt_counts_as_an_open_request(tiny_folder):
    settings = HttpSettings(max_open_requests=2)
    backend = FakeBackend(served_model(tiny_folder), saying_the_prompt)
    async with asgi_client(backend, settings) as client:
        refused = await client.post(PATH, json=LIST)
        taken = await client.post(PATH, json={**LIST, "prompt": PROMPTS[:2]})
        assert (await client.get("/load")).json() == {"server_load": 0}
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert taken.status_code == 200
    assert len(backend.submissions) == 2


async def test_prompts_times_n_over_the_bound_are_refused_before_any_work(tiny_folder):
    settings = HttpSettings(max_choices_per_request=5)
    backend = FakeBackend(served_model(tiny_folder), saying_the_prompt)
    async with asgi_client(backend, settings) as client:
        response = await client.post(PATH, json={**LIST, "n": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert backend.submissions == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_echo_puts_the_prompt_before_every_choice(tiny_folder, is_stream):
    request = {**LIST, "echo": True, "n": 2, "stream": is_stream, "stop": "e"}
    async with asgi_client(fake_backend(tiny_folder, "xyz end")) as client:
        response = await client.post(PATH, json=request)
        if is_stream:
            answer = gather_stream([event async for event in events_of(response)], "")
        else:
            answer = read_whole(response.json(), "")
    texts = [choice.text for choice in answer.choices]
    assert texts == [f"{prompt}xyz " for prompt in PROMPTS for _ in range(2)]


async def test_token_ids_are_echoed_as_their_text_special_tokens_too(tiny_folder):
    ids = plain_tokenizer(tiny_folder).encode("<|im_start|>hello").ids
    async with asgi_client(fake_backend(tiny_folder, " you")) as client:
        request = {"model": MODEL_NAME, "prompt": ids, "echo": True}
        body = (await client.post(PATH, json=request)).json()
    assert body["choices"][0]["text"] == "<|im_start|>hello you"


async def test_the_log_names_the_cluster_s_request_of_each_prompt(tiny_folder, capsys):
    backend = FakeBackend(served_model(tiny_folder), saying_the_prompt)
    async with asgi_client(backend) as client:
        response = await client.post(PATH, json=LIST)
    request_id = response.headers["x-request-id"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "prompt_submitted" in line]
    assert len(lines) == 3
    for place, line in enumerate(lines):
        assert f"{request_id}.{place}" in line
