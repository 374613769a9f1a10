"""Refusing a request by name."""

from dataclasses import dataclass

from common.errors import ErrorCode
from common.ids import RequestId
from common.messages.control import RequestRefused
from services.controller.effects import Effect, Fact, Note, PeerKey, Send


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken in."""

    code: ErrorCode
    message: str
    retry_after_seconds: float | None = None


def refuse(gateway: PeerKey, request_id: RequestId, refusal: Refusal, cause: str) -> list[Effect]:
    """Return the effects that refuse a request by name."""
    refused = RequestRefused(
        request_id=request_id,
        code=refusal.code,
        message=refusal.message,
        retry_after_seconds=refusal.retry_after_seconds,
    )
    facts: tuple[Fact, ...] = (("code", refusal.code), ("reason", refusal.message))
    return [
        Note("request_refused", cause, request_id, facts, "warning"),
        Send(gateway, refused, cause),
    ]
