import pytest

from common.sampling import FinishReason, SampledToken, SamplingParams
from services.gateway.backend import TokenDelta
from services.gateway.choice import ChoiceAssembler
from services.gateway.tokenizer import ModelTokenizer
from tests.support.fake_backend import END, MAX_MODEL_LEN, plain_tokenizer


@pytest.fixture(scope="module")
def token_bytes(tiny_folder):
    return ModelTokenizer.load(tiny_folder, MAX_MODEL_LEN).token_bytes


@pytest.fixture(scope="module")
def encode(tiny_folder):
    tokenizer = plain_tokenizer(tiny_folder)
    return lambda text: tuple(SampledToken(token_id) for token_id in tokenizer.encode(text).ids)


def params(**fields) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=100, eos_token_ids=(1,), **fields)


def test_a_stop_string_over_token_and_delta_borders_trims_text_and_counts(token_bytes, encode):
    tokens = encode("xyz#!qq")
    assert len(tokens) == 7
    choice = ChoiceAssembler(token_bytes, params(), ("z#!",))
    first = choice.feed(TokenDelta(0, tokens[:4], None))
    assert (first.text, len(first.tokens), first.finish_reason) == ("xy", 4, None)
    second = choice.feed(TokenDelta(0, tokens[4:], None))
    assert (second.text, len(second.tokens)) == ("", 1)
    assert second.finish_reason is FinishReason.STOP
    assert second.is_stopped_early
    assert choice.num_tokens == 5


def test_a_stop_string_completed_by_the_last_token_turns_length_into_stop(token_bytes, encode):
    choice = ChoiceAssembler(token_bytes, params(), ("q",))
    piece = choice.feed(TokenDelta(0, encode("xq"), FinishReason.LENGTH))
    assert (piece.text, piece.finish_reason, piece.is_stopped_early) == (
        "x",
        FinishReason.STOP,
        False,
    )


def test_held_text_is_released_at_the_end(token_bytes, encode):
    choice = ChoiceAssembler(token_bytes, params(), ("zzz",))
    assert choice.feed(TokenDelta(0, encode("xzz"), None)).text == "x"
    assert choice.feed(TokenDelta(0, (), FinishReason.LENGTH)).text == "zz"
    assert choice.is_finished


def test_the_stop_token_counts_and_has_no_text(token_bytes, encode):
    (z,) = encode("z")
    choice = ChoiceAssembler(token_bytes, params(stop_token_ids=(z.token_id,)), ())
    piece = choice.feed(TokenDelta(0, encode("xz"), FinishReason.STOP))
    assert (piece.text, len(piece.tokens), choice.num_tokens) == ("x", 2, 2)


def test_the_end_token_counts_and_has_no_text(token_bytes, encode):
    choice = ChoiceAssembler(token_bytes, params(), ())
    piece = choice.feed(TokenDelta(0, encode("x" + END), FinishReason.STOP))
    assert (piece.text, len(piece.tokens)) == ("x", 2)


def test_stop_strings_wait_for_min_tokens(token_bytes, encode):
    choice = ChoiceAssembler(token_bytes, params(min_tokens=3), ("z",))
    piece = choice.feed(TokenDelta(0, encode("zzxxzq"), None))
    assert (piece.text, len(piece.tokens)) == ("zzxx", 5)


def test_text_offsets_count_characters_before_each_token(token_bytes, encode):
    choice = ChoiceAssembler(token_bytes, params(), ())
    tokens = encode("x👩q")
    piece = choice.feed(TokenDelta(0, tokens, None))
    assert piece.text_offsets == (0, 1, 1, 1, 1, 2)


def test_an_incomplete_character_is_flushed_with_the_finish(token_bytes, encode):
    choice = ChoiceAssembler(token_bytes, params(), ())
    assert choice.feed(TokenDelta(0, encode("👩")[:2], FinishReason.LENGTH)).text == "\ufffd"
