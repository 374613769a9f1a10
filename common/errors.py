"""The one tree of FlowPath's errors.

A ``LocalProtocolError`` is our own fault and a bug; a ``RemoteProtocolError`` is the peer's, and
costs the peer its connection, not us our process. A ``RequestError`` ends one request and travels
to its caller by its ``code``; the gateway alone maps codes to HTTP.
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request was refused or failed, as it stands on the wire and in logs."""

    BAD_REQUEST = "bad_request"
    CONTEXT_EXCEEDED = "context_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    BODY_TOO_LARGE = "body_too_large"
    QUEUE_FULL = "queue_full"
    NO_WORKER = "no_worker"
    NO_ROOM = "no_room"
    SHUTTING_DOWN = "shutting_down"
    WORKER_DIED = "worker_died"
    TRANSFER_FAILED = "transfer_failed"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class FlowPathError(Exception):
    """Base of every error that FlowPath raises on purpose."""


class ConfigError(FlowPathError):
    """A setting, file or model folder is unusable; the message names it and says what to do."""


class ModelError(ConfigError):
    """A model folder cannot be served; the message names the file and the reason."""


class RequestError(FlowPathError):
    """One request cannot go on.

    ``param`` names the request's field at fault, where there is one. ``retry_after_seconds`` is
    set where trying again later makes sense.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds


class ProtocolError(FlowPathError):
    """A message or an event does not fit the conversation."""


class LocalProtocolError(ProtocolError):
    """We broke the protocol: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol: drop the message or the peer, and go on."""


class IllegalTransitionError(LocalProtocolError):
    """A state machine was given an event that its phase forbids; nothing was changed.

    ``story`` holds the events that led to the phase, oldest first.
    """

    def __init__(self, machine: str, phase: str, event: str, story: tuple[str, ...]) -> None:
        super().__init__(
            f"{machine}: event {event} is illegal in phase {phase} (story: {' > '.join(story)})"
        )
        self.machine = machine
        self.phase = phase
        self.event = event
        self.story = story


class InvariantViolationError(FlowPathError):
    """A structure's ``validate()`` found its sums wrong; its worker is quarantined."""


class TransferError(FlowPathError):
    """Moving bytes failed; the message names peer, operation, bytes and transport."""
