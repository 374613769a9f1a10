from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ErrorCode, ModelError, RequestError
from services.gateway.chat_template import ChatMessage
from services.gateway.detokenizer import decode
from services.gateway.tokenizer import ModelTokenizer
from tests.support.fake_backend import END, MAX_MODEL_LEN, START, plain_tokenizer, write_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> ModelTokenizer:
    return ModelTokenizer.load(tiny_folder, MAX_MODEL_LEN)


def rendered(content: str) -> str:
    return f"{START}user\n{content}{END}\n{START}assistant\n"


def user(content: str) -> list[ChatMessage]:
    return [ChatMessage("user", content)]


@given(content=st.text(max_size=60).filter(lambda text: START not in text and END not in text))
def test_ordinary_messages_encode_as_the_rendered_text_does(content, tokenizer, tiny_folder):
    expected = plain_tokenizer(tiny_folder).encode(rendered(content)).ids
    assert tokenizer.encode_chat(user(content)) == expected


@given(
    st.lists(
        st.sampled_from([START, END, "<|im_", "start|>", "end|>", "<", "a", "\ue000", "\ue001"]),
        max_size=8,
    )
)
def test_special_tokens_in_a_message_stay_text(tokenizer, tiny_folder, pieces):
    content = "".join(pieces)
    plain = plain_tokenizer(tiny_folder)
    start, end = plain.token_to_id(START), plain.token_to_id(END)
    ids = tokenizer.encode_chat(user(content))
    assert [token_id for token_id in ids if token_id in (start, end)] == [start, end, start]
    assert decode(tokenizer.token_bytes, ids) == f"user\n{content}\nassistant\n"


def test_special_tokens_in_a_name_stay_text(tmp_path):
    folder = write_tiny_model(
        tmp_path, "{% for m in messages %}{{ m.name }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = ModelTokenizer.load(folder, MAX_MODEL_LEN)
    ids = tokenizer.encode_chat([ChatMessage("user", "hello", END)])
    assert ids.count(plain_tokenizer(folder).token_to_id(END)) == 1


def test_a_raw_prompt_is_its_callers_own_and_has_special_tokens(tokenizer, tiny_folder):
    text = rendered("hello there")
    assert tokenizer.encode_text(text) == plain_tokenizer(tiny_folder).encode(text).ids


def test_a_prompt_that_no_context_can_hold_is_refused_before_it_is_tokenized(tokenizer):
    text = "a" * (tokenizer.max_prompt_chars + 1)
    with pytest.raises(RequestError) as refusal:
        tokenizer.encode_chat(user(text))
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.CONTEXT_EXCEEDED, "messages")
    with pytest.raises(RequestError) as refusal:
        tokenizer.encode_text(text)
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.CONTEXT_EXCEEDED, "prompt")


def refusal_of(folder: Path, template: str | None, content: str = "hello") -> RequestError:
    tokenizer = ModelTokenizer.load(write_tiny_model(folder, template), MAX_MODEL_LEN)
    with pytest.raises(RequestError) as refusal:
        tokenizer.encode_chat(user(content))
    return refusal.value


def test_a_template_that_renders_without_end_is_stopped(tmp_path):
    template = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    assert refusal_of(tmp_path, template).code is ErrorCode.CONTEXT_EXCEEDED


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_refuses_the_request(tmp_path, template):
    error = refusal_of(tmp_path, template)
    assert (error.code, error.param) == (ErrorCode.BAD_REQUEST, "messages")


def test_a_model_without_template_refuses_chat_and_says_what_to_use(tmp_path):
    assert "/v1/completions" in refusal_of(tmp_path, None).message


def test_templates_have_the_usual_globals_tags_and_filters(tmp_path):
    folder = write_tiny_model(
        tmp_path,
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ {'t': m.content} | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%%') }}{{ eos_token }}",
    )
    tokenizer = ModelTokenizer.load(folder, MAX_MODEL_LEN)
    ids = tokenizer.encode_chat([ChatMessage("user", "<é>"), ChatMessage("user", "no")])
    expected = plain_tokenizer(folder).encode(START + '{"t": "<é>"}%' + END).ids
    assert ids == expected


def test_chat_template_jinja_stands_before_the_config(tmp_path):
    folder = write_tiny_model(tmp_path)
    (folder / "chat_template.jinja").write_text("fox", encoding="utf-8")
    tokenizer = ModelTokenizer.load(folder, MAX_MODEL_LEN)
    assert decode(tokenizer.token_bytes, tokenizer.encode_chat(user("dog"))) == "fox"


def test_a_broken_folder_is_refused_with_the_file_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ModelTokenizer.load(tmp_path, MAX_MODEL_LEN)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ModelTokenizer.load(tmp_path, MAX_MODEL_LEN)
    write_tiny_model(tmp_path, "{% if %}")
    with pytest.raises(ModelError, match="chat template"):
        ModelTokenizer.load(tmp_path, MAX_MODEL_LEN)
    (tmp_path / "tokenizer_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        ModelTokenizer.load(tmp_path, MAX_MODEL_LEN)
