"""How many requests one gateway has in work."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import ErrorCode, RequestError
from services.gateway.drain import Drain
from services.gateway.http_settings import HttpSettings
from services.gateway.metrics import GatewayMetrics


class Admission:
    """Counts the requests in work, at most ``max_open_requests``; each prompt of a list is one."""

    def __init__(self, settings: HttpSettings, metrics: GatewayMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self.drain = Drain(metrics)
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Hold ``count`` slots for as long as the block.

        Raises ``RequestError`` without room, and once the drain has begun.
        """
        if count:
            self.drain.check_open()
        if count and self.num_open + count > self._settings.max_open_requests:
            raise RequestError(
                ErrorCode.QUEUE_FULL,
                f"{self.num_open} requests are open, and this gateway takes "
                f"{self._settings.max_open_requests}",
                retry_after_seconds=self._settings.queue_full_retry_seconds,
            )
        self._add(count)
        try:
            yield
        finally:
            self._add(-count)

    async def wait_idle(self) -> None:
        """Wait until nothing is in work."""
        await self._idle.wait()

    def _add(self, count: int) -> None:
        self.num_open += count
        self._metrics.running.inc(count)
        if self.num_open:
            self._idle.clear()
        else:
            self._idle.set()
