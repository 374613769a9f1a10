import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ErrorCode, RequestError
from common.sampling import MAX_SEED
from services.gateway.fields import HARMLESS, NEUTRAL_VALUES
from services.gateway.parsing import (
    check_model,
    check_num_choices,
    parse_body,
    sampling_params,
)
from services.gateway.schema import ChatRequest, TextRequest
from tests.support.fake_backend import MAX_MODEL_LEN, MODEL_NAME, served_model

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL_NAME, "prompt": "hi"}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return served_model(tiny_folder)


def chat(**fields):
    return parse_body(ChatRequest, json.dumps({**CHAT, **fields}).encode())


def text(**fields):
    return parse_body(TextRequest, json.dumps({**TEXT, **fields}).encode())


def refusal(call, *args, **kwargs) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*args, **kwargs)
    assert caught.value.code in (ErrorCode.BAD_REQUEST, ErrorCode.CONTEXT_EXCEEDED)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": ["ok", "x" * 257]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": 1}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages[0].content[0].type",
        ),
        ({"model": None}, "model"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"store": 0}, "store"),
        ({"best_of": 2}, "best_of"),
        ({"no_such_field": None}, "no_such_field"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
def test_a_wrong_chat_field_is_refused_by_its_path(fields, param):
    error = refusal(chat, **fields)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[1], [-2]]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, 2.0]}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"suffix": 0}, "suffix"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": 1}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_text_field_is_refused_by_its_path(fields, param):
    assert refusal(text, **fields).param == param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        ([], [[]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[], [1]], [[], [1]]),
    ],
)
def test_every_kind_of_prompt_becomes_a_list_of_prompts(prompt, prompts):
    assert text(prompt=prompt).prompt == prompts


def test_best_of_may_say_what_n_says():
    assert text(best_of=1).best_of == 1
    assert text(best_of=2, n=2).n == 2


def test_prompts_times_n_are_bounded():
    check_num_choices(text(prompt=["a", "b"], n=3), 6)
    error = refusal(check_num_choices, text(prompt=["a", "b"], n=3), 5)
    assert error.param == "prompt"
    assert "2 prompts times n 3" in error.message


def test_a_message_may_be_sent_back_as_it_was_answered():
    answered = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": []}
    assert chat(messages=[*CHAT["messages"], answered]).messages[1].role == "assistant"
    called = {**answered, "tool_calls": [{}]}
    assert refusal(chat, messages=[called]).param == "messages[0].tool_calls"


def test_texts_have_openais_short_default_and_chats_the_rest_of_the_context(model):
    assert sampling_params(text(), 3, model).max_tokens == 16
    assert sampling_params(text(), MAX_MODEL_LEN - 5, model).max_tokens == 5
    assert sampling_params(chat(), 3, model).max_tokens == MAX_MODEL_LEN - 3


def test_a_refused_prompt_of_a_list_is_named_by_its_place(model):
    assert refusal(sampling_params, text(), 0, model, 0, "prompt[4]").param == "prompt[4]"


def test_neutral_and_harmless_fields_pass():
    for name, values in NEUTRAL_VALUES.items():
        for value in values:
            chat(**{name: value})
    for name in HARMLESS:
        chat(**{name: {"any": "thing"}})


def test_null_means_absent_in_every_optional_field(model):
    names = set(ChatRequest.model_fields) - {"model", "messages"}
    request = chat(**dict.fromkeys(names))
    params = sampling_params(request, 3, model)
    assert (params.temperature, params.top_p, params.top_k, params.num_choices) == (1.0, 1.0, 0, 1)
    assert params.max_tokens == MAX_MODEL_LEN - 3
    assert params.num_logprobs is None
    assert params.eos_token_ids == model.eos_token_ids


def test_every_sampling_field_reaches_the_params(model):
    request = chat(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias={"5": -100},
        seed=-1,
        n=2,
        logprobs=True,
        top_logprobs=4,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[9],
    )
    params = sampling_params(request, 3, model)
    assert params.max_tokens == 7
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 3, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, -1)
    assert (params.frequency_penalty, params.logit_bias) == (1, {5: -100})
    assert (params.seed, params.num_choices, params.num_logprobs) == (MAX_SEED, 2, 4)
    assert (params.min_tokens, params.ignore_eos, params.stop_token_ids) == (2, True, (9,))


def test_requests_without_seed_draw_different_ones(model):
    request = chat()
    assert sampling_params(request, 3, model).seed != sampling_params(request, 3, model).seed


