"""How tokens are drawn: the same value on the wire and in the engine."""

from dataclasses import field
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field, StrictBool
from pydantic.dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SEED = 2**63 - 1


TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words where it has them."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SamplingParams:
    """One request's sampling.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 switch the filters off. ``seed`` is
    always set (the gateway draws one where the caller gave none), so that every draw is a pure
    function of (seed, choice, position) and a stream can be resumed anywhere. ``num_logprobs``
    is None for none, else how many alternatives (0 to 20) come beside the drawn token's own.
    ``eos_token_ids`` end a choice unless ``ignore_eos``. ``min_tokens`` bans them before.
    """

    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)]
    max_tokens: Annotated[int, Field(strict=True, ge=1)]
    num_choices: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=0)] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    logit_bias: dict[TokenId, float] = field(default_factory=dict)
    num_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    ignore_eos: StrictBool = False
    min_tokens: Annotated[int, Field(strict=True, ge=0)] = 0
    eos_token_ids: tuple[TokenId, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether a draw reads which tokens came before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class SampledToken:
    """One drawn token.

    ``logprob`` and ``top_logprobs`` (token id, logprob; best first) are natural logarithms of the
    model's own distribution, before penalties, bias and temperature; None and empty unless the
    request asked for them.
    """

    token_id: TokenId
    logprob: float | None = None
    top_logprobs: tuple[tuple[TokenId, float], ...] = ()
