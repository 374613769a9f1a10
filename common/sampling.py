"""How tokens are drawn: the same value on the wire and in the engine."""

from dataclasses import field
from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, StrictBool, model_validator
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

    A request that lost its worker goes on with what was drawn: the last ``num_drawn`` tokens of its
    prompt are outputs, which ``max_tokens`` and ``min_tokens`` count, and its choices are numbered
    from ``first_choice``, as their draws were.
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
    first_choice: Annotated[int, Field(strict=True, ge=0, lt=MAX_CHOICES)] = 0
    num_drawn: Annotated[int, Field(strict=True, ge=0)] = 0

    @model_validator(mode="after")
    def _check_rest(self) -> Self:
        if self.num_drawn >= self.max_tokens:
            raise ValueError(
                f"num_drawn {self.num_drawn} leaves nothing of {self.max_tokens} tokens"
            )
        if self.choices.stop > MAX_CHOICES:
            raise ValueError(f"choices up to {self.choices.stop} of {MAX_CHOICES}")
        return self

    @property
    def num_left(self) -> int:
        """Tokens that each choice may still draw."""
        return self.max_tokens - self.num_drawn

    @property
    def choices(self) -> range:
        """The numbers of the choices."""
        return range(self.first_choice, self.first_choice + self.num_choices)

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
