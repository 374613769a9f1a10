"""The application over ASGI, without a socket."""

import json

import pytest

from common.errors import ErrorCode, RequestError
from common.messages.fields import PhaseName, PhaseRecord
from services.gateway.fake_backend import FakeBackend, FakeBehaviour
from services.gateway.http_settings import HttpSettings
from tests.support.fake_backend import (
    END,
    MAX_MODEL_LEN,
    MODEL_NAME,
    asgi_client,
    fake_backend,
    plain_tokenizer,
    replying,
    served_model,
)

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": MODEL_NAME, "prompt": "hello"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


def assert_openai_error(response, status: int, code: str | None, param: str | None = None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert response.headers["x-request-id"].startswith("req-")


def events_of(response) -> list[dict | str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def test_chat_answers_in_openais_shape(tiny_folder):
    backend = fake_backend(tiny_folder, behaviour=FakeBehaviour(num_cached_tokens=3, burst=2))
    async with asgi_client(backend) as client:
        response = await client.post(CHAT_PATH, json=CHAT)
    body = response.json()
    num_prompt = len(backend.prompts[0])
    num_completion = len(plain_tokenizer(tiny_folder).encode("hello there").ids) + 1
    assert response.status_code == 200
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert (body["object"], body["model"]) == ("chat.completion", MODEL_NAME)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert backend.submissions[0].closed.is_set()


PHASES = (
    PhaseRecord(name=PhaseName.PREFILL, worker="p0", seconds=0.5, num_tokens=7),
    PhaseRecord(
        name=PhaseName.TRANSFER, worker="p0", seconds=0.002, num_bytes=4_000_000, num_calls=3
    ),
)
TOLD_PHASES = [
    {
        "name": "prefill",
        "worker": "p0",
        "seconds": 0.5,
        "num_tokens": 7,
        "num_bytes": 0,
        "num_calls": 0,
        "gigabytes_per_second": None,
    },
    {
        "name": "transfer",
        "worker": "p0",
        "seconds": 0.002,
        "num_tokens": 0,
        "num_bytes": 4_000_000,
        "num_calls": 3,
        "gigabytes_per_second": 2.0,
    },
]


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
async def test_usage_tells_the_phases_of_a_request_to_whom_asks_for_them(tiny_folder, path, body):
    backend = fake_backend(tiny_folder, behaviour=FakeBehaviour(phases=PHASES))
    asking = {**body, "x_phases": True}
    streaming = {**asking, "stream": True, "stream_options": {"include_usage": True}}
    async with asgi_client(backend) as client:
        plain = (await client.post(path, json=body)).json()
        off = (await client.post(path, json={**body, "x_phases": False})).json()
        whole = (await client.post(path, json=asking)).json()
        events = events_of(await client.post(path, json=streaming))
    assert "x_phases" not in plain["usage"]
    assert off["usage"] == plain["usage"]
    assert whole["usage"]["x_phases"] == events[-2]["usage"]["x_phases"] == TOLD_PHASES


async def test_the_phases_of_several_prompts_come_prompt_by_prompt(tiny_folder):
    backend = fake_backend(tiny_folder, behaviour=FakeBehaviour(phases=PHASES[:1]))
    body = {**TEXT, "prompt": ["a", "b"], "x_phases": True}
    async with asgi_client(backend) as client:
        answer = (await client.post(TEXT_PATH, json=body)).json()
    assert answer["usage"]["x_phases"] == TOLD_PHASES[:1] * 2


async def test_phases_are_refused_in_a_stream_that_has_no_place_for_them(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        body = {**CHAT, "x_phases": True, "stream": True}
        response = await client.post(CHAT_PATH, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x_phases"


async def test_completions_answer_text_and_token_id_prompts_alike(tiny_folder):
    backend = fake_backend(tiny_folder)
    ids = plain_tokenizer(tiny_folder).encode("hello").ids
    async with asgi_client(backend) as client:
        by_text = (await client.post(TEXT_PATH, json=TEXT)).json()
        by_ids = (await client.post(TEXT_PATH, json={**TEXT, "prompt": ids})).json()
    assert backend.prompts == [tuple(ids), tuple(ids)]
    assert by_text["object"] == "text_completion"
    assert by_text["choices"] == by_ids["choices"]
    assert by_text["choices"][0]["text"] == "hello there"


@pytest.mark.parametrize("burst", [1, 3, 100])
async def test_a_chat_stream_joins_to_the_whole_answer(tiny_folder, burst):
    text = "안녕 👩‍👩‍👧‍👦 hello"
    backend = fake_backend(tiny_folder, text, FakeBehaviour(burst=burst, num_cached_tokens=1))
    request = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with asgi_client(backend) as client:
        whole = (await client.post(CHAT_PATH, json=CHAT)).json()
        events = events_of(await client.post(CHAT_PATH, json=request))
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == text
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


async def test_a_text_stream_has_no_role_and_ends_with_done(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        events = events_of(await client.post(TEXT_PATH, json={**TEXT, "stream": True}))
    assert events[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hello there"
    assert all("usage" not in event for event in events[:-1])
    assert "delta" not in events[0]["choices"][0]


async def test_n_choices_are_told_apart_by_index(tiny_folder):
    model = served_model(tiny_folder)
    scripts = [replying(tiny_folder, text) for text in ("hello", "the quick fox", "dog")]
    backend = FakeBackend(model, lambda prompt, params, n: scripts[n](prompt, params, n))
    async with asgi_client(backend) as client:
        whole = (await client.post(CHAT_PATH, json={**CHAT, "n": 3})).json()
        events = events_of(await client.post(TEXT_PATH, json={**TEXT, "n": 3, "stream": True}))
    contents = [choice["message"]["content"] for choice in whole["choices"]]
    assert contents == ["hello", "the quick fox", "dog"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    texts = ["", "", ""]
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == contents


async def test_a_stop_string_ends_one_choice_and_tells_the_cluster(tiny_folder):
    model = served_model(tiny_folder)
    scripts = [replying(tiny_folder, "abc#!def"), replying(tiny_folder, "abcdef")]
    backend = FakeBackend(model, lambda prompt, params, n: scripts[n](prompt, params, n))
    request = {**CHAT, "n": 2, "stop": "#!"}
    async with asgi_client(backend) as client:
        body = (await client.post(CHAT_PATH, json=request)).json()
        events = events_of(await client.post(CHAT_PATH, json={**request, "stream": True}))
    assert [choice["message"]["content"] for choice in body["choices"]] == ["abc", "abcdef"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert body["usage"]["completion_tokens"] == 5 + 7
    assert backend.submissions[0].cancelled_choices == {0}
    deltas = [event["choices"][0] for event in events[:-1]]
    first = [delta["delta"].get("content", "") for delta in deltas if delta["index"] == 0]
    assert "".join(first) == "abc"


async def test_reaching_max_tokens_is_length(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        body = (await client.post(CHAT_PATH, json={**CHAT, "max_tokens": 2})).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


async def test_chat_logprobs_have_one_entry_per_token_streamed_or_not(tiny_folder):
    request = {**CHAT, "logprobs": True, "top_logprobs": 2}
    backend = fake_backend(tiny_folder, "é👩", FakeBehaviour(burst=2))
    async with asgi_client(backend) as client:
        body = (await client.post(CHAT_PATH, json=request)).json()
        events = events_of(await client.post(CHAT_PATH, json={**request, "stream": True}))
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelled == f"é👩{END}".encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    streamed = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [entry for shown in streamed if shown for entry in shown["content"]] == content


async def test_text_logprobs_are_four_lists_streamed_or_not(tiny_folder):
    request = {**TEXT, "logprobs": 1}
    async with asgi_client(fake_backend(tiny_folder)) as client:
        body = (await client.post(TEXT_PATH, json=request)).json()
        events = events_of(await client.post(TEXT_PATH, json={**request, "stream": True}))
    shown = body["choices"][0]["logprobs"]
    assert {len(values) for values in shown.values()} == {body["usage"]["completion_tokens"]}
    assert shown["text_offset"][0] == 0
    for name, values in shown.items():
        streamed = [event["choices"][0]["logprobs"][name] for event in events[:-1]]
        assert [value for part in streamed for value in part] == values


async def test_token_ids_come_back_when_asked_for(tiny_folder):
    backend = fake_backend(tiny_folder)
    tokenizer = plain_tokenizer(tiny_folder)
    expected = [*tokenizer.encode("hello there").ids, tokenizer.token_to_id(END)]
    async with asgi_client(backend) as client:
        chat = (await client.post(CHAT_PATH, json={**CHAT, "return_token_ids": True})).json()
        text = (await client.post(TEXT_PATH, json={**TEXT, "return_token_ids": True})).json()
        streams = [
            events_of(
                await client.post(path, json={**body, "return_token_ids": True, "stream": True})
            )
            for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT))
        ]
    assert chat["choices"][0]["token_ids"] == text["choices"][0]["token_ids"] == expected
    assert chat["prompt_token_ids"] == list(backend.prompts[0])
    assert text["choices"][0]["prompt_token_ids"] == list(backend.prompts[1])
    for stream in streams:
        entries = [event["choices"][0] for event in stream[:-1]]
        assert [i for entry in entries for i in entry.get("token_ids", [])] == expected
    assert streams[0][0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in streams[0][1:-1])
    first = streams[1][0]["choices"][0]
    assert first["prompt_token_ids"] == text["choices"][0]["prompt_token_ids"]


async def test_models_are_listed_and_found_by_name(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get(f"/v1/models/{MODEL_NAME}")).json()
        assert_openai_error(await client.get("/v1/models/a/b"), 404, "model_not_found", "model")
    assert listed == {"object": "list", "data": [one]}
    assert (one["id"], one["object"], one["created"]) == (MODEL_NAME, "model", 1_700_000_000)


async def test_health_follows_the_backend(tiny_folder):
    backend = fake_backend(tiny_folder)
    async with asgi_client(backend) as client:
        assert (await client.get("/health")).status_code == 200
        backend.readiness_answer = (False, "no decode worker")
        response = await client.get("/health")
    assert (response.status_code, response.json()["reason"]) == (503, "no decode worker")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "bad_request", None),
        (b'{"model":"\xff"}', 400, "bad_request", None),
        (json.dumps({**CHAT, "model": "gpt-4"}), 404, "model_not_found", "model"),
        (json.dumps({**CHAT, "max_tokens": 0}), 400, "bad_request", "max_tokens"),
        (json.dumps({**CHAT, "messages": []}), 400, "bad_request", "messages"),
        (
            json.dumps({**CHAT, "max_tokens": MAX_MODEL_LEN}),
            400,
            "context_length_exceeded",
            "max_tokens",
        ),
        (
            json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * 200}]}),
            400,
            "context_length_exceeded",
            "messages",
        ),
        (json.dumps({**CHAT, "stop": ["x"] * 10_000}), 400, "bad_request", "stop"),
        (json.dumps({**CHAT, "tools": [{}]}), 400, "bad_request", "tools"),
    ],
)
async def test_a_bad_chat_request_gets_its_status_and_field(tiny_folder, body, status, code, param):
    backend = fake_backend(tiny_folder)
    async with asgi_client(backend) as client:
        assert_openai_error(await client.post(CHAT_PATH, content=body), status, code, param)
        assert (await client.post(CHAT_PATH, json=CHAT)).status_code == 200
    assert len(backend.submissions) == 1


