"""Bad input is refused by name and disturbs nothing else."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from tests.e2e.conftest import MAX_BODY_BYTES
from tests.support.answers import Json, events_of
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello."}]
MAX_MODEL_LEN = 8192
VOCAB_SIZE = 49152
LONG_STREAM: Json = {
    "prompt": "The lighthouse keeper counted",
    "max_tokens": 4000,  # it is left long before
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}

MORE_EVENTS = 3
"""So many come of the stream after the others are answered."""


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A request and how it must be refused; ``word`` must stand in the message."""

    name: str
    path: str
    content: bytes
    status: int = 400
    param: str | None = None
    code: str = "bad_request"
    word: str = ""
    method: str = "POST"


def _bad(
    name: str,
    path: str,
    fields: Json,
    param: str,
    *,
    status: int = 400,
    code: str = "bad_request",
    word: str = "",
) -> BadRequest:
    """Return a request that is fine but for ``fields``."""
    prompt = {"prompt": "Hello."} if path == TEXT else {"messages": MESSAGES}
    body = {"model": "MODEL", "max_tokens": 4, **prompt, **fields}
    content = json.dumps({key: value for key, value in body.items() if value != "ABSENT"})
    return BadRequest(name, path, content.encode(), status, param, code, word)


def _raw(name: str, content: bytes, word: str) -> BadRequest:
    return BadRequest(name, TEXT, content, word=word)


_TOO_LARGE = json.dumps({"model": "MODEL", "prompt": "x" * MAX_BODY_BYTES}).encode()

BAD_REQUESTS = (
    _raw("malformed JSON", b'{"model": "MODEL", "prompt": ', "JSON"),
    _raw("JSON with a trailing comma", b'{"model": "MODEL", "prompt": "a",}', "JSON"),
    _raw("an empty body", b"", "JSON"),
    _raw("a body that is a list", b'["prompt"]', "object"),
    _raw("invalid UTF-8", b'{"model": "MODEL", "prompt": "\xff\xfe"}', "UTF-8"),
    BadRequest(
        "a body over the limit", TEXT, _TOO_LARGE, 413, None, "body_too_large", str(MAX_BODY_BYTES)
    ),
    _bad("max_tokens as text", TEXT, {"max_tokens": "4"}, "max_tokens"),
    _bad("max_tokens of 0", TEXT, {"max_tokens": 0}, "max_tokens"),
    _bad("max_tokens of 0, chat", CHAT, {"max_tokens": 0}, "max_tokens"),
    _bad("max_tokens below 0", TEXT, {"max_tokens": -1}, "max_tokens"),
    _bad("max_tokens as a fraction", TEXT, {"max_tokens": 1.5}, "max_tokens"),
    _bad("temperature as text", TEXT, {"temperature": "hot"}, "temperature"),
    _bad("temperature too high", CHAT, {"temperature": 2.5}, "temperature"),
    _bad("top_p of 0", TEXT, {"top_p": 0}, "top_p"),
    _bad("n of 0", TEXT, {"n": 0}, "n"),
    _bad("n too large", TEXT, {"n": 129}, "n"),
    _bad("stream as a number", TEXT, {"stream": 1}, "stream"),
    _bad("seed beyond 64 bits", TEXT, {"seed": 2**64}, "seed"),
    _bad("too many logprobs", TEXT, {"logprobs": 21}, "logprobs"),
    _bad("logprobs of the other route", CHAT, {"logprobs": 3}, "logprobs"),
    _bad("10 000 stop strings", TEXT, {"stop": [f"s{n}" for n in range(10_000)]}, "stop"),
    _bad("an empty stop string", TEXT, {"stop": [""]}, "stop[0]"),
    _bad("logit_bias of an unknown token", TEXT, {"logit_bias": {"x": 1}}, "logit_bias"),
    _bad("an empty prompt", TEXT, {"prompt": ""}, "prompt"),
    _bad("an empty list of tokens", TEXT, {"prompt": []}, "prompt"),
    _bad("no prompt", TEXT, {"prompt": "ABSENT"}, "prompt"),
    _bad("a prompt of the wrong type", TEXT, {"prompt": 5}, "prompt"),
    _bad("a token outside the vocabulary", TEXT, {"prompt": [1, VOCAB_SIZE]}, "prompt"),
    _bad("a negative token", TEXT, {"prompt": [-1]}, "prompt"),
    _bad("no messages", CHAT, {"messages": []}, "messages"),
    _bad("messages as text", CHAT, {"messages": "Hello."}, "messages"),
    _bad("an unknown role", CHAT, {"messages": [{"role": "x"}]}, "messages[0].role"),
    _bad(
        "a prompt longer than the context",
        TEXT,
        {"prompt": [5] * (MAX_MODEL_LEN + 1)},
        "prompt",
        code="context_length_exceeded",
        word=str(MAX_MODEL_LEN),
    ),
    _bad(
        "a text longer than the context",
        TEXT,
        {"prompt": "word and " * 60_000},
        "prompt",
        code="context_length_exceeded",
        word=str(MAX_MODEL_LEN),
    ),
    _bad(
        "more output than the context leaves",
        TEXT,
        {"max_tokens": MAX_MODEL_LEN},
        "max_tokens",
        code="context_length_exceeded",
    ),
    _bad(
        "an unknown model",
        TEXT,
        {"model": "no-such-model"},
        "model",
        status=404,
        code="model_not_found",
        word="no-such-model",
    ),
    _bad("no model", CHAT, {"model": "ABSENT"}, "model"),
    _bad("an unknown field", TEXT, {"temprature": 1}, "temprature"),
    _bad("a field that is not supported", CHAT, {"tools": [{}]}, "tools"),
    _bad("stream_options without stream", TEXT, {"stream_options": {}}, "stream_options"),
    BadRequest("a wrong method", TEXT, b"", 405, method="GET", code=""),
    BadRequest("an unknown route", "/v1/embeddings", b"{}", 404, code=""),
    BadRequest("an unknown model's card", "/v1/models/other", b"", 404, "model", method="GET",
               code="model_not_found"),
)  # fmt: skip


