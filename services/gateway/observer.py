"""The outermost layer: every request gets its id, its metrics, and an answer whatever happens."""

import time

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ErrorCode
from common.ids import new_request_id
from services.gateway.http_errors import HTTP_MAPPINGS, error_body
from services.gateway.metrics import GatewayMetrics

REQUEST_ID_HEADER = "x-request-id"
UNCOUNTED_ROUTES = frozenset({"/health", "/ping", "/load", "/metrics"})
"""What supervisors, load balancers and scrapers ask every few seconds is no traffic."""


class RequestObserver:
    """ASGI middleware: mints the request id and ends what nothing inside could end."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["arrived_seconds"] = time.perf_counter()
        state["is_admitted"] = False
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (REQUEST_ID_HEADER.encode(), request_id.encode())
                message = {**message, "headers": [*message.get("headers", []), header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            self._metrics.disconnects.labels(_route(scope)).inc()
            structlog.get_logger().info(
                "client_disconnected", request_id=request_id, route=_route(scope)
            )
            return
        except Exception:  # noqa: BLE001 - the last handler: one broken request ends, not the server
            structlog.get_logger().exception("request_crashed", request_id=request_id)
            if status == 0:
                await _internal_error(request_id)(scope, receive, send_with_id)
        route = _route(scope)
        if route not in UNCOUNTED_ROUTES:
            self._metrics.requests.labels(route, str(status)).inc()


def _route(scope: Scope) -> str:
    """Return the matched route's path: callers cannot make new label values."""
    route = scope.get("route")
    return getattr(route, "path", "unmatched")


def _internal_error(request_id: str) -> Response:
    mapping = HTTP_MAPPINGS[ErrorCode.INTERNAL]
    message = f"internal error; the server's log has it under {request_id}"
    body = error_body(message, mapping.error_type, None, mapping.code)
    return Response(body, status_code=mapping.status, media_type="application/json")
