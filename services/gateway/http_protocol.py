"""uvicorn's HTTP connection, which lets go of a client that has stopped reading.

An answer waits while more than the transport's high-water mark of bytes is unsent. A client that
takes none of them for a while is cut off; its request then ends as one whose client went away.
"""

import asyncio

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CHECKS_PER_STALL = 4


def stall_aware_protocol(stalled_client_seconds: float) -> type[HttpToolsProtocol]:
    """Return the connection class for uvicorn; 0 seconds lets clients stall for ever."""
    if stalled_client_seconds <= 0:
        return HttpToolsProtocol
    check_seconds = stalled_client_seconds / CHECKS_PER_STALL

    class StallAwareProtocol(HttpToolsProtocol):
        """Watches the unsent bytes for as long as writing is paused."""

        _timer: asyncio.TimerHandle | None = None
        _num_unsent = 0
        _num_checks = 0

        def pause_writing(self) -> None:
            """The client takes less than it is sent: watch it."""
            super().pause_writing()
            if self._timer is None:
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
