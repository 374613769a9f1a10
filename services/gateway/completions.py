"""The two completion routes, from the body to the last byte of the answer."""

import asyncio
import time
from contextlib import AsyncExitStack

import structlog

from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from services.gateway.admission import Admission
from services.gateway.answer import StreamedAnswer, WholeAnswer
from services.gateway.backend import Backend, Submission
from services.gateway.connection import Connection
from services.gateway.generation import Generation
from services.gateway.http_settings import HttpSettings
from services.gateway.logprobs import Json
from services.gateway.metrics import GatewayMetrics
from services.gateway.parsing import parse_body
from services.gateway.plan import CompletionPlan, PromptPlan
from services.gateway.planning import Planner
from services.gateway.schema import ChatRequest, TextRequest
from services.gateway.shapes import ChatShape, TextShape
from services.gateway.together import run_together
from services.gateway.tokenizer import ModelTokenizer

CompletionRequest = ChatRequest | TextRequest


class CompletionService:
    """Answers completion requests."""

    def __init__(
        self,
        backend: Backend,
        settings: HttpSettings,
        tokenizer: ModelTokenizer,
        admission: Admission,
        metrics: GatewayMetrics,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._tokenizer = tokenizer
        self._planner = Planner(backend, settings, tokenizer)
        self._admission = admission
        self._metrics = metrics
        self._log = structlog.get_logger()

    async def answer(self, connection: Connection, request_type: type[CompletionRequest]) -> None:
        """Serve one request.

        Raises ``RequestError`` before anything is written, ``ClientDisconnect`` when the client
        went away.
        """
        with self._admission.slots(1):
            async with self._admission.drain.bounds():
                body = await connection.read_body(
                    self._settings.max_body_bytes, self._settings.body_timeout_seconds
                )
            request = parse_body(request_type, body)
            del body
            await connection.run(lambda: self._complete(connection, request))

    async def _complete(self, connection: Connection, request: CompletionRequest) -> None:
        async with self._admission.drain.bounds():
            plan = await self._planner.plan(connection.request_id, request)
        shape_type = ChatShape if isinstance(request, ChatRequest) else TextShape
        shape = shape_type(connection.request_id, self._tokenizer.token_bytes, plan)
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
        with self._admission.slots(len(plan.prompts) - 1):
            await self._generate(connection, plan, answer)

    async def _generate(
        self, connection: Connection, plan: CompletionPlan, answer: StreamedAnswer | WholeAnswer
    ) -> None:
        self._log_start(connection, plan)
        async with AsyncExitStack() as stack:
            async with self._admission.drain.bounds():
                submissions = await self._submit(plan, stack)
            connection.note_admitted()
            self._metrics.prompt_tokens.inc(plan.num_prompt_tokens)
            table, drain = self._tokenizer.token_bytes, self._admission.drain
            generation = Generation(plan, submissions, table, self._metrics, drain)
            try:
                failure = await answer.write(connection, generation)
            except asyncio.CancelledError:
                self._log_end("request_cancelled", connection, generation)
                raise
        self._metrics.request_seconds.observe(connection.age_seconds())
        if failure is None:
            self._log_end("request_finished", connection, generation)
        else:
            self._log_end("request_failed", connection, generation, code=str(failure.code))

    async def _submit(self, plan: CompletionPlan, stack: AsyncExitStack) -> list[Submission]:
        """Submit every prompt; ``stack`` closes what was taken in, also when another is refused."""
        taken: dict[RequestId, Submission] = {}

        async def submit(prompt: PromptPlan) -> None:
            try:
                submission = await self._backend.submit(
                    prompt.request_id, prompt.token_ids, prompt.params
                )
            except RequestError as error:
                raise _naming(prompt, error) from None
            stack.push_async_callback(submission.aclose)
            taken[prompt.request_id] = submission

        await run_together([submit(prompt) for prompt in plan.prompts])
        return [taken[prompt.request_id] for prompt in plan.prompts]

    def _log_start(self, connection: Connection, plan: CompletionPlan) -> None:
        params = plan.prompts[0].params
        self._log.info(
            "request_received",
            request_id=connection.request_id,
            num_prompts=len(plan.prompts),
            num_prompt_tokens=plan.num_prompt_tokens,
            num_choices=params.num_choices,
            max_tokens=params.max_tokens,
            is_stream=plan.is_stream,
        )
        if len(plan.prompts) == 1:
            return
        for prompt in plan.prompts:
            self._log.info(
                "prompt_submitted",
                request_id=connection.request_id,
                prompt_request_id=prompt.request_id,
                num_prompt_tokens=len(prompt.token_ids),
            )

    def _log_end(
        self, event: str, connection: Connection, generation: Generation, **fields: str
    ) -> None:
        self._log.info(
            event,
            request_id=connection.request_id,
            num_cached_tokens=generation.num_cached_tokens,
            num_completion_tokens=generation.num_completion_tokens,
            finish_reasons=[reason and str(reason) for reason in generation.finish_reasons],
            seconds=round(connection.age_seconds(), 6),
            phases=generation.phases(),
            **fields,
        )


def _naming(prompt: PromptPlan, error: RequestError) -> RequestError:
    """Return a refusal of the cluster that names the prompt where the prompt is at fault."""
    if error.code is not ErrorCode.CONTEXT_EXCEEDED or error.param is not None:
        return error
    return RequestError(error.code, f"{prompt.field}: {error.message}", param=prompt.field)
