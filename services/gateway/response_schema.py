"""The answers of all routes, as OpenAPI shows them.

The shapes write plain JSON; these models describe it, and the tests hold every real answer
against the document that is made of them.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.messages.fields import PhaseName

AnsweredReason = Literal["stop", "length"]
TokenIds = Annotated[list[int], Field(default_factory=list)]
"""Only there when ``return_token_ids`` asks for it."""


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CachedTokens(_Answer):
    """How many prompt tokens were found in the prefix cache instead of computed."""

    cached_tokens: int


class Phase(_Answer):
    """One phase of a request on one worker, or at the gateway.

    ``queue``: waiting for its turn to be computed. ``prefix``: fetching cached KV from another
    worker. ``prefill``: computing the prompt. ``transfer``: moving its KV. ``decode_wait``: from
    the prefill's end to the decode worker's first step. ``decode``: drawing tokens. ``migration``:
    moving to another decode worker. ``place``: until the controller has taken it in. ``resume``:
    from the loss of its worker to the next token. A rate is there where KV was moved.
    """

    name: PhaseName
    worker: str
    seconds: float
    num_tokens: int
    num_bytes: int
    num_calls: int
    gigabytes_per_second: float | None


Phases = Annotated[list[Phase], Field(default_factory=list)]
"""Only there when ``x_phases`` asks for it."""


class Usage(_Answer):
    """Tokens of the whole request: all prompts, all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    x_phases: Phases


class AlternativeToken(_Answer):
    """A token that could have stood at a place; ``bytes`` are its own UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(AlternativeToken):
    """A drawn token, and the most likely ones in its place, best first."""

    top_logprobs: list[AlternativeToken]


class ChatLogprobs(_Answer):
    """One entry per token."""

    content: list[ChatToken]
    refusal: None


class AssistantMessage(_Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Answer):
    """One of ``n`` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: AnsweredReason
    token_ids: TokenIds


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds


class MessageDelta(_Answer):
    """What a chunk adds to the message; the choice's first chunk has the role."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    refusal: None = None


class ChatChunkChoice(_Answer):
    """One choice's part of a chunk; the last one has the finish reason."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: AnsweredReason | None
    token_ids: TokenIds


class ChatCompletionChunk(_Answer):
    """One event of a streamed /v1/chat/completions.

    With ``include_usage`` every chunk has ``usage``: null, but in the last, without choices.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: Annotated[list[ChatChunkChoice], Field(max_length=1)]
    usage: Usage | None = None
    prompt_token_ids: TokenIds


class TextLogprobs(_Answer):
    """Four lists, one item per token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TextChunkChoice(_Answer):
    """One choice's part of a chunk; the last one has the finish reason."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: AnsweredReason | None
    token_ids: TokenIds
    prompt_token_ids: TokenIds


class TextChoice(TextChunkChoice):
    """One choice; those of prompt ``p`` are numbered from ``p * n``."""

    finish_reason: AnsweredReason


class TextCompletion(_Answer):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class TextCompletionChunk(_Answer):
    """One event of a streamed /v1/completions; ``usage`` as in the chat's chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[TextChunkChoice], Field(max_length=1)]
    usage: Usage | None = None


class ModelCard(_Answer):
    """The served model; ``max_model_len`` is in tokens, prompt and output together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Answer):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenization(_Answer):
    """Answer of /tokenize; ``token_strs`` only when ``return_token_strs`` asks for it."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[list[str], Field(default_factory=list)]


class Detokenization(_Answer):
    """Answer of /detokenize."""

    prompt: str


class Version(_Answer):
    """Answer of /version."""

    version: str


class Load(_Answer):
    """Answer of /load: requests in work in this gateway's process."""

    server_load: int


class Healthy(_Answer):
    """Requests can be served."""

    status: Literal["ok"]


class Unhealthy(_Answer):
    """Requests cannot be served now; ``reason`` says why."""

    status: Literal["unavailable"]
    reason: str


class ErrorDetail(_Answer):
    """``param`` names the field of the request that is at fault, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Answer):
    """Every answer that is not a success, and the last event of a stream that failed."""

    error: ErrorDetail


ANSWERS: tuple[type[BaseModel], ...] = (
    *(ChatCompletion, ChatCompletionChunk, TextCompletion, TextCompletionChunk),
    *(ModelCard, ModelList, Tokenization, Detokenization),
    *(Version, Load, Healthy, Unhealthy, Error),
)
