import math

import pytest

from common.sampling import SampledToken
from services.gateway.logprobs import LOWEST_LOGPROB, chat_logprobs, text_logprobs, token_text
from services.gateway.tokenizer import ModelTokenizer
from tests.support.fake_backend import MAX_MODEL_LEN, plain_tokenizer


@pytest.fixture(scope="module")
def token_bytes(tiny_folder):
    return ModelTokenizer.load(tiny_folder, MAX_MODEL_LEN).token_bytes


@pytest.fixture(scope="module")
def ids(tiny_folder):
    return plain_tokenizer(tiny_folder).encode("xé").ids


def test_chat_entries_have_text_logprob_bytes_and_alternatives(token_bytes, ids):
    x = ids[0]
    shown = chat_logprobs(token_bytes, [SampledToken(x, -0.5, ((x, -0.5), (1, -math.inf)))])
    assert shown["refusal"] is None
    (entry,) = shown["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("x", -0.5, [0x78])
    assert entry["top_logprobs"] == [
        {"token": "x", "logprob": -0.5, "bytes": [0x78]},
        {"token": "<|im_end|>", "logprob": LOWEST_LOGPROB, "bytes": list(b"<|im_end|>")},
    ]


def test_a_part_of_a_character_is_shown_by_its_bytes(tiny_folder, token_bytes):
    first = plain_tokenizer(tiny_folder).encode("👩").ids[0]
    assert token_text(token_bytes, first) == r"bytes:\xf0"
    (entry,) = chat_logprobs(token_bytes, [SampledToken(first, -1.0)])["content"]
    assert entry["bytes"] == [0xF0]


def test_text_logprobs_hold_the_drawn_token_among_the_alternatives(token_bytes, ids):
    x = ids[0]
    shown = text_logprobs(token_bytes, [SampledToken(x, -3.0, ((1, -0.1),))], [7])
    assert shown == {
        "text_offset": [7],
        "token_logprobs": [-3.0],
        "tokens": ["x"],
        "top_logprobs": [{"<|im_end|>": -0.1, "x": -3.0}],
    }
