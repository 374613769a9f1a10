"""POST /tokenize and /detokenize."""

import pytest
from tokenizers import processors

from services.gateway.http_settings import HttpSettings
from tests.support.fake_backend import (
    END,
    MAX_MODEL_LEN,
    MODEL_NAME,
    START,
    asgi_client,
    fake_backend,
    plain_tokenizer,
    write_tiny_model,
)
from tests.support.json_schema import schema_problems

MESSAGES = [{"role": "user", "content": f"hello {END}"}]


async def test_a_prompt_has_the_ids_that_its_completion_has(tiny_folder):
    backend = fake_backend(tiny_folder)
    text = f"{START}hello 안녕"
    async with asgi_client(backend) as client:
        answer = (await client.post("/tokenize", json={"prompt": text})).json()
        await client.post("/v1/completions", json={"model": MODEL_NAME, "prompt": text})
        joined = await client.post("/detokenize", json={"tokens": answer["tokens"]})
        document = (await client.get("/openapi.json")).json()
    assert tuple(answer["tokens"]) == backend.prompts[0]
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert joined.json() == {"prompt": text}
    assert schema_problems(document, "Tokenization", answer) == []
    assert schema_problems(document, "Detokenization", joined.json()) == []


async def test_messages_have_the_ids_that_their_chat_has(tiny_folder):
    backend = fake_backend(tiny_folder)
    async with asgi_client(backend) as client:
        asked = {"model": MODEL_NAME, "messages": MESSAGES}
        whole = (await client.post("/tokenize", json=asked)).json()["tokens"]
        await client.post("/v1/chat/completions", json=asked)
        bare = await client.post("/tokenize", json={**asked, "add_generation_prompt": False})
        joined = await client.post("/detokenize", json={"tokens": bare.json()["tokens"]})
    assert tuple(whole) == backend.prompts[0]
    assert joined.json()["prompt"] == f"{START}user\nhello {END}{END}\n"
    assert whole[: bare.json()["count"]] == bare.json()["tokens"]
    assert whole.count(plain_tokenizer(tiny_folder).token_to_id(END)) == 1


async def test_special_tokens_are_added_as_asked(tmp_path):
    folder = write_tiny_model(tmp_path)
    tokenizer = plain_tokenizer(folder)
    start = tokenizer.token_to_id(START)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, start)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    starts = {}
    async with asgi_client(fake_backend(folder)) as client:
        for adds in (None, True, False):
            for prompt in ({"prompt": "hello"}, {"messages": MESSAGES}):
                request = {**prompt, "add_special_tokens": adds}
                tokens = (await client.post("/tokenize", json=request)).json()["tokens"]
                starts[adds, *prompt] = tokens.count(start)
    assert starts == {
        (None, "prompt"): 1,
        (True, "prompt"): 1,
        (False, "prompt"): 0,
        (None, "messages"): 2,
        (True, "messages"): 3,
        (False, "messages"): 2,
    }


async def test_token_strings_come_when_asked_for(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        request = {"prompt": f"xé{END}", "return_token_strs": True}
        answer = (await client.post("/tokenize", json=request)).json()
        silent = (await client.post("/tokenize", json={"prompt": "x"})).json()
    assert answer["token_strs"][0] == "x"
    assert answer["token_strs"][-1] == END
    assert len(answer["token_strs"]) == answer["count"]
    assert "token_strs" not in silent


async def test_nothing_is_tokenized_to_nothing(tiny_folder):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_long_text_is_cut_and_joined_in_a_thread_to_the_same(tiny_folder):
    text = "hello there " * 8
    answers = []
    for inline in (0, 4096):
        settings = HttpSettings(inline_tokenize_chars=inline)
        async with asgi_client(fake_backend(tiny_folder), settings) as client:
            tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
            joined = await client.post("/detokenize", json={"tokens": tokens})
            answers.append((tokens, joined.json()["prompt"]))
    assert answers[0] == answers[1]
    assert answers[0][1] == text


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "chat_template": "y"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "x", "model": "gpt-4"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * 100_000}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt-4"}, 404, "model"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(tiny_folder, path, body, status, param):
    async with asgi_client(fake_backend(tiny_folder)) as client:
        response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_the_tokenizer_s_routes_share_the_bound_on_open_requests(tiny_folder):
    settings = HttpSettings(max_open_requests=0)
    async with asgi_client(fake_backend(tiny_folder), settings) as client:
        for path in ("/tokenize", "/detokenize"):
            assert (await client.post(path, json={})).status_code == 429
