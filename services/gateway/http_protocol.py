"""uvicorn's HTTP connection, with bounds on what a client may make the gateway hold.

An answer waits while more than the transport's high-water mark of bytes is unsent. A client that
takes none of them for a while is cut off; its request then ends as one whose client went away.

A request's head is held back until it is whole, within ``MAX_HEAD_BYTES`` and a deadline. Its
``Upgrade`` header is renamed before the parser sees it: RFC 9110 section 7.8 lets a server ignore
it, while the parser would take the body for another protocol and what follows for a new request.
Bytes behind a body reach the parser with it; an upgrade asked for there is refused with 400.
"""

import asyncio
import re

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.http_errors import error_body

CHECKS_PER_STALL = 4
MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0

# Line feeds alone end no head, but the parser, not the deadline, is to refuse them.
_HEAD_END = re.compile(rb"\n\r?\n")
_LONGEST_HEAD_END = 3
_UPGRADE_NAME = re.compile(rb"^upgrade(?=[ \t]*:)", re.IGNORECASE | re.MULTILINE)
_IGNORED_NAME = b"x-upgrade-ignored"


class BoundedHeadProtocol(HttpToolsProtocol):
    """Takes heads of bounded size and duration, and never upgrades."""

    _head_seconds = HEAD_SECONDS
    _head_timer: asyncio.TimerHandle | None = None
    _is_between_messages = True
    _held = b""
    _num_bytes_since_body = 0

    def connection_made(  # type: ignore[override]  # as uvicorn narrows it
        self, transport: asyncio.Transport
    ) -> None:
        """The first head is due from here on."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._end_head_timer()
        self._held = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser whole heads, and everything else as it comes."""
        if self._is_between_messages:
            whole = self._take_head(data)
            if whole is None:
                return
            data = whole
        self._num_bytes_since_body += len(data)
        super().data_received(data)
        if self._is_between_messages:
            self._num_bytes_since_body = 0
        elif self._num_bytes_since_body > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()  # trailers, or a head behind another request's body

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of every other error."""
        body = error_body(msg, "invalid_request_error", None, "invalid_http_request")
        self._refuse(b"400 Bad Request", body)

    def on_message_begin(self) -> None:
        """The parser has met a request's first byte."""
        self._is_between_messages = False
        self._start_head_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header; raise ValueError, which uvicorn answers with 400, for an upgrade."""
        if name.lower() == b"upgrade":
            raise ValueError("an Upgrade header behind another request")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole; raise ValueError for CONNECT, whose body is no HTTP either."""
        self._end_head_timer()
        if self.parser.should_upgrade():
            raise ValueError("a request that would leave HTTP")
        super().on_headers_complete()
        self._num_bytes_since_body = 0

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_bytes_since_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next byte begins a head."""
        self._is_between_messages = True
        super().on_message_complete()

    def _take_head(self, data: bytes) -> bytes | None:
        """Return the held bytes and ``data`` once they hold a whole head, without its upgrade."""
        self._unset_keepalive_if_required()
        self._start_head_timer()
        num_searched = max(0, len(self._held) - _LONGEST_HEAD_END)
        # Empty lines before a request are to be ignored (RFC 9112 section 2.2).
        data = self._held + data if self._held else data.lstrip(b"\r\n")
        found = _HEAD_END.search(data, num_searched)
        num_head_bytes = found.end() if found else len(data)
        if num_head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
            return None
        if found is None:
            self._held = data
            return None
        self._held = b""
        head, num_renamed = _UPGRADE_NAME.subn(_IGNORED_NAME, data[:num_head_bytes])
        return head + data[num_head_bytes:] if num_renamed else data

    def _refuse_head(self) -> None:
        self._held = b""
        self._end_head_timer()
        if not self._is_answering():
            message = f"the request's head is larger than {MAX_HEAD_BYTES} bytes"
            body = error_body(message, "invalid_request_error", None, "request_head_too_large")
            self._refuse(b"431 Request Header Fields Too Large", body)
        self.transport.close()

    def _refuse(self, status: bytes, body: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)
        )
        self.transport.close()

    def _is_answering(self) -> bool:
        return not getattr(self.cycle, "response_complete", True)  # no cycle before a request

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self._end_late_head)

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_late_head(self) -> None:
        self._head_timer = None
        if self._is_answering():  # nothing more may be read until the answer is out
            self._start_head_timer()
        else:
            self.transport.close()


def stall_aware_protocol(
    stalled_client_seconds: float, head_seconds: float = HEAD_SECONDS
) -> type[HttpToolsProtocol]:
    """Return the connection class for uvicorn.

    0 ``stalled_client_seconds`` lets clients stall for ever. A connection whose request head is
    not whole ``head_seconds`` after its first byte (the first: after connecting) is closed.
    """
    check_seconds = stalled_client_seconds / CHECKS_PER_STALL

    class StallAwareProtocol(BoundedHeadProtocol):
        """Watches the unsent bytes for as long as writing is paused."""

        _head_seconds = head_seconds
        _timer: asyncio.TimerHandle | None = None
        _num_unsent = 0
        _num_checks = 0

        def pause_writing(self) -> None:
            """The client takes less than it is sent: watch it."""
            super().pause_writing()
            if self._timer is None and check_seconds > 0:
                self._num_unsent = self.transport.get_write_buffer_size()
                self._num_checks = 0
                self._timer = self.loop.call_later(check_seconds, self._check)

        def resume_writing(self) -> None:
            """The client has caught up."""
            self._end_watch()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            """The connection is over."""
            self._end_watch()
            super().connection_lost(exc)

        def _check(self) -> None:
            num_unsent = self.transport.get_write_buffer_size()
            self._num_checks = 0 if num_unsent != self._num_unsent else self._num_checks + 1
            self._num_unsent = num_unsent
            if self._num_checks < CHECKS_PER_STALL:
                self._timer = self.loop.call_later(check_seconds, self._check)
                return
            self._timer = None
            state = (self.scope or {}).get("state", {})
            structlog.get_logger().warning(
                "client_stalled",
                request_id=state.get("request_id"),
                num_unsent_bytes=num_unsent,
                seconds=stalled_client_seconds,
            )
            self.transport.abort()

        def _end_watch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return StallAwareProtocol
