"""The application behind uvicorn on a real socket: clients that stream, stop, and go away."""

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import ErrorCode, RequestError
from services.gateway.fake_backend import FakeBackend, FakeBehaviour
from services.gateway.http_protocol import MAX_HEAD_BYTES
from services.gateway.http_settings import HttpSettings
from tests.support.fake_backend import (
    MODEL_NAME,
    asgi_client,
    fake_backend,
    replying,
    scripted,
    served,
    served_model,
)

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"model": MODEL_NAME, "messages": MESSAGES}
DEADLINE_SECONDS = 10


def openai_client(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


@asynccontextmanager
async def sent(port: int, raw: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Send bytes by hand; leaving the context is the client going away."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


def raw_chat(**fields) -> bytes:
    payload = json.dumps({**CHAT, **fields}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


async def samples(port: int) -> dict[str, float]:
    """Read /metrics: the sum over labels of each sample."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def test_the_openai_client_chats_streamed_and_not(tiny_folder):
    backend = fake_backend(tiny_folder, "안녕 hello there", FakeBehaviour(num_cached_tokens=2))
    async with served(backend) as port, openai_client(port) as client:
        whole = await client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, logprobs=True, top_logprobs=1, n=2
        )
        stream = await client.chat.completions.create(
            model=MODEL_NAME,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        models = [model.id async for model in client.models.list()]
    assert [choice.message.content for choice in whole.choices] == ["안녕 hello there"] * 2
    assert whole.usage.prompt_tokens_details.cached_tokens == 2
    entries = whole.choices[0].logprobs.content
    assert 2 * len(entries) == whole.usage.completion_tokens
    assert [len(entry.top_logprobs) for entry in entries] == [1] * len(entries)
    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert content == "안녕 hello there"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens * 2 == whole.usage.completion_tokens
    assert models == [MODEL_NAME]


async def test_the_openai_client_completes_text_with_stop_and_logprobs(tiny_folder):
    async with served(fake_backend(tiny_folder, "abc#!def")) as port, openai_client(port) as client:
        answer = await client.completions.create(
            model=MODEL_NAME, prompt="hello", stop=["#!", "zz"], logprobs=2
        )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("abc", "stop")
    assert answer.usage.completion_tokens == len(choice.logprobs.tokens) == 5


@pytest.mark.parametrize(
    ("fields", "error_type", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"stop": ["x"] * 10_000}, openai.BadRequestError, "stop"),
        ({"extra_body": {"what": 1}}, openai.BadRequestError, "what"),
    ],
)
async def test_the_openai_client_raises_the_right_error(tiny_folder, fields, error_type, param):
    async with served(fake_backend(tiny_folder)) as port, openai_client(port) as client:
        with pytest.raises(error_type) as caught:
            await client.chat.completions.create(**{**CHAT, **fields})
    assert caught.value.param == param
    assert caught.value.response.headers["x-request-id"] == caught.value.request_id


async def test_the_openai_client_sees_a_broken_stream_as_an_error(tiny_folder):
    failure = RequestError(ErrorCode.WORKER_DIED, "decode-0 died")
    backend = fake_backend(
        tiny_folder, behaviour=FakeBehaviour(num_tokens_before_wait=1, failure=failure)
    )
    backend.behaviour.resume.set()
    async with served(backend) as port, openai_client(port) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.APIError, match="decode-0 died"):
            [chunk async for chunk in stream]


async def test_the_first_token_leaves_while_the_second_is_not_there_yet(tiny_folder):
    backend = fake_backend(tiny_folder, behaviour=FakeBehaviour(num_tokens_before_wait=1))
    async with served(backend) as port, sent(port, raw_chat(stream=True)) as reader:
        async with asyncio.timeout(DEADLINE_SECONDS):
            head = await reader.readuntil(b'"delta":{"content":')
            assert b"200 OK" in head
            await backend.submissions[0].waiting.wait()
            found = await samples(port)
            assert found["flowpath_time_to_first_token_seconds_count"] == 1
            backend.behaviour.resume.set()
            await reader.readuntil(b"[DONE]")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_disconnect_cancels_in_every_phase(tiny_folder, is_stream, num_tokens):
    backend = fake_backend(tiny_folder, behaviour=FakeBehaviour(num_tokens_before_wait=num_tokens))
    async with served(backend) as port, asyncio.timeout(DEADLINE_SECONDS):
        async with sent(port, raw_chat(stream=is_stream)):
            submission = await backend.wait_for_submission()
            await submission.waiting.wait()
            assert (await samples(port))["flowpath_num_requests_running"] == 1
        await submission.closed.wait()
        found = await samples(port)
        assert found["flowpath_client_disconnects_total"] == 1
        assert found["flowpath_num_requests_running"] == 0


async def test_a_disconnect_while_the_body_arrives_harms_nobody(tiny_folder):
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 99\r\n\r\n{"
    async with served(fake_backend(tiny_folder)) as port, asyncio.timeout(DEADLINE_SECONDS):
        async with sent(port, raw):
            while (await samples(port))["flowpath_num_requests_running"] == 0:
                pass
        while (await samples(port)).get("flowpath_client_disconnects_total", 0) == 0:
            pass
        assert (await samples(port))["flowpath_num_requests_running"] == 0


async def test_a_finished_answer_is_no_disconnect_on_a_kept_connection(tiny_folder):
    backend = fake_backend(tiny_folder)
    async with served(backend) as port, httpx.AsyncClient() as client:
        for is_stream in (False, True, False, True):
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            response = await client.post(url, json={**CHAT, "stream": is_stream})
            assert response.status_code == 200
        found = await samples(port)
    assert found.get("flowpath_client_disconnects_total", 0) == 0
    assert all(submission.closed.is_set() for submission in backend.submissions)


async def test_a_body_that_stalls_is_refused_at_its_deadline(tiny_folder):
    settings = HttpSettings(body_timeout_seconds=0.05)
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 99\r\n\r\n{"
    async with served(fake_backend(tiny_folder), settings) as port, sent(port, raw) as reader:
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert b" 400 " in await reader.readline()


async def test_what_is_no_http_is_refused_in_the_shape_of_every_error(tiny_folder):
    raw = b"nonsense \x00\r\n\r\n"
    async with served(fake_backend(tiny_folder)) as port, sent(port, raw) as reader:
        async with asyncio.timeout(DEADLINE_SECONDS):
            head, body = (await reader.read()).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http_request"


async def test_a_body_over_the_limit_is_refused_before_it_is_sent_whole(tiny_folder):
    settings = HttpSettings(max_body_bytes=1000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw = head + b"7d0\r\n" + b"x" * 2000 + b"\r\n"
    async with served(fake_backend(tiny_folder), settings) as port, sent(port, raw) as reader:
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert b" 413 " in await reader.readline()


async def test_a_head_over_the_limit_is_refused_with_the_api_s_error(tiny_folder):
    raw = b"GET /version HTTP/1.1\r\nHost: g\r\nX-Filler: ".ljust(MAX_HEAD_BYTES + 1, b"x")
    async with served(fake_backend(tiny_folder)) as port, sent(port, raw) as reader:
        async with asyncio.timeout(DEADLINE_SECONDS):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "request_head_too_large"


async def test_a_reader_that_stops_reading_stalls_its_own_stream_alone(tiny_folder):
    num_tokens = 20_000
    long, short = scripted([300] * num_tokens), replying(tiny_folder, "hello")

    def script(prompt, params, choice):
        chosen = long if params.seed == 1 else short
        return chosen(prompt, params, choice)

    model = dataclasses.replace(served_model(tiny_folder), max_model_len=10 * num_tokens)
    backend = FakeBackend(model, script, FakeBehaviour(burst=20))
    raw = raw_chat(stream=True, seed=1, logprobs=True, top_logprobs=20)
    async with served(backend) as port, asyncio.timeout(DEADLINE_SECONDS):
        async with sent(port, raw), httpx.AsyncClient() as client:
            stalled = await backend.wait_for_submission()
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            num_played = -1
            while num_played != stalled.num_played:
                num_played = stalled.num_played
                response = await client.post(url, json={**CHAT, "seed": 2})
                assert response.json()["choices"][0]["message"]["content"] == "hello"
            assert num_played < num_tokens
        await stalled.closed.wait()


async def test_every_metric_moves(tiny_folder):
    behaviour = FakeBehaviour(num_cached_tokens=3, burst=2)
    async with served(fake_backend(tiny_folder, behaviour=behaviour)) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
            usage = (await client.post("/v1/chat/completions", json=CHAT)).json()["usage"]
            await client.post("/v1/chat/completions", json={})
            await client.get("/nowhere")
            page = (await client.get("/metrics")).text
        found = await samples(port)
    chat = 'route="/v1/chat/completions"'
    assert f'flowpath_http_requests_total{{{chat},status="200"}} 2.0' in page
    assert f'flowpath_http_requests_total{{{chat},status="400"}} 1.0' in page
    assert 'flowpath_http_requests_total{route="unmatched",status="404"} 1.0' in page
    assert found["flowpath_prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert found["flowpath_prompt_tokens_cached_total"] == 6
    assert found["flowpath_generation_tokens_total"] == 2 * usage["completion_tokens"]
    assert found["flowpath_time_to_first_token_seconds_count"] == 1
    assert found["flowpath_time_to_first_token_seconds_sum"] > 0
    num_later_tokens = usage["completion_tokens"] - 2
    assert found["flowpath_inter_token_latency_seconds_count"] == 2 * num_later_tokens
    assert found["flowpath_e2e_request_latency_seconds_count"] == 2


@pytest.mark.parametrize("path", ["/health", "/ping", "/load", "/metrics"])
async def test_probes_and_scrapes_are_no_counted_requests(tiny_folder, path):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        await client.get(path)
        await client.head(path)
        await client.get("/version")
        page = (await client.get("/metrics")).text
    counted = re.findall(r'^flowpath_http_requests_total\{route="([^"]+)"', page, re.MULTILINE)
    assert counted == ["/version"]


async def test_a_first_token_counts_when_its_text_is_written_and_not_while_it_is_held_back(
    tiny_folder,
):
    backend = fake_backend(tiny_folder, "ab", behaviour=FakeBehaviour(num_tokens_before_wait=1))
    async with served(backend) as port, sent(port, raw_chat(stream=True, stop="ab!")) as reader:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await reader.readuntil(b'"role":"assistant"')
            await (await backend.wait_for_submission()).waiting.wait()
            found = await samples(port)
            assert found["flowpath_time_to_first_token_seconds_count"] == 0
            backend.behaviour.resume.set()
            await reader.readuntil(b"[DONE]")
            found = await samples(port)
            assert found["flowpath_time_to_first_token_seconds_count"] == 1
