"""One HTTP exchange on its socket: the body with its bounds, the answer, the disconnect."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.errors import ErrorCode, RequestError
from common.ids import RequestId


class Connection:
    """Reads one request's body and writes its answer; knows whether the client is still there."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.request_id: RequestId = scope["state"]["request_id"]
        self.arrived_seconds: float = scope["state"]["arrived_seconds"]
        self.is_started = False
        self.is_complete = False

    async def read_body(self, max_bytes: int, timeout_seconds: float) -> bytes:
        """Read the whole body, and stop as soon as it passes ``max_bytes``.

        Raises ``RequestError`` for too many bytes or a stalled client, ``HTTPException`` 415 for
        another type than JSON and 417 for another expectation than 100-continue,
        ``ClientDisconnect`` when the client goes away.
        """
        headers = dict(self._scope["headers"])
        if headers.get(b"expect", b"100-continue").lower() != b"100-continue":
            raise HTTPException(417, "the only Expect that is met is 100-continue")
        _check_is_json(headers)
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_seconds):
                is_more = True
                while is_more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise _too_large(max_bytes)
                    is_more = message.get("more_body", False)
        except TimeoutError:
            raise RequestError(
                ErrorCode.BAD_REQUEST, f"the body did not arrive within {timeout_seconds:g} s"
            ) from None
        return bytes(body)

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``, which writes the answer, for as long as the client is there.

        When the client goes away before the answer is complete, ``work`` is cancelled, has its
        time to clean up, and ``ClientDisconnect`` is raised. Call after the body is read.
        """

        async def outcome() -> Exception | None:
            # A TaskGroup would wrap the error; the caller wants it as it is.
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - raised again below, in the caller's task
                return error
            return None

        async with asyncio.TaskGroup() as group:
            job = group.create_task(outcome())
            watcher = group.create_task(self._cancel_on_disconnect(job))
            await asyncio.wait((job,))
            watcher.cancel()
        if job.cancelled():
            raise ClientDisconnect
        error = job.result()
        if error is not None:
            raise error

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Write status and headers."""
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, chunk: bytes) -> None:
        """Write a part of the answer at once; waits while the client's socket is full."""
        await self._send(_body(chunk, is_more=True))

    async def finish(self, chunk: bytes = b"") -> None:
        """Write the answer's last part; from here on a disconnect changes nothing."""
        self.is_complete = True
        await self._send(_body(chunk, is_more=False))

    async def answer(self, value: object) -> None:
        """Write a whole answer, as JSON."""
        body = encode_json(value)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await self.start(200, headers)
        await self.finish(body)

    def note_admitted(self) -> None:
        """Note that the cluster took the request: an error from now on is no refusal."""
        self._scope["state"]["is_admitted"] = True

    def age_seconds(self) -> float:
        """Return the time since the request's headers arrived."""
        return time.perf_counter() - self.arrived_seconds

    async def _cancel_on_disconnect(self, job: "asyncio.Task[Exception | None]") -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # The end of a complete answer reads as a disconnect too.
        if not self.is_complete:
            job.cancel()


class Exchange(Response):
    """A response that reads the request and writes the answer itself, on the bare connection."""

    def __init__(self, serve: Callable[[Connection], Awaitable[None]]) -> None:
        super().__init__()
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange."""
        await self._serve(Connection(scope, receive, send))


def encode_json(value: object) -> bytes:
    """Encode as compact JSON in UTF-8."""
    return _encode(value).encode()


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


# RFC 9110 section 5.6.6.
_PARAMETER = re.compile(r';[ \t]*([^\s;="]+)=("(?:[^"\\]|\\.)*"|[^\s;]*)')


def _check_is_json(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a body that says it is something else than plain JSON; one that says nothing passes.

    A web page may send its visitor's browser to any address with a form's or a text's type, but
    not with JSON's: so a foreign page cannot use a server that only its visitor can reach.
    """
    declared = headers.get(b"content-type", b"application/json").decode("latin-1")
    media_type = declared.partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise HTTPException(415, "the content-type of the body must be application/json")
    parameters = _PARAMETER.findall(declared[len(media_type) :])
    charsets = {value.strip('"').lower() for name, value in parameters if name.lower() == "charset"}
    if not charsets <= {"utf-8", "utf8"}:
        raise HTTPException(415, "the charset of the body must be utf-8")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise HTTPException(415, "the body must not be compressed (content-encoding)")


def _body(chunk: bytes, *, is_more: bool) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": is_more}


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        ErrorCode.BODY_TOO_LARGE, f"the body is larger than the limit of {max_bytes} bytes"
    )