async def _refusal(cluster: Cluster, bad: BadRequest) -> str | None:
    """Send a bad request; return what is wrong with its answer."""
    content = bad.content.replace(b'"MODEL"', json.dumps(cluster.model_name).encode())
    response = await cluster.client.request(bad.method, bad.path, content=content)
    if response.status_code != bad.status:
        return f"{bad.name}: status {response.status_code}, not {bad.status}: {response.text}"
    return _shape_fault(bad, response)


def _shape_fault(bad: BadRequest, response: httpx.Response) -> str | None:
    answer = response.json()
    if set(answer) != {"error"} or set(answer["error"]) != {"message", "type", "param", "code"}:
        return f"{bad.name}: not OpenAI's shape: {answer}"
    error = answer["error"]
    if error["param"] != bad.param or (bad.code and error["code"] != bad.code):
        return f"{bad.name}: {error['param']!r} is blamed with {error['code']!r}: {error}"
    if not error["message"] or bad.word not in error["message"]:
        return f"{bad.name}: the message does not say {bad.word!r}: {error['message']!r}"
    if bad.param and bad.param.partition("[")[0] not in error["message"]:
        return f"{bad.name}: the message does not name {bad.param!r}: {error['message']!r}"
    if "x-request-id" not in response.headers:
        return f"{bad.name}: the answer has no request id"
    return None


@asynccontextmanager
async def _undisturbed_stream(cluster: Cluster) -> AsyncIterator[None]:
    """Run the block while a stream runs that goes on after it, and check all that came of it."""
    token_ids: list[int] = []
    is_over = False
    async with cluster.stream(TEXT, LONG_STREAM) as response:
        events = events_of(response)

        async def listen() -> None:
            num_left = MORE_EVENTS
            async for event in events:
                token_ids.extend(token for one in event["choices"] for token in one["token_ids"])
                began.set()
                num_left -= is_over
                if not num_left:
                    return

        began = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            stream = group.create_task(listen())
            await began.wait()
            yield
            assert not stream.done(), "the stream was over before the block"
            is_over = True
    alone = await cluster.ask(TEXT, {**LONG_STREAM, "max_tokens": len(token_ids)})
    assert tuple(token_ids) == alone.choices[0].token_ids


async def test_bad_requests_are_refused_by_name_while_a_stream_goes_on(split: Cluster) -> None:
    async with _undisturbed_stream(split):
        answers = await asyncio.gather(*(_refusal(split, bad) for bad in BAD_REQUESTS))
    wrong = [answer for answer in answers if answer is not None]
    assert not wrong, "\n".join(wrong)
    health = await split.client.get("/health")
    assert health.status_code == 200
    for kv in (await split.wait_idle()).values():
        assert kv.total == kv.free + kv.cached


async def test_a_refused_stream_is_a_plain_error_and_no_stream(split: Cluster) -> None:
    body = {"prompt": "Hello.", "max_tokens": 0}
    async with split.stream(TEXT, body) as response:
        content = await response.aread()
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert json.loads(content)["error"]["param"] == "max_tokens"


async def test_a_body_that_never_comes_whole_disturbs_nothing(split: Cluster) -> None:
    address = httpx.URL(split.url)
    _, writer = await asyncio.open_connection(address.host, address.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head + b'{"model"')
    await writer.drain()
    answer = await split.ask(TEXT, {"prompt": "Hello", "max_tokens": 2, "temperature": 0})
    assert answer.choices[0].finish_reason == "length"
    writer.close()
    await writer.wait_closed()
    await split.wait_idle()
