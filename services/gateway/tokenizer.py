"""The model's tokenizer: text and messages to token ids.

Special tokens that the chat template writes must become special ids; the same characters in the
caller's messages must stay text. Cutting the prompt at the borders of messages would change how
the text around them is tokenized, so the prompt is encoded in one piece, like this::

    caller's text   every special token's first character becomes a private-use character
    template        renders: whatever special token is in the text now, the template wrote it
    rendered text   special tokens become their *twins*; private-use characters change back
    encode          twins match, special tokens do not (they are text); twin ids become special ids

A twin is an added token with the special token's own matching rules and a random name.
"""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from common.errors import ErrorCode, ModelError, RequestError
from services.gateway.chat_template import ChatMessage, ChatTemplate
from services.gateway.detokenizer import TokenBytes

_TWIN_QUOTE = "\ue000"
_PRIVATE_USE = (*range(0xE001, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


class ModelTokenizer:
    """Tokenizer and chat template of one model folder. Safe to share between threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: ChatTemplate | None,
        *,
        max_model_len: int,
    ) -> None:
        decoder = json.loads(tokenizer.to_str())["decoder"]
        if decoder is None:
            raise ModelError("tokenizer.json: it has no decoder")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.token_bytes = TokenBytes(vocab, frozenset(special), decoder)
        self.max_prompt_chars = max_model_len * max(len(token) for token in vocab)
        self._template = template
        self._special_contents = [token.content for token in special.values()]
        alternatives = "|".join(
            re.escape(content) for content in sorted(self._special_contents, key=len, reverse=True)
        )
        self._special_pattern = re.compile(alternatives or r"(?!)")
        self._special_start_pattern = re.compile(
            f"(?={alternatives})." if alternatives else r"(?!)", re.DOTALL
        )
        self._twin_contents: dict[str, str] = {}
        self._twin_ids: dict[int, int] = {}
        self._add_twins(tokenizer, special)
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path, max_model_len: int) -> "ModelTokenizer":
        """Read tokenizer.json and the chat template; raises ``ModelError`` naming the file."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"{path}: the model folder has no tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        return cls(tokenizer, ChatTemplate.load(folder), max_model_len=max_model_len)

    def encode_text(
        self, text: str, *, param: str = "prompt", add_special_tokens: bool = True
    ) -> list[int]:
        """Encode a raw prompt, which its caller wrote whole: special tokens in it are special.

        The tokenizer's own start token is added where the model has one. ``param`` is how a
        refusal names the text.
        """
        self._check_length(len(text), param)
        return self._encode(text, {}, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Render the chat template and encode it; the messages' own text has no special ids."""
        if self._template is None:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                "the model has no chat template: use /v1/completions",
                param="messages",
            )
        texts = [text for message in messages for text in (message.content, message.name or "")]
        self._check_length(sum(map(len, texts)), "messages")
        disguise = self._disguise(texts)

        def rewrite(text: str) -> str:
            if not disguise:
                return text
            return self._special_start_pattern.sub(lambda found: disguise[found[0]], text)

        rendered = self._template.render(
            messages,
            rewrite=rewrite,
            max_chars=self.max_prompt_chars,
            add_generation_prompt=add_generation_prompt,
        )
        return self._encode(rendered, disguise, add_special_tokens=add_special_tokens)

    def _encode(
        self, text: str, disguise: dict[str, str], *, add_special_tokens: bool
    ) -> list[int]:
        """Encode text whose special tokens are meant, and whose disguised ones are not."""
        twinned = self._special_pattern.sub(lambda found: self._twin_contents[found[0]], text)
        if disguise:
            twinned = twinned.translate({ord(new): old for old, new in disguise.items()})
        (encoding,) = self._tokenizer.encode_batch_fast(
            [twinned], add_special_tokens=add_special_tokens
        )
        twin_ids = self._twin_ids
        return [twin_ids.get(token_id, token_id) for token_id in encoding.ids]

    def _disguise(self, texts: Iterable[str]) -> dict[str, str]:
        """Choose a private-use character, absent from all text, per first character to hide."""
        firsts = {found for text in texts for found in self._special_start_pattern.findall(text)}
        if not firsts:
            return {}
        assert self._template is not None
        used = set(self._template.source).union(*texts)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        try:
            return {first: next(free) for first in sorted(firsts)}
        except StopIteration:
            raise RequestError(
                ErrorCode.BAD_REQUEST,
                "the messages use every private-use character of Unicode",
                param="messages",
            ) from None

    def _add_twins(
        self, tokenizer: tokenizers.Tokenizer, special: dict[int, tokenizers.AddedToken]
    ) -> None:
        nonce = secrets.token_hex(16)
        for token_id, token in special.items():
            twin = f"{_TWIN_QUOTE}{nonce}:{token_id}{_TWIN_QUOTE}"
            tokenizer.add_tokens(
                [
                    tokenizers.AddedToken(
                        twin,
                        single_word=token.single_word,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                        normalized=token.normalized,
                        special=False,
                    )
                ]
            )
            twin_id = tokenizer.token_to_id(twin)
            assert twin_id is not None
            self._twin_contents[token.content] = twin
            self._twin_ids[twin_id] = token_id

    def _check_length(self, num_chars: int, param: str) -> None:
        if num_chars > self.max_prompt_chars:
            raise RequestError(
                ErrorCode.CONTEXT_EXCEEDED,
                f"{param} has {num_chars} characters, more than the model's context can hold",
                param=param,
            )
