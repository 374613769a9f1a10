"""The two completion routes, from the body to the last byte of the answer."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import ErrorCode, RequestError
from services.gateway.answer import StreamedAnswer, WholeAnswer
from services.gateway.backend import Backend
from services.gateway.chat_template import ChatMessage
from services.gateway.connection import Connection
from services.gateway.generation import CompletionPlan, Generation
from services.gateway.http_settings import HttpSettings
from services.gateway.logprobs import Json
from services.gateway.metrics import GatewayMetrics
from services.gateway.parsing import check_model, check_token_ids, parse_body, sampling_params
from services.gateway.schema import ChatRequest, Message, TextRequest
from services.gateway.shapes import ChatShape, ShapeOptions, TextShape
from services.gateway.tokenizer import ModelTokenizer

CompletionRequest = ChatRequest | TextRequest
ResultT = TypeVar("ResultT")


class CompletionService:
    """Answers completion requests, at most ``max_open_requests`` at a time."""

    def __init__(
        self,
        backend: Backend,
        settings: HttpSettings,
        tokenizer: ModelTokenizer,
        metrics: GatewayMetrics,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._num_open = 0
        self._log = structlog.get_logger()

    async def answer(self, connection: Connection, request_type: type[CompletionRequest]) -> None:
        """Serve one request.

        Raises ``RequestError`` before anything is written, ``ClientDisconnect`` when the client
        went away.
        """
        with self._slot():
            body = await connection.read_body(
                self._settings.max_body_bytes, self._settings.body_timeout_seconds
            )
            request = parse_body(request_type, body)
            del body
            await connection.run(lambda: self._complete(connection, request))

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if self._num_open >= self._settings.max_open_requests:
            raise RequestError(
                ErrorCode.QUEUE_FULL,
                f"{self._num_open} requests are open, as many as this gateway takes",
                retry_after_seconds=self._settings.queue_full_retry_seconds,
            )
        self._num_open += 1
        self._metrics.running.inc()
        try:
            yield
        finally:
            self._num_open -= 1
            self._metrics.running.dec()

    async def _complete(self, connection: Connection, request: CompletionRequest) -> None:
        plan = await self._plan(connection, request)
        options = ShapeOptions(
            has_logprobs=plan.params.num_logprobs is not None,
            has_token_ids=bool(request.return_token_ids),
            prompt_token_ids=plan.prompt_token_ids,
        )
        shape_type = ChatShape if isinstance(request, ChatRequest) else TextShape
        shape = shape_type(plan.request_id, self._tokenizer.token_bytes, options)
        head: Json = {
            "id": shape.completion_id,
            "created": int(time.time()),
            "model": self._backend.model.name,
        }
        answer = (
            StreamedAnswer(plan, shape, head, self._metrics)
            if plan.is_stream
            else WholeAnswer(plan, shape, head)
        )
        self._log.info(
            "request_received",
            request_id=plan.request_id,
            num_prompt_tokens=len(plan.prompt_token_ids),
            num_choices=plan.params.num_choices,
            max_tokens=plan.params.max_tokens,
            is_stream=plan.is_stream,
        )
        submission = await self._backend.submit(plan.request_id, plan.prompt_token_ids, plan.params)
        connection.note_admitted()
        self._metrics.prompt_tokens.inc(len(plan.prompt_token_ids))
        generation = Generation(plan, submission, self._tokenizer.token_bytes, self._metrics)
        try:
            failure = await answer.write(connection, generation)
        except asyncio.CancelledError:
            self._log_end("request_cancelled", connection, generation)
            raise
        finally:
            await submission.aclose()
        self._metrics.request_seconds.observe(connection.age_seconds())
        if failure is None:
            self._log_end("request_finished", connection, generation)
        else:
            self._log_end("request_failed", connection, generation, code=str(failure.code))

    async def _plan(self, connection: Connection, request: CompletionRequest) -> CompletionPlan:
        model = self._backend.model
        check_model(request, model)
        prompt_token_ids = await self._prompt_token_ids(request)
        params = sampling_params(request, len(prompt_token_ids), model)
        return CompletionPlan(
            request_id=connection.request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            stops=tuple(request.stop or ()),
            is_stream=bool(request.stream),
            has_usage_chunk=bool(request.stream_options and request.stream_options.include_usage),
            shows_tokens=params.num_logprobs is not None or bool(request.return_token_ids),
        )

    async def _prompt_token_ids(self, request: CompletionRequest) -> list[int]:
        if isinstance(request, ChatRequest):
            messages = [_chat_message(message) for message in request.messages]
            num_chars = sum(len(message.content) for message in messages)
            return await self._tokenize(lambda: self._tokenizer.encode_chat(messages), num_chars)
        prompt = request.prompt
        if isinstance(prompt, str):
            return await self._tokenize(lambda: self._tokenizer.encode_text(prompt), len(prompt))
        check_token_ids(prompt, self._backend.model, "prompt")
        return prompt

    async def _tokenize(self, encode: Callable[[], ResultT], num_chars: int) -> ResultT:
        """Encode at once what is short, and in a thread what would stall the other streams."""
        if num_chars <= self._settings.inline_tokenize_chars:
            return encode()
        return await asyncio.to_thread(encode)

    def _log_end(
        self, event: str, connection: Connection, generation: Generation, **fields: str
    ) -> None:
        self._log.info(
            event,
            request_id=connection.request_id,
            num_cached_tokens=generation.num_cached_tokens,
            num_completion_tokens=generation.num_completion_tokens,
            finish_reasons=[str(reason) for reason in generation.finish_reasons],
            seconds=round(connection.age_seconds(), 6),
            **fields,
        )


class CompletionExchange(Response):
    """A response that reads the request and writes the answer itself, on the bare connection."""

    def __init__(self, service: CompletionService, request_type: type[CompletionRequest]) -> None:
        super().__init__()
        self._service = service
        self._request_type = request_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange."""
        await self._service.answer(Connection(scope, receive, send), self._request_type)


def _chat_message(message: Message) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    content = "\n".join(part.text for part in message.content)
    return ChatMessage(role, content, message.name)
