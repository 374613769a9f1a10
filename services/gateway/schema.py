"""The bodies of the completion routes, field by field.

Every field is strict (``"5"`` is no number), and ``null`` means absent, as OpenAI's clients send
it. Fields that are OpenAI's but not ours stand in ``fields.py``.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from common.sampling import MAX_CHOICES, MAX_TOP_LOGPROBS
from services.gateway.fields import HARMLESS, NEUTRAL_VALUES

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TEMPERATURE = 2.0
MAX_NAME_CHARS = 256
_INT64 = 2**63


def _listed(value: Any) -> Any:  # Any: a raw JSON value before validation
    """Let one stop string stand for a list of one."""
    if isinstance(value, str):
        if not 1 <= len(value) <= MAX_STOP_CHARS:
            bounds = {"most": MAX_STOP_CHARS}
            raise PydanticCustomError("stop_length", "must have 1 to {most} characters", bounds)
        return [value]
    if value is not None and not isinstance(value, list):
        raise PydanticCustomError("stop_type", "must be a string or a list of strings")
    return value


def _parts(value: Any) -> Any:  # Any: a raw JSON value before validation
    """Let a plain text stand for a list of one text part."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    return value


def _prompts(value: Any) -> list[str] | list[list[int]]:  # Any: a raw JSON value
    """Make a list of prompts of one text, one list of token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "must be a string or a list of token ids")
    if value and all(isinstance(prompt, str) for prompt in value):
        return value
    if not value or not isinstance(value[0], str | list):
        return [_checked_token_ids(value, "item {index}")]
    for place, prompt in enumerate(value):
        if not isinstance(prompt, list):
            raise PydanticCustomError(
                "prompt_list",
                "item {index} is no list of token ids, unlike others: prompts are all texts or "
                "all lists of token ids",
                {"index": place},
            )
    return [
        _checked_token_ids(prompt, f"prompt {place}, item {{index}}")
        for place, prompt in enumerate(value)
    ]


def _checked_token_ids(value: list[Any], where: str) -> list[int]:  # Any: raw JSON values
    for index, item in enumerate(value):
        if type(item) is not int or item < 0:
            raise PydanticCustomError(
                "prompt_token",
                where + " is not a token id",
                {"index": index},
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


Nothing = Annotated[list[None], Field(max_length=0)]


class Message(_Part):
    """One entry of ``messages``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])
    ]
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None

    # What an answer's message carries besides, for clients send it back as they got it.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Nothing | None = None
    tool_calls: Nothing | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0)]


def _show_other_fields(schema: dict[str, Any]) -> None:  # Any: a JSON document
    """Show what ``fields.py`` lets pass, and that nothing else does."""
    for name in sorted(HARMLESS):
        schema["properties"].setdefault(name, {"description": "Accepted; changes nothing"})
    for name, values in NEUTRAL_VALUES.items():
        schema["properties"].setdefault(name, {"enum": list(values)})
    schema["additionalProperties"] = False


class CompletionFields(BaseModel):
    """What both routes share. ``extra`` is kept, and judged by ``fields.check_extra_fields``."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=_show_other_fields
    )

    model: Annotated[str, Field(max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
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
    x_phases: Annotated[
        bool | None,
        Field(description="Tell in `usage.x_phases` where the request's time went"),
    ] = None
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
        list[str] | list[list[int]],
        BeforeValidator(
            _prompts, json_schema_input_type=str | list[TokenId] | list[str] | list[list[TokenId]]
        ),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None


class _ServedText(BaseModel):
    """What the tokenizer's routes share: the model need not be named, for there is one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(max_length=1024)] | None = None


class TokenizeRequest(_ServedText):
    """POST /tokenize: a raw prompt, or messages for the model's chat template.

    ``add_special_tokens`` is on for a prompt and off for messages, whose template writes them.
    """

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_ServedText):
    """POST /detokenize."""

    tokens: list[TokenId]
