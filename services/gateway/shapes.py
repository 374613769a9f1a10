"""OpenAI's response shapes for the two completion routes."""

from dataclasses import dataclass, field
from typing import Protocol

from common.ids import RequestId
from common.sampling import FinishReason, SampledToken
from services.gateway.choice import ChoicePiece
from services.gateway.detokenizer import TokenBytes
from services.gateway.logprobs import Json, chat_logprobs, text_logprobs
from services.gateway.plan import CompletionPlan


@dataclass(slots=True)
class ChoiceRecord:
    """All pieces of one choice, for an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, piece: ChoicePiece) -> None:
        """Append the next piece."""
        self.texts.append(piece.text)
        self.tokens.extend(piece.tokens)
        self.text_offsets.extend(piece.text_offsets)
        self.finish_reason = piece.finish_reason


class Shape(Protocol):
    """How one route writes an answer."""

    completion_id: str
    whole_object: str
    chunk_object: str
    first_fields: Json
    """Fields beside ``choices`` of the whole answer, or of a stream's first chunk."""

    def opening(self, choice: int) -> Json | None:
        """Return the chunk that opens a choice's stream, if the route has one."""
        ...

    def chunk(self, choice: int, piece: ChoicePiece, *, is_first: bool) -> Json:
        """Return one entry of a chunk's ``choices``."""
        ...

    def whole(self, choice: int, record: ChoiceRecord) -> Json:
        """Return one entry of the whole answer's ``choices``."""
        ...


class ChatShape:
    """/v1/chat/completions; the prompt's token ids stand beside ``choices``."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, request_id: RequestId, token_bytes: TokenBytes, plan: CompletionPlan
    ) -> None:
        self.completion_id = f"chatcmpl-{request_id}"
        self._token_bytes = token_bytes
        self._plan = plan
        self.first_fields: Json = {}
        if plan.has_token_ids:
            self.first_fields["prompt_token_ids"] = plan.prompts[0].token_ids

    def opening(self, choice: int) -> Json | None:
        """Return the chunk with the role."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(
        self,
        choice: int,
        piece: ChoicePiece,
        *,
        is_first: bool,
    ) -> Json:
        """Return one delta; the last one carries the finish reason."""
        entry: Json = {
            "index": choice,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }
        if self._plan.has_logprobs and piece.tokens:
            entry["logprobs"] = chat_logprobs(self._token_bytes, piece.tokens)
        if self._plan.has_token_ids:
            entry["token_ids"] = [token.token_id for token in piece.tokens]
        return entry

    def whole(self, choice: int, record: ChoiceRecord) -> Json:
        """Return one message."""
        content = "".join(record.texts)
        entry: Json = {
            "index": choice,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": None,
            "finish_reason": record.finish_reason,
        }
        if self._plan.has_logprobs:
            entry["logprobs"] = chat_logprobs(self._token_bytes, record.tokens)
        if self._plan.has_token_ids:
            entry["token_ids"] = [token.token_id for token in record.tokens]
        return entry


class TextShape:
    """/v1/completions; the prompt's token ids stand in each choice, which has its own prompt."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, request_id: RequestId, token_bytes: TokenBytes, plan: CompletionPlan
    ) -> None:
        self.completion_id = f"cmpl-{request_id}"
        self._token_bytes = token_bytes
        self._plan = plan
        self.first_fields: Json = {}

    def opening(self, choice: int) -> Json | None:
        """Return the chunk with the prompt, where it is to be echoed."""
        echo = self._plan.prompt_of(choice).echo
        if not echo:
            return None
        return {"index": choice, "text": echo, "logprobs": None, "finish_reason": None}

    def chunk(self, choice: int, piece: ChoicePiece, *, is_first: bool) -> Json:
        """Return one piece of text; the last one carries the finish reason."""
        return self._entry(choice, piece, has_prompt=is_first)

    def whole(self, choice: int, record: ChoiceRecord) -> Json:
        """Return one text, after the prompt where it is to be echoed."""
        piece = ChoicePiece(
            self._plan.prompt_of(choice).echo + "".join(record.texts),
            tuple(record.tokens),
            tuple(record.text_offsets),
            record.finish_reason,
        )
        return self._entry(choice, piece, has_prompt=True)

    def _entry(self, choice: int, piece: ChoicePiece, *, has_prompt: bool) -> Json:
        entry: Json = {
            "index": choice,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }
        if self._plan.has_logprobs and (piece.tokens or has_prompt):
            entry["logprobs"] = text_logprobs(self._token_bytes, piece.tokens, piece.text_offsets)
        if self._plan.has_token_ids:
            entry["token_ids"] = [token.token_id for token in piece.tokens]
            if has_prompt:
                entry["prompt_token_ids"] = self._plan.prompt_of(choice).token_ids
        return entry
