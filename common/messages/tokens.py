"""The tokens conversation: workers (DEALER) to a gateway (ROUTER); the gateway never answers."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.fields import STRUCT, ChoiceIndex, Count, Phases, Text
from common.sampling import FinishReason, SampledToken


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class TokenDelta:
    """New tokens of one choice. ``index`` is the place of the first among all generated ones.

    The first delta of either side carries ``num_cached_tokens``. A decode side starts with the
    first token again, so that one lost with a dying prefill side still arrives.
    ``finish_reason`` ends the choice. ``phases`` are those of the request's phases that ended on
    the sender since it told of any.
    """

    request_id: RequestId
    choice: ChoiceIndex
    index: Count
    tokens: Annotated[tuple[SampledToken, ...], Field(max_length=4096)]
    finish_reason: FinishReason | None = None
    num_cached_tokens: Count | None = None
    phases: Phases = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class TokensGenerated:
    """Worker → gateway, one message per engine step and gateway.

    The gateway orders by index and drops repeats, so a repeat is safe.
    """

    deltas: Annotated[tuple[TokenDelta, ...], Field(max_length=65536)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class StreamFailed:
    """Worker → gateway: the request ended with an error here. A repeat is safe."""

    request_id: RequestId
    code: ErrorCode
    message: Text


WorkerToGateway = TokensGenerated | StreamFailed
