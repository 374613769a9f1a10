"""A backend without a cluster: scripted tokens, for tests and for measuring the HTTP half."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from common.errors import RequestError
from common.ids import RequestId
from common.messages.fields import PhaseRecord
from common.sampling import FinishReason, SampledToken, SamplingParams
from services.gateway.backend import PromptDone, ServedModel, TokenDelta

_TURNS_TO_CLOSE = 4

Script = Callable[[Sequence[int], SamplingParams, int], Sequence[SampledToken]]
"""(prompt token ids, params, choice) to all the tokens that the choice would draw."""


@dataclass(slots=True)
class FakeBehaviour:
    """What the fake cluster does; tests change it between requests.

    ``burst`` tokens come per delta, ``interval_seconds`` apart. After ``num_tokens_before_wait``
    tokens of a choice the stream waits for ``resume``, and then raises ``failure`` if there is one.
    """

    num_cached_tokens: int = 0
    phases: tuple[PhaseRecord, ...] = ()
    burst: int = 1
    interval_seconds: float = 0.0
    refusal: RequestError | None = None
    num_tokens_before_wait: int | None = None
    failure: RequestError | None = None
    resume: asyncio.Event = field(default_factory=asyncio.Event)


class FakeSubmission:
    """One request of the fake; remembers what was played, cancelled and closed."""

    def __init__(
        self,
        request_id: RequestId,
        tokens: list[Sequence[SampledToken]],
        params: SamplingParams,
        behaviour: FakeBehaviour,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.cancelled_choices: set[int] = set()
        self.num_played = 0
        self.closed = asyncio.Event()
        self.waiting = asyncio.Event()
        self._tokens = [tuple(of_choice) for of_choice in tokens]
        self._behaviour = behaviour

    @property
    def phases(self) -> tuple[PhaseRecord, ...]:
        """Return what the test set."""
        return self._behaviour.phases

    async def events(self) -> AsyncGenerator[PromptDone | TokenDelta]:
        """Yield every choice's tokens in turn, a burst each."""
        behaviour = self._behaviour
        yield PromptDone(behaviour.num_cached_tokens)
        position = 0
        running = set(range(len(self._tokens)))
        while running:
            if behaviour.num_tokens_before_wait is not None and (
                position >= behaviour.num_tokens_before_wait
            ):
                self.waiting.set()
                await behaviour.resume.wait()
                if behaviour.failure is not None:
                    raise behaviour.failure
            await asyncio.sleep(behaviour.interval_seconds)  # 0 lets the others have their turn
            for choice in sorted(running - self.cancelled_choices):
                yield self._delta(choice, position)
            position += behaviour.burst
            running = {
                choice
                for choice in running - self.cancelled_choices
                if position < len(self._tokens[choice])
            }

    async def cancel_choice(self, choice: int) -> None:
        """End one choice."""
        self.cancelled_choices.add(choice)

    async def aclose(self) -> None:
        """Note that the gateway let go of the request, after a few turns of the loop."""
        for _ in range(_TURNS_TO_CLOSE):
            await asyncio.sleep(0)
        self.closed.set()

    def _delta(self, choice: int, position: int) -> TokenDelta:
        tokens = self._tokens[choice]
        burst = tokens[position : position + self._behaviour.burst]
        self.num_played += len(burst)
        if position + len(burst) < len(tokens):
            return TokenDelta(choice, burst, None)
        eos = () if self.params.ignore_eos else self.params.eos_token_ids
        is_stopped = bool(burst) and burst[-1].token_id in (*eos, *self.params.stop_token_ids)
        reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        return TokenDelta(choice, burst, reason)


class FakeBackend:
    """Plays ``script`` for every request, at most ``max_tokens`` of it."""

    def __init__(
        self, model: ServedModel, script: Script, behaviour: FakeBehaviour | None = None
    ) -> None:
        self.model = model
        self.behaviour = behaviour or FakeBehaviour()
        self.readiness_answer = (True, "")
        self.max_request_tokens = 0
        self.submissions: list[FakeSubmission] = []
        self.prompts: list[tuple[int, ...]] = []
        self._script = script
        self._submitted = asyncio.Condition()

    async def submit(
        self, request_id: RequestId, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> FakeSubmission:
        """Begin to play, or refuse as ``behaviour`` says."""
        if self.behaviour.refusal is not None:
            raise self.behaviour.refusal
        tokens = [
            self._script(prompt_token_ids, params, choice)[: params.max_tokens]
            for choice in range(params.num_choices)
        ]
        submission = FakeSubmission(request_id, tokens, params, self.behaviour)
        async with self._submitted:
            self.submissions.append(submission)
            self.prompts.append(tuple(prompt_token_ids))
            self._submitted.notify_all()
        return submission

    def readiness(self) -> tuple[bool, str]:
        """Return what the test set."""
        return self.readiness_answer

    async def wait_for_submission(self, index: int = 0) -> FakeSubmission:
        """Return the submission number ``index``, once it is there."""
        async with self._submitted:
            await self._submitted.wait_for(lambda: len(self.submissions) > index)
        return self.submissions[index]
