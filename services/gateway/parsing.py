"""From a request's body to what is asked of the cluster; every refusal names its field."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from common.errors import ErrorCode, RequestError
from common.sampling import MAX_SEED, SamplingParams
from services.gateway.backend import ServedModel
from services.gateway.fields import check_extra_fields
from services.gateway.schema import ChatRequest, CompletionFields, TextRequest

BodyT = TypeVar("BodyT", bound=BaseModel)
RequestT = TypeVar("RequestT", bound=CompletionFields)

DEFAULT_TEXT_TOKENS = 16
"""max_tokens of /v1/completions, as OpenAI has it."""

_IDENTIFIER = re.compile(r"0|[1-9][0-9]{0,9}")
"""A token id in its one spelling: with two, a later one would silently overrule the first."""


def parse_json(model_type: type[BodyT], body: bytes) -> BodyT:
    """Parse a body and check its fields one by one."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            ErrorCode.BAD_REQUEST, f"the body is not valid UTF-8 (at byte {error.start})"
        ) from None
    try:
        return model_type.model_validate_json(text)
    except ValidationError as error:
        raise _refusal(error) from None


def parse_body(model_type: type[RequestT], body: bytes) -> RequestT:
    """Parse and check a completion's body as far as it can be without tokenizer and model."""
    request = parse_json(model_type, body)
    check_extra_fields(request.model_extra or {})
    if request.stream_options is not None and not request.stream:
        raise _bad("stream_options needs stream to be true", "stream_options")
    has_usage = request.stream_options is not None and request.stream_options.include_usage
    if request.x_phases and request.stream and not has_usage:
        raise _bad("x_phases needs include_usage in stream_options: it stands there", "x_phases")
    if isinstance(request, TextRequest):
        _check_text_fields(request)
    return request


def _check_text_fields(request: TextRequest) -> None:
    if request.best_of is not None and request.best_of != _or(request.n, 1):
        raise _bad("best_of is not supported: it may only be what n is", "best_of")
    if request.echo and request.logprobs is not None:
        raise _bad("echo together with logprobs is not supported", "echo")


def check_num_choices(request: TextRequest, max_choices: int) -> None:
    """Raise ``RequestError`` when prompts times ``n`` are more than one request may have."""
    num_prompts, n = len(request.prompt), _or(request.n, 1)
    if num_prompts * n > max_choices:
        raise _bad(
            f"prompt: {num_prompts} prompts times n {n} are more than the {max_choices} choices "
            "that one request may have",
            "prompt",
        )


def check_model(name: str, model: ServedModel) -> None:
    """Raise ``RequestError`` unless the served model is meant."""
    if name != model.name:
        raise RequestError(
            ErrorCode.MODEL_NOT_FOUND,
            f"the model {name[:128]!r} does not exist; this server has {model.name!r}",
            param="model",
        )


