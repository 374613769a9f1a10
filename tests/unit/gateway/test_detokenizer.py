import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from common.errors import ModelError
from services.gateway.detokenizer import Detokenizer, TokenBytes, decode
from services.gateway.tokenizer import ModelTokenizer
from tests.support.fake_backend import END, MAX_MODEL_LEN, plain_tokenizer

TEXTS = [
    "안녕하세요 세계, 반갑습니다.",
    "日本語の文章です。",
    "family 👩‍👩‍👧‍👦 and flag 🇰🇷 and skin 👍🏽",
    "a\ufffdb",
    " leading and trailing ",
    "",
]


@pytest.fixture(scope="module")
def token_bytes(tiny_folder: Path) -> TokenBytes:
    return ModelTokenizer.load(tiny_folder, MAX_MODEL_LEN).token_bytes


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole_and_never_hold_a_broken_character(tiny_folder, token_bytes, text):
    ids = plain_tokenizer(tiny_folder).encode(text).ids
    detokenizer = Detokenizer(token_bytes)
    pieces = [detokenizer.feed(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_every_single_byte_token_of_an_emoji_waits_for_the_last(token_bytes, tiny_folder):
    alphabet = plain_tokenizer(tiny_folder).get_vocab()
    byte_ids = {token_bytes.of(token_id): token_id for token_id in alphabet.values()}
    detokenizer = Detokenizer(token_bytes)
    pieces = [detokenizer.feed(byte_ids[bytes([byte])]) for byte in "👩".encode()]
    assert pieces == ["", "", "", "👩"]


def test_a_cut_off_character_becomes_one_replacement_at_the_end(token_bytes, tiny_folder):
    vocab = plain_tokenizer(tiny_folder).get_vocab()
    byte_ids = {token_bytes.of(token_id): token_id for token_id in vocab.values()}
    detokenizer = Detokenizer(token_bytes)
    assert [detokenizer.feed(byte_ids[bytes([byte])]) for byte in "👩".encode()[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"


@given(ids=st.lists(st.integers(0, 399), max_size=40))
def test_any_tokens_decode_as_the_library_decodes_them(ids, tiny_folder, token_bytes):
    expected = plain_tokenizer(tiny_folder).decode(ids, skip_special_tokens=True)
    assert decode(token_bytes, ids) == expected


def test_special_and_unknown_tokens_have_no_text(tiny_folder, token_bytes):
    end = plain_tokenizer(tiny_folder).token_to_id(END)
    assert decode(token_bytes, [end, 1_000_000]) == ""
    assert token_bytes.of(end) == END.encode()


def sentencepiece_like() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "▁Hello": 1, "▁wor": 2, "ld": 3, "▁": 4}
    vocab.update({f"<0x{byte:02X}>": 5 + byte for byte in range(256)})
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def table_of(tokenizer: tokenizers.Tokenizer) -> TokenBytes:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    return TokenBytes(tokenizer.get_vocab(), frozenset(), decoder)


def test_sentencepiece_decoders_join_bytes_and_strip_the_first_space_alone():
    tokenizer = sentencepiece_like()
    emoji = [5 + byte for byte in "👩".encode()]
    ids = [1, 2, 3, *emoji, 4, 4, *emoji]
    assert decode(table_of(tokenizer), ids) == tokenizer.decode(ids) == "Hello world👩  👩"


def test_metaspace_decoders_are_understood():
    tokenizer = sentencepiece_like()
    tokenizer.decoder = decoders.Metaspace()
    ids = [1, 2, 3]
    assert decode(table_of(tokenizer), ids) == tokenizer.decode(ids) == "Hello world"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC()])
def test_an_unknown_decoder_is_refused_by_name(decoder):
    tokenizer = sentencepiece_like()
    tokenizer.decoder = decoder
    with pytest.raises(ModelError, match=r"WordPiece|CTC"):
        table_of(tokenizer)
