"""The one place that maps FlowPath's errors to HTTP, in OpenAI's shape.

======================  ======  ======================  ===========================
code                    status  type                    Retry-After
======================  ======  ======================  ===========================
bad_request             400     invalid_request_error
context_exceeded        400     invalid_request_error
model_not_found         404     invalid_request_error
body_too_large          413     invalid_request_error
queue_full              429     rate_limit_error        the error's own, else 1 s
no_worker               503     service_unavailable     the error's own, else 1 s
no_room                 503     service_unavailable     the error's own, else 1 s
shutting_down           503     service_unavailable     the error's own, else 1 s
cancelled               503     service_unavailable
worker_died             502     upstream_error
transfer_failed         502     upstream_error
deadline_exceeded       504     timeout_error
internal                500     internal_error
======================  ======  ======================  ===========================

502 means that the request may have been computed in part and then lost; 503 that it was never
begun or was withdrawn. Both are safe to send again.
"""

import json
import math
from dataclasses import dataclass

from starlette.responses import Response

from common.errors import ErrorCode, RequestError

DEFAULT_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class HttpMapping:
    """How one error code looks over HTTP; ``code`` is OpenAI's word where it has one."""

    status: int
    error_type: str
    code: str
    is_retryable: bool = False


HTTP_MAPPINGS: dict[ErrorCode, HttpMapping] = {
    ErrorCode.BAD_REQUEST: HttpMapping(400, "invalid_request_error", "bad_request"),
    ErrorCode.CONTEXT_EXCEEDED: HttpMapping(
        400, "invalid_request_error", "context_length_exceeded"
    ),
    ErrorCode.MODEL_NOT_FOUND: HttpMapping(404, "invalid_request_error", "model_not_found"),
    ErrorCode.BODY_TOO_LARGE: HttpMapping(413, "invalid_request_error", "body_too_large"),
    ErrorCode.QUEUE_FULL: HttpMapping(429, "rate_limit_error", "queue_full", is_retryable=True),
    ErrorCode.NO_WORKER: HttpMapping(503, "service_unavailable", "no_worker", is_retryable=True),
    ErrorCode.NO_ROOM: HttpMapping(503, "service_unavailable", "no_room", is_retryable=True),
    ErrorCode.SHUTTING_DOWN: HttpMapping(
        503, "service_unavailable", "shutting_down", is_retryable=True
    ),
    ErrorCode.CANCELLED: HttpMapping(503, "service_unavailable", "cancelled"),
    ErrorCode.WORKER_DIED: HttpMapping(502, "upstream_error", "worker_died"),
    ErrorCode.TRANSFER_FAILED: HttpMapping(502, "upstream_error", "transfer_failed"),
    ErrorCode.DEADLINE_EXCEEDED: HttpMapping(504, "timeout_error", "deadline_exceeded"),
    ErrorCode.INTERNAL: HttpMapping(500, "internal_error", "internal"),
}


def error_body(message: str, error_type: str, param: str | None, code: str | None) -> bytes:
    """Encode OpenAI's error object."""
    error = {"message": message, "type": error_type, "param": param, "code": code}
    return json.dumps({"error": error}, ensure_ascii=False).encode("utf-8", "replace")


def request_error_body(error: RequestError) -> bytes:
    """Encode ``error`` as OpenAI's error object: a response body, or an SSE event's data."""
    mapping = HTTP_MAPPINGS[error.code]
    return error_body(error.message, mapping.error_type, error.param, mapping.code)


def request_error_response(error: RequestError) -> Response:
    """Build the whole response for ``error``."""
    mapping = HTTP_MAPPINGS[error.code]
    headers: dict[str, str] = {}
    if mapping.is_retryable:
        seconds = error.retry_after_seconds
        if seconds is None:
            seconds = DEFAULT_RETRY_SECONDS
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    return Response(
        request_error_body(error),
        status_code=mapping.status,
        headers=headers,
        media_type="application/json",
    )