def check_token_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raise ``RequestError`` naming ``param`` when an id is outside the vocabulary."""
    if token_ids and max(token_ids) >= model.vocab_size:
        raise _bad(f"{param} has a token id outside the vocabulary of {model.vocab_size}", param)


def sampling_params(
    request: ChatRequest | TextRequest,
    num_prompt_tokens: int,
    model: ServedModel,
    max_request_tokens: int = 0,
    prompt_field: str | None = None,
) -> SamplingParams:
    """Resolve defaults and check what depends on the prompt's length and the model.

    ``max_tokens`` defaults to the rest of the context for a chat and to 16 for a text, as OpenAI
    has it; temperature and top_p to 1. ``max_request_tokens`` is what the workers can hold (see
    ``Backend``). ``prompt_field`` is how refusals name the prompt. Without a seed each call draws
    its own.
    """
    if prompt_field is None:
        prompt_field = "messages" if isinstance(request, ChatRequest) else "prompt"
    context = _context(model, max_request_tokens)
    if num_prompt_tokens == 0:
        raise _bad(f"{prompt_field} is empty", prompt_field)
    if num_prompt_tokens >= context.num_tokens:
        raise RequestError(
            ErrorCode.CONTEXT_EXCEEDED,
            f"{context.told}, and {prompt_field} has {num_prompt_tokens}",
            param=prompt_field,
        )
    max_tokens = _max_tokens(request, num_prompt_tokens, context, prompt_field)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise _bad(f"min_tokens is {min_tokens}, max_tokens only {max_tokens}", "min_tokens")
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_token_ids, model, "stop_token_ids")
    seed = secrets.randbits(63) if request.seed is None else request.seed & MAX_SEED
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        num_choices=_or(request.n, 1),
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=min(max(_or(request.top_k, 0), 0), model.vocab_size),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request, model),
        num_logprobs=_num_logprobs(request),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=min_tokens,
        eos_token_ids=model.eos_token_ids,
        stop_token_ids=stop_token_ids,
    )


@dataclass(frozen=True, slots=True)
class _Context:
    """How many tokens prompt and output may have together, and what bounds them."""

    num_tokens: int
    told: str


def _context(model: ServedModel, max_request_tokens: int) -> _Context:
    if 0 < max_request_tokens < model.max_model_len:
        told = (
            f"the KV pools of this server's workers (kv_bytes) hold {max_request_tokens} tokens "
            "of one request"
        )
        return _Context(max_request_tokens, told)
    told = f"this model's maximum context length is {model.max_model_len} tokens"
    return _Context(model.max_model_len, told)


def _max_tokens(
    request: ChatRequest | TextRequest,
    num_prompt_tokens: int,
    context: _Context,
    prompt_field: str,
) -> int:
    room = context.num_tokens - num_prompt_tokens
    field, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if asked is not None and asked != request.max_completion_tokens:
            raise _bad("max_tokens and max_completion_tokens differ", "max_tokens")
        field, asked = "max_completion_tokens", request.max_completion_tokens
    if asked is None:
        return room if isinstance(request, ChatRequest) else min(room, DEFAULT_TEXT_TOKENS)
    if asked > room:
        raise RequestError(
            ErrorCode.CONTEXT_EXCEEDED,
            f"{context.told}: {prompt_field} has {num_prompt_tokens}, which leaves {room}, and "
            f"{field} asks for more",
            param=field,
        )
    return asked


def _num_logprobs(request: ChatRequest | TextRequest) -> int | None:
    if isinstance(request, TextRequest):
        return request.logprobs
    if not request.logprobs:
        if request.top_logprobs:
            raise _bad("top_logprobs needs logprobs to be true", "top_logprobs")
        return None
    return request.top_logprobs or 0


def _logit_bias(request: CompletionFields, model: ServedModel) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not _IDENTIFIER.fullmatch(key) or int(key) >= model.vocab_size:
            raise _bad(f"logit_bias: {key[:32]!r} is not a token id of this model", "logit_bias")
        bias[int(key)] = value
    return bias


ValueT = TypeVar("ValueT")


def _or(value: ValueT | None, default: ValueT) -> ValueT:
    return default if value is None else value


def _bad(message: str, param: str) -> RequestError:
    return RequestError(ErrorCode.BAD_REQUEST, message, param=param)


def _refusal(error: ValidationError) -> RequestError:
    """Name the field of the first error, in the caller's own path: ``messages[0].content``."""
    detail = error.errors(include_url=False, include_input=False)[0]
    path = _path(detail)
    if detail["type"] == "json_invalid":
        reason = detail.get("ctx", {}).get("error", "syntax error")
        return RequestError(ErrorCode.BAD_REQUEST, f"the body is not valid JSON: {reason}")
    if not path:
        return RequestError(ErrorCode.BAD_REQUEST, "the body must be a JSON object")
    return _bad(f"{path}: {detail['msg']}", path)


def _path(detail: ErrorDetails) -> str:
    path = ""
    for step in detail["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step[:64]}" if path else step[:64]
    return path
