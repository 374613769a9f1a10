"""One completion: what was asked, and the pieces of its choices as the cluster delivers them."""

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from common.errors import ErrorCode, RequestError
from common.ids import RequestId
from common.sampling import FinishReason, SamplingParams
from services.gateway.backend import PromptDone, Submission, TokenDelta
from services.gateway.choice import ChoiceAssembler, ChoicePiece
from services.gateway.detokenizer import TokenBytes
from services.gateway.logprobs import Json
from services.gateway.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A checked request: nothing in it can be refused any more but by the cluster."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stops: tuple[str, ...]
    is_stream: bool
    has_usage_chunk: bool
    shows_tokens: bool
    """Whether logprobs or token ids are asked for, so that tokens without text are news too."""


class Generation:
    """Drives one submission and keeps its counts."""

    def __init__(
        self,
        plan: CompletionPlan,
        submission: Submission,
        token_bytes: TokenBytes,
        metrics: GatewayMetrics,
    ) -> None:
        self._plan = plan
        self._submission = submission
        self._metrics = metrics
        self._choices = [
            ChoiceAssembler(token_bytes, plan.params, plan.stops)
            for _ in range(plan.params.num_choices)
        ]
        self._last_token_seconds: dict[int, float] = {}
        self.num_cached_tokens = 0

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Why each choice ended; None for one that has not."""
        return [choice.finish_reason for choice in self._choices]

    async def pieces(self) -> AsyncGenerator[tuple[int, ChoicePiece]]:
        """Yield (choice, piece) until every choice is finished; raises ``RequestError``."""
        async with AsyncExitStack() as stack:
            events: AsyncIterator[PromptDone | TokenDelta] = self._submission.events()
            if isinstance(events, AsyncGenerator):
                await stack.enter_async_context(aclosing(events))
            async for event in events:
                if isinstance(event, PromptDone):
                    self.num_cached_tokens = event.num_cached_tokens
                    self._metrics.cached_tokens.inc(event.num_cached_tokens)
                    continue
                choice = self._choices[event.choice]
                if choice.is_finished:
                    continue
                yield event.choice, await self._take(choice, event)
                if all(choice.is_finished for choice in self._choices):
                    return
        raise RequestError(ErrorCode.INTERNAL, "the stream ended before every choice had finished")

    def usage(self) -> Json:
        """Return OpenAI's ``usage`` for what was answered so far."""
        num_prompt_tokens = len(self._plan.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    async def _take(self, choice: ChoiceAssembler, delta: TokenDelta) -> ChoicePiece:
        if delta.finish_reason is FinishReason.CANCELLED:
            raise RequestError(ErrorCode.CANCELLED, "the request was cancelled by the cluster")
        piece = choice.feed(delta)
        self._observe(delta.choice, len(piece.tokens))
        if piece.is_stopped_early:
            await self._submission.cancel_choice(delta.choice)
        return piece

    def _observe(self, choice: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.perf_counter()
        self._metrics.generation_tokens.inc(num_tokens)
        before = self._last_token_seconds.get(choice)
        self._last_token_seconds[choice] = now
        if before is not None:
            for _ in range(num_tokens):
                self._metrics.inter_token_seconds.observe((now - before) / num_tokens)