@pytest.mark.parametrize(
    ("fields", "num_prompt_tokens", "param", "code"),
    [
        ({}, 0, "messages", ErrorCode.BAD_REQUEST),
        ({}, MAX_MODEL_LEN, "messages", ErrorCode.CONTEXT_EXCEEDED),
        ({"max_tokens": MAX_MODEL_LEN}, 1, "max_tokens", ErrorCode.CONTEXT_EXCEEDED),
        (
            {"max_completion_tokens": MAX_MODEL_LEN},
            1,
            "max_completion_tokens",
            ErrorCode.CONTEXT_EXCEEDED,
        ),
        ({"max_tokens": 1, "max_completion_tokens": 2}, 1, "max_tokens", ErrorCode.BAD_REQUEST),
        ({"max_tokens": 1, "min_tokens": 2}, 1, "min_tokens", ErrorCode.BAD_REQUEST),
        ({"stop_token_ids": [10**6]}, 1, "stop_token_ids", ErrorCode.BAD_REQUEST),
        ({"logit_bias": {"1000000": 1}}, 1, "logit_bias", ErrorCode.BAD_REQUEST),
        ({"logit_bias": {"x": 1}}, 1, "logit_bias", ErrorCode.BAD_REQUEST),
        ({"logit_bias": {"0010": 100, "10": -100}}, 1, "logit_bias", ErrorCode.BAD_REQUEST),
        ({"logit_bias": {"00": 1}}, 1, "logit_bias", ErrorCode.BAD_REQUEST),
        ({"logit_bias": {"9" * 5000: 1}}, 1, "logit_bias", ErrorCode.BAD_REQUEST),
        ({"top_logprobs": 1}, 1, "top_logprobs", ErrorCode.BAD_REQUEST),
    ],
)
def test_what_depends_on_model_and_prompt_is_refused_by_name(
    model, fields, num_prompt_tokens, param, code
):
    error = refusal(sampling_params, chat(**fields), num_prompt_tokens, model)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    ("fields", "num_prompt_tokens", "param", "leaves"),
    [
        ({"max_tokens": 8}, 43, "max_tokens", "leaves 7"),
        ({"max_completion_tokens": 8}, 43, "max_completion_tokens", "leaves 7"),
        ({}, 50, "messages", "messages has 50"),
    ],
)
def test_what_the_kv_pools_do_not_hold_is_refused_naming_kv_bytes(
    model, fields, num_prompt_tokens, param, leaves
):
    error = refusal(sampling_params, chat(**fields), num_prompt_tokens, model, 50)
    assert (error.code, error.param) == (ErrorCode.CONTEXT_EXCEEDED, param)
    assert "(kv_bytes) hold 50 tokens" in error.message
    assert leaves in error.message


@pytest.mark.parametrize(
    ("max_request_tokens", "context"),
    [(0, MAX_MODEL_LEN), (50, 50), (10**6, MAX_MODEL_LEN)],
)
def test_max_tokens_defaults_to_what_model_and_kv_pools_leave(model, max_request_tokens, context):
    assert sampling_params(chat(), 40, model, max_request_tokens).max_tokens == context - 40


def test_an_unknown_model_is_not_found(model):
    with pytest.raises(RequestError) as caught:
        check_model("gpt-4", model)
    assert (caught.value.code, caught.value.param) == (ErrorCode.MODEL_NOT_FOUND, "model")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b'{"model": "\\ud800"}', "JSON"),
        (b'{"temperature": NaN, "model": "tiny", "messages": []}', "temperature"),
        (b"[" * 100_000, "JSON"),
    ],
)
def test_a_body_that_is_no_request_is_refused_with_the_reason(body, reason):
    assert reason in refusal(parse_body, ChatRequest, body).message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content: must be a string or a list of text parts",
        ),
        ({"stop": 1}, "stop: must be a string or a list of strings"),
        ({"stop": ""}, "stop: must have 1 to 256 characters"),
    ],
)
def test_a_refusal_tells_every_form_that_a_field_may_have(fields, message):
    assert refusal(chat, **fields).message == message


def test_a_refusal_never_repeats_the_callers_text():
    error = refusal(chat, messages=[{"role": "user", "content": [{"secret words": 1}]}], n="secret")
    assert "secret" not in error.message.replace("messages[0].content[0].secret words", "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELD = st.sampled_from(
    sorted({*ChatRequest.model_fields, *TextRequest.model_fields, *NEUTRAL_VALUES})
)


@given(fields=st.dictionaries(FIELD | st.text(max_size=8), JSON, max_size=6), is_chat=st.booleans())
def test_any_json_is_accepted_or_refused_by_name_and_never_crashes(model, fields, is_chat):
    base, request_type = (CHAT, ChatRequest) if is_chat else (TEXT, TextRequest)
    body = json.dumps({**base, **fields}).encode("utf-8", "surrogatepass")
    with suppress(RequestError):
        request = parse_body(request_type, body)
        check_model(request.model, model)
        assert sampling_params(request, 3, model).max_tokens <= MAX_MODEL_LEN - 3


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_and_never_crash(body):
    refusal(parse_body, ChatRequest, body)
