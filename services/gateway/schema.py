"""The bodies of the completion routes, field by field.

Every field is strict (``"5"`` is no number), and ``null`` means absent, as OpenAI's clients send
it. Fields that are OpenAI's but not ours stand in ``fields.py``.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from common.sampling import MAX_CHOICES, MAX_TOP_LOGPROBS

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TEMPERATURE = 2.0
_INT64 = 2**63


def _listed(value: Any) -> Any:  # Any: a raw JSON value before validation
    """Let one text stand for a list of one."""
    return [value] if isinstance(value, str) else value


def _parts(value: Any) -> Any:  # Any: a raw JSON value before validation
    """Let a plain text stand for a list of one text part."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _prompt(value: Any) -> str | list[int]:  # Any: a raw JSON value before validation
    """Accept one text, or one list of token ids."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "must be a string or a list of token ids")
    if value and isinstance(value[0], str | list):
        raise PydanticCustomError(
            "prompt_list", "lists of prompts are not supported: send one request per prompt"
        )
    for index, item in enumerate(value):
        if type(item) is not int or item < 0:
            raise PydanticCustomError(
                "prompt_token", "item {index} is not a token id", {"index": index}
            )
    return value


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Part):
    """``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(_Part):
    """One part of a message's content; text is the only kind that a text model reads."""

    type: Literal["text"]
    text: str


class Message(_Part):
    """One entry of ``messages``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])
    ]
    name: Annotated[str, Field(max_length=256)] | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0)]


class CompletionFields(BaseModel):
    """What both routes share. ``extra`` is kept, and judged by ``fields.check_extra_fields``."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: Annotated[str, Field(max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]],
            Field(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: (
        Annotated[
            list[StopString],
            Field(max_length=MAX_STOP_STRINGS),
            BeforeValidator(_listed, json_schema_input_type=StopString | list[StopString]),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None


class ChatRequest(CompletionFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TextRequest(CompletionFields):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[int], BeforeValidator(_prompt, json_schema_input_type=str | list[TokenId])
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
