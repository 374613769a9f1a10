"""The choices of one request, as the cluster delivers their tokens."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing

from common.errors import ErrorCode, RequestError
from common.sampling import FinishReason
from services.gateway.backend import PromptDone, Submission, TokenDelta
from services.gateway.choice import ChoiceAssembler, ChoicePiece
from services.gateway.detokenizer import TokenBytes
from services.gateway.drain import Drain
from services.gateway.ledger import phases_json
from services.gateway.logprobs import Json
from services.gateway.metrics import GatewayMetrics
from services.gateway.plan import CompletionPlan, PromptPlan
from services.gateway.together import run_together

TakePiece = Callable[[int, ChoicePiece], Awaitable[None]]
"""Takes one piece of one choice of the request; waits while the client cannot take more."""


class Generation:
    """Drives the submissions of all prompts and keeps their counts."""

    def __init__(
        self,
        plan: CompletionPlan,
        submissions: Sequence[Submission],
        token_bytes: TokenBytes,
        metrics: GatewayMetrics,
        drain: Drain,
    ) -> None:
        self._plan = plan
        self._drain = drain
        self._prompts = [
            _PromptGeneration(prompt, plan.stops, submission, token_bytes, metrics)
            for prompt, submission in zip(plan.prompts, submissions, strict=True)
        ]

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found instead of computed."""
        return sum(prompt.num_cached_tokens for prompt in self._prompts)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(prompt.num_completion_tokens for prompt in self._prompts)

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Why each choice ended; None for one that has not."""
        return [reason for prompt in self._prompts for reason in prompt.finish_reasons]

    async def run(self, take: TakePiece) -> None:
        """Give every piece to ``take``, one at a time, until every choice is finished.

        The prompts take turns in the order in which their tokens come. The first ``RequestError``
        of any prompt is raised, once the others have stopped; the end of a drain is one.
        """
        turn = asyncio.Lock()
        num_choices = self._plan.num_choices_per_prompt

        async def drive(prompt: _PromptGeneration, first_choice: int) -> None:
            async with aclosing(prompt.pieces()) as pieces:
                async for choice, piece in pieces:
                    async with turn:
                        await take(first_choice + choice, piece)

        async with self._drain.bounds():
            await run_together(
                [drive(prompt, index * num_choices) for index, prompt in enumerate(self._prompts)]
            )

    def usage(self) -> Json:
        """Return OpenAI's ``usage`` for what was answered so far, summed over the prompts."""
        num_prompt_tokens = self._plan.num_prompt_tokens
        usage: Json = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self._plan.has_phases:
            usage["x_phases"] = self.phases()
        return usage

    def phases(self) -> list[Json]:
        """Return where the time of all prompts went, prompt by prompt, as it was told so far."""
        return [phase for prompt in self._prompts for phase in prompt.phases()]


class _PromptGeneration:
    """Drives one submission; its choices are numbered from 0."""

    def __init__(
        self,
        plan: PromptPlan,
        stops: tuple[str, ...],
        submission: Submission,
        token_bytes: TokenBytes,
        metrics: GatewayMetrics,
    ) -> None:
        self._submission = submission
        self._metrics = metrics
        self._choices = [
            ChoiceAssembler(token_bytes, plan.params, stops) for _ in range(plan.params.num_choices)
        ]
        self._last_token_seconds: dict[int, float] = {}
        self.num_cached_tokens = 0

    def phases(self) -> list[Json]:
        """Return where its time went, as it was told so far."""
        return phases_json(self._submission.phases)

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
