"""From a parsed request to its plan: model, prompts and limits checked, texts tokenized."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.ids import RequestId
from services.gateway.backend import Backend
from services.gateway.chat_template import ChatMessage
from services.gateway.detokenizer import decode_prompt
from services.gateway.http_settings import HttpSettings
from services.gateway.parsing import (
    check_model,
    check_num_choices,
    check_token_ids,
    sampling_params,
)
from services.gateway.plan import CompletionPlan, PromptPlan
from services.gateway.schema import ChatRequest, Message, TextRequest
from services.gateway.tokenizer import ModelTokenizer

ResultT = TypeVar("ResultT")

_CHARS_PER_TOKEN_ID = 4
"""What checking a prompt of token ids costs, in characters of text; roughly."""


class Planner:
    """Plans the requests for one backend: its model, and what its workers can hold."""

    def __init__(self, backend: Backend, settings: HttpSettings, tokenizer: ModelTokenizer) -> None:
        self._backend = backend
        self._model = backend.model
        self._settings = settings
        self._tokenizer = tokenizer

    async def plan(
        self, request_id: RequestId, request: ChatRequest | TextRequest
    ) -> CompletionPlan:
        """Check the request and tokenize its prompts; raises ``RequestError`` naming a field."""
        check_model(request.model, self._model)
        if isinstance(request, ChatRequest):
            prompts: tuple[PromptPlan, ...] = (await self._chat_prompt(request_id, request),)
        else:
            prompts = await self._text_prompts(request_id, request)
        return CompletionPlan(
            prompts=prompts,
            stops=tuple(request.stop or ()),
            is_stream=bool(request.stream),
            has_usage_chunk=bool(request.stream_options and request.stream_options.include_usage),
            has_token_ids=bool(request.return_token_ids),
            has_phases=bool(request.x_phases),
        )

    async def _chat_prompt(self, request_id: RequestId, request: ChatRequest) -> PromptPlan:
        messages = [chat_message(message) for message in request.messages]
        token_ids = await tokenize(
            lambda: self._tokenizer.encode_chat(messages), num_chars(messages), self._settings
        )
        params = sampling_params(
            request, len(token_ids), self._model, self._backend.max_request_tokens
        )
        return PromptPlan(request_id, "messages", tuple(token_ids), params)

    async def _text_prompts(
        self, request_id: RequestId, request: TextRequest
    ) -> tuple[PromptPlan, ...]:
        check_num_choices(request, self._settings.max_choices_per_request)
        total_chars = sum(
            len(prompt) if isinstance(prompt, str) else len(prompt) * _CHARS_PER_TOKEN_ID
            for prompt in request.prompt
        )
        return await tokenize(
            lambda: self._plan_texts(request_id, request), total_chars, self._settings
        )

    def _plan_texts(self, request_id: RequestId, request: TextRequest) -> tuple[PromptPlan, ...]:
        prompts: Sequence[str | list[int]] = request.prompt
        if len(prompts) == 1:
            return (self._plan_text(request_id, request, prompts[0], "prompt"),)
        return tuple(
            self._plan_text(RequestId(f"{request_id}.{place}"), request, prompt, f"prompt[{place}]")
            for place, prompt in enumerate(prompts)
        )

    def _plan_text(
        self, request_id: RequestId, request: TextRequest, prompt: str | list[int], param: str
    ) -> PromptPlan:
        if isinstance(prompt, str):
            text, token_ids = prompt, self._tokenizer.encode_text(prompt, param=param)
        else:
            check_token_ids(prompt, self._model, param)
            text, token_ids = "", prompt
        params = sampling_params(
            request, len(token_ids), self._model, self._backend.max_request_tokens, param
        )
        if not request.echo:
            return PromptPlan(request_id, param, tuple(token_ids), params)
        echo = text or decode_prompt(self._tokenizer.token_bytes, token_ids)
        return PromptPlan(request_id, param, tuple(token_ids), params, echo)


async def tokenize(work: Callable[[], ResultT], chars: int, settings: HttpSettings) -> ResultT:
    """Do at once what is short, and in a thread what would stall the other streams."""
    if chars <= settings.inline_tokenize_chars:
        return work()
    return await asyncio.to_thread(work)


def chat_message(message: Message) -> ChatMessage:
    """Return a message as templates know it; they have no role ``developer``."""
    role = "system" if message.role == "developer" else message.role
    content = "\n".join(part.text for part in message.content)
    return ChatMessage(role, content, message.name)


def num_chars(messages: Sequence[ChatMessage]) -> int:
    """Return how much text there is to tokenize."""
    return sum(len(message.content) for message in messages)
