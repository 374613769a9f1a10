"""HEAD, as HTTP has it: what GET would answer, without the body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """ASGI middleware: serves HEAD on every path that has GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # A copy: the server below must go on to see HEAD. What the router finds is for our callers.
        inner: Scope = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, send_without_body)
        finally:
            if "route" in inner:
                scope["route"] = inner["route"]
