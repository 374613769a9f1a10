"""Asks for an API key, where the operator has set any."""

import hashlib
import hmac
from collections.abc import Iterable

import structlog
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http_errors import error_body

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Probes and scrapers come without a key: these say how the server is, and nothing of requests."""


class ApiKeyGate:
    """ASGI middleware: a request must carry ``Authorization: Bearer KEY`` with one of the keys.

    Every path is covered, also one that does not exist, but ``OPEN_PATHS``.
    """

    def __init__(self, app: ASGIApp, api_keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        structlog.get_logger().info(
            "request_refused", request_id=scope["state"]["request_id"], code="invalid_api_key"
        )
        await _unauthorized()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        is_known = False
        # Every key is compared, and in constant time: the answer's time tells nothing of a key.
        for digest in self._digests:
            is_known |= hmac.compare_digest(digest, given)
        return is_known and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized() -> Response:
    message = (
        "an API key of this server is needed: send 'Authorization: Bearer KEY'; none was sent, or "
        "the one that was is not known"
    )
    return Response(
        error_body(message, "invalid_request_error", None, "invalid_api_key"),
        status_code=401,
        headers={"WWW-Authenticate": "Bearer"},
        media_type="application/json",
    )
