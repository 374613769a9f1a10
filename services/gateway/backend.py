"""What the HTTP half asks of the cluster half; the gateway's only seam between the two."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from common.ids import RequestId
from common.messages.fields import PhaseRecord
from common.sampling import FinishReason, SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model behind this gateway.

    ``folder`` holds tokenizer.json and the chat template. ``max_model_len`` is in tokens, prompt
    and output together. ``vocab_size`` is the number of rows of the embedding: every smaller
    token id is legal. ``created_seconds`` is a Unix time.
    """

    name: str
    folder: Path
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_seconds: int


@dataclass(frozen=True, slots=True)
class PromptDone:
    """The prompt is computed; once, before the first delta."""

    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one choice, in order and without repeats.

    ``finish_reason`` is set on the choice's last delta, whose ``tokens`` may be empty. A token
    that ended the choice (end of sequence, stop token) is among ``tokens``.
    """

    choice: int
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None


class Submission(Protocol):
    """One request in the cluster, owned by one HTTP exchange."""

    request_id: RequestId

    @property
    def phases(self) -> Sequence[PhaseRecord]:
        """Where the request's time went, as far as that was told by now."""
        ...

    def events(self) -> AsyncIterator[PromptDone | TokenDelta]:
        """Yield what happens until every choice has finished; raises ``RequestError``."""
        ...

    async def cancel_choice(self, choice: int) -> None:
        """End one choice, because a stop string matched. Idempotent."""
        ...

    async def aclose(self) -> None:
        """Cancel what is left and free it. Idempotent, and called for every submission."""
        ...


class Backend(Protocol):
    """The cluster as the HTTP half sees it."""

    @property
    def model(self) -> ServedModel:
        """The served model, constant for the backend's life."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """Tokens that prompt and output of one choice may have for the workers' KV pools.

        0 while that is not known.
        """
        ...

    async def submit(
        self, request_id: RequestId, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> Submission:
        """Hand a request to the cluster; raises ``RequestError`` when it is refused."""
        ...

    def readiness(self) -> tuple[bool, str]:
        """Whether requests can be served now, and the reason when they cannot."""
        ...