@pytest.mark.parametrize("prompt", ["", []])
async def test_an_empty_prompt_is_refused(tiny_folder, prompt):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        response = await client.post(TEXT_PATH, json={**TEXT, "prompt": prompt})
    assert_openai_error(response, 400, "bad_request", "prompt")


async def test_a_token_id_outside_the_vocabulary_is_refused(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        response = await client.post(TEXT_PATH, json={**TEXT, "prompt": [10**6]})
    assert_openai_error(response, 400, "bad_request", "prompt")


async def test_unknown_routes_and_methods_have_openais_shape(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        assert_openai_error(await client.get("/v2/none"), 404, None)
        response = await client.get(CHAT_PATH)
    assert_openai_error(response, 405, None)
    assert response.headers["allow"] == "POST"


async def test_a_body_over_the_limit_is_refused_while_it_arrives(tiny_folder):
    num_sent = 0

    async def endless():
        nonlocal num_sent
        while num_sent < 1000:
            num_sent += 1
            yield b"x" * 100

    settings = HttpSettings(max_body_bytes=1000)
    async with asgi_client(fake_backend(tiny_folder), settings) as client:
        by_length = await client.post(CHAT_PATH, content=b"x" * 1001)
        by_counting = await client.post(CHAT_PATH, content=endless())
    assert_openai_error(by_length, 413, "body_too_large")
    assert_openai_error(by_counting, 413, "body_too_large")
    assert num_sent <= 12


async def test_too_many_open_requests_are_refused_with_retry_after(tiny_folder):
    settings = HttpSettings(max_open_requests=0, queue_full_retry_seconds=7)
    async with asgi_client(fake_backend(tiny_folder), settings) as client:
        response = await client.post(CHAT_PATH, json=CHAT)
    assert_openai_error(response, 429, "queue_full")
    assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_refusal_by_the_cluster_keeps_its_status_streamed_or_not(tiny_folder, is_stream):
    backend = fake_backend(tiny_folder)
    backend.behaviour.refusal = RequestError(
        ErrorCode.NO_WORKER, "no decode worker", retry_after_seconds=2
    )
    async with asgi_client(backend) as client:
        response = await client.post(CHAT_PATH, json={**CHAT, "stream": is_stream})
    assert_openai_error(response, 503, "no_worker")
    assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_before_the_first_token_keeps_its_status(tiny_folder, is_stream):
    failure = RequestError(ErrorCode.WORKER_DIED, "prefill-0 died")
    backend = fake_backend(
        tiny_folder, behaviour=FakeBehaviour(num_tokens_before_wait=0, failure=failure)
    )
    backend.behaviour.resume.set()
    async with asgi_client(backend) as client:
        response = await client.post(CHAT_PATH, json={**CHAT, "stream": is_stream})
    assert_openai_error(response, 502, "worker_died")
    assert backend.submissions[0].closed.is_set()


async def test_a_failure_in_the_middle_is_an_error_event_without_done(tiny_folder):
    failure = RequestError(ErrorCode.WORKER_DIED, "decode-0 died")
    backend = fake_backend(
        tiny_folder, behaviour=FakeBehaviour(num_tokens_before_wait=2, failure=failure)
    )
    backend.behaviour.resume.set()
    async with asgi_client(backend) as client:
        response = await client.post(CHAT_PATH, json={**CHAT, "stream": True})
        whole = await client.post(CHAT_PATH, json=CHAT)
    events = events_of(response)
    assert events[-1]["error"]["code"] == "worker_died"
    assert "choices" in events[-2]
    assert backend.submissions[0].closed.is_set()
    assert_openai_error(whole, 502, "worker_died")


async def test_a_bug_is_a_500_in_openais_shape_and_closes_the_request(tiny_folder, capsys):
    def script(prompt, params, choice):
        return ["not a token"]

    backend = FakeBackend(served_model(tiny_folder), script)
    async with asgi_client(backend) as client:
        response = await client.post(CHAT_PATH, json=CHAT)
    assert_openai_error(response, 500, "internal")
    assert backend.submissions[0].closed.is_set()
    assert "request_crashed" in capsys.readouterr().out


async def test_the_openapi_page_describes_the_bodies(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert {"ChatRequest", "TextRequest", "Message", "Error"} <= set(schemas)
    body = document["paths"][CHAT_PATH]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    references = json.dumps(document).split('"$ref": "#/components/schemas/')[1:]
    assert {reference.split('"')[0] for reference in references} <= set(schemas)


async def test_a_long_prompt_is_tokenized_in_a_thread_to_the_same_ids(tiny_folder):
    backend = fake_backend(tiny_folder)
    for inline in (0, 4096):
        async with asgi_client(backend, HttpSettings(inline_tokenize_chars=inline)) as client:
            assert (await client.post(CHAT_PATH, json=CHAT)).status_code == 200
    assert backend.prompts[0] == backend.prompts[1]


async def test_logs_tell_the_story_without_the_text(tiny_folder, capsys):
    request = {**CHAT, "messages": [{"role": "user", "content": "secret fox"}]}
    backend = fake_backend(tiny_folder, "secret dog")
    async with asgi_client(backend) as client:
        answered = await client.post(CHAT_PATH, json=request)
        refused = await client.post(CHAT_PATH, json={**request, "n": 0})
    logged = capsys.readouterr().out
    for response, event in (
        (answered, "request_received"),
        (answered, "request_finished"),
        (refused, "request_refused"),
    ):
        lines = [line for line in logged.splitlines() if event in line]
        assert [response.headers["x-request-id"] in line for line in lines] == [True]
    assert "secret" not in logged
