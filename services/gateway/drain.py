"""The end of a gateway's work: nothing new is taken, and what runs has until a deadline."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import ErrorCode, RequestError
from services.gateway.metrics import GatewayMetrics


class Drain:
    """Ends by name whatever runs within ``bounds`` when the drain's time is over."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._seconds = 0.0
        self._deadline: float | None = None
        self._timeouts: set[asyncio.Timeout] = set()

    @property
    def has_begun(self) -> bool:
        """Whether new requests are to be refused."""
        return self._deadline is not None

    def begin(self, seconds: float) -> None:
        """Give what runs ``seconds``; a repeat changes nothing."""
        if self._deadline is not None:
            return
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        for timeout in self._timeouts:
            timeout.reschedule(self._deadline)

    def check_open(self) -> None:
        """Raise ``RequestError`` once the drain has begun."""
        if self.has_begun:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the gateway is shutting down")

    @asynccontextmanager
    async def bounds(self) -> AsyncIterator[None]:
        """Cancel the block at the drain's deadline, and raise ``RequestError`` in its place."""
        timeout = asyncio.timeout_at(self._deadline)
        try:
            async with timeout:
                self._timeouts.add(timeout)
                try:
                    yield
                finally:
                    self._timeouts.discard(timeout)
        except TimeoutError:
            if not timeout.expired():
                raise
            self._metrics.cut_by_drain.inc()
            told = (
                "the gateway is shutting down, and the request had not ended after the "
                f"{self._seconds:g} s that running requests get (drain_seconds)"
            )
            raise RequestError(ErrorCode.SHUTTING_DOWN, told) from None
