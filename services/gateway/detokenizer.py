"""From token ids to text, one token at a time, never cutting a character.

A token of a byte-level vocabulary may hold part of a UTF-8 character, so decoding token by token
and joining is wrong, and decoding the whole output again for each token is quadratic. Here the
decoder section of tokenizer.json is compiled once into the bytes of every token; a choice then
needs only an incremental UTF-8 decoder, which holds incomplete characters back.

On valid UTF-8 the joined pieces equal the tokenizer's own decode of all tokens. Invalid bytes
become U+FFFD one by one as the Unicode standard recommends; the tokenizer's byte fallback would
spoil the valid neighbours too.
"""

import codecs
from collections.abc import Mapping, Sequence

from common.errors import ModelError

_REPLACEABLE = "▁"


class TokenBytes:
    """The bytes of every token, after the decoder of tokenizer.json.

    ``special_ids`` have no text. ``strips_first_space`` says that the decoder takes one leading
    space off the whole text, as sentencepiece vocabularies do.
    """

    def __init__(
        self, vocab: Mapping[str, int], special_ids: frozenset[int], decoder: Mapping[str, object]
    ) -> None:
        steps = _flatten(decoder)
        kinds = [step["type"] for step in steps]
        self.special_ids = special_ids
        self.strips_first_space = False
        self._tokens: dict[int, str] = {token_id: token for token, token_id in vocab.items()}
        self._replacements: list[tuple[str, str]] = []
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = False
        for step in steps:
            self._compile(step)
        self._bytes: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return the token's own bytes, also a special token's; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokens.get(token_id)
            known = b"" if token is None else self._token_bytes(token)
            self._bytes[token_id] = known
        return known

    def text_bytes(self, token_id: int) -> bytes:
        """Return what the token adds to the text: nothing for a special token."""
        return b"" if token_id in self.special_ids else self.of(token_id)

    def _compile(self, step: Mapping[str, object]) -> None:
        match step["type"]:
            case "ByteLevel" | "Fuse":
                return
            case "ByteFallback":
                self._has_byte_fallback = True
            case "Metaspace":
                self._replacements.append((str(step.get("replacement", _REPLACEABLE)), " "))
                self.strips_first_space = step.get("prepend_scheme", "always") != "never"
            case "Replace":
                pattern = step["pattern"]
                if not isinstance(pattern, Mapping) or "String" not in pattern:
                    raise ModelError("tokenizer.json: decoder Replace with a regular expression")
                self._replacements.append((str(pattern["String"]), str(step["content"])))
            case "Strip":
                if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                    raise ModelError("tokenizer.json: decoder Strip of more than one first space")
                self.strips_first_space = True
            case kind:
                raise ModelError(f"tokenizer.json: decoder {kind} is not supported")

    def _token_bytes(self, token: str) -> bytes:
        if self._is_byte_level:
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if self._has_byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            return bytes.fromhex(token[3:5])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()


class Detokenizer:
    """One choice's text as it grows."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_at_start = True

    def feed(self, token_id: int) -> str:
        """Return the text that became complete with this token, often empty."""
        return self._strip_start(self._decoder.decode(self._token_bytes.text_bytes(token_id)))

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for a character that was never completed."""
        return self._strip_start(self._decoder.decode(b"", final=True))

    def _strip_start(self, text: str) -> str:
        if not self._is_at_start or not text:
            return text
        self._is_at_start = False
        return text.removeprefix(" ") if self._token_bytes.strips_first_space else text


def decode(token_bytes: TokenBytes, token_ids: Sequence[int]) -> str:
    """Return the text of all tokens at once; special tokens have none."""
    return _decoded(token_bytes, b"".join(map(token_bytes.text_bytes, token_ids)))


def decode_prompt(token_bytes: TokenBytes, token_ids: Sequence[int]) -> str:
    """Return the prompt that these tokens are, special tokens spelled out."""
    return _decoded(token_bytes, b"".join(map(token_bytes.of, token_ids)))


def _decoded(token_bytes: TokenBytes, raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    return text.removeprefix(" ") if token_bytes.strips_first_space else text


def _flatten(decoder: Mapping[str, object]) -> list[Mapping[str, object]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    inner = decoder["decoders"]
    assert isinstance(inner, list)
    return [step for entry in inner for step in _flatten(entry)]


def _byte_level_alphabet() -> dict[str, int]:
    """Map the printable stand-in characters of byte-level BPE to their bytes (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_level_alphabet()
