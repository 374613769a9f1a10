"""What ``flowpath bench serve`` asks, and when: a pure function of its options and seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

FIRST_TOKEN_ID = 100
"""Smaller ids are often special tokens."""

_TEXT = """
the of river and to mountain in is that winter for it as stone was with be by on not he window this
are or his from at which but have an had they you were their one all we can her has there been if
more when will would who so no out up into do any time people light water over some could only new
other its these may such great about many then them made after garden house music letter morning
train paper island forest question answer number
"""
_WORDS = tuple(_TEXT.split())


class PromptKind(StrEnum):
    """How prompts are given."""

    IDS = "ids"
    """Token ids, on /v1/completions: lengths are exact. Not every server takes them."""
    TEXT = "text"
    """Random words on /v1/completions: about one token each."""
    CHAT = "chat"
    """Random words as one user message on /v1/chat/completions."""


class Arrival(StrEnum):
    """When requests are sent."""

    POISSON = "poisson"
    BURST = "burst"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run.

    ``rate`` is in requests/s (Poisson). ``burst`` requests are sent at once, every
    ``burst_seconds``. ``concurrency`` requests are open at any time in a closed loop.
    """

    num_requests: int
    input_tokens: int
    output_tokens: int
    prompt_kind: PromptKind
    arrival: Arrival
    seed: int = 0
    rate: float = 1.0
    burst: int = 1
    burst_seconds: float = 1.0
    concurrency: int = 1
    vocab_size: int = 4096
    is_ignoring_eos: bool = True
    temperature: float = 0.0

    @property
    def path(self) -> str:
        """The route that is asked."""
        is_chat = self.prompt_kind is PromptKind.CHAT
        return "/v1/chat/completions" if is_chat else "/v1/completions"

    def body(self, model: str, index: int) -> dict[str, object]:
        """Return the body of one request; -1, -2, … are warm-up requests."""
        source = random.Random(f"{self.seed} prompt {index}")  # noqa: S311 - a workload, no secret
        body: dict[str, object] = {
            "model": model,
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
            "seed": (self.seed + index) % 2**31,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_ignoring_eos:
            body["ignore_eos"] = True
        if self.prompt_kind is PromptKind.IDS:
            body["prompt"] = [
                source.randrange(FIRST_TOKEN_ID, self.vocab_size) for _ in range(self.input_tokens)
            ]
            return body
        text = " ".join(source.choices(_WORDS, k=self.input_tokens))
        if self.prompt_kind is PromptKind.TEXT:
            body["prompt"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
        return body

    def start_seconds(self) -> Iterator[float]:
        """Yield when each request of an open load is sent, from the start of the run."""
        source = random.Random(f"{self.seed} arrivals")  # noqa: S311 - a workload, no secret
        now = 0.0
        for index in range(self.num_requests):
            if self.arrival is Arrival.BURST:
                yield index // self.burst * self.burst_seconds
            else:
                now += source.expovariate(self.rate)
                yield now
