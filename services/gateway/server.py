"""uvicorn's server with a drain: it answers until nothing runs any more, then closes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvicorn

from services.gateway.admission import Admission

LAST_ANSWERS_SECONDS = 1.0
"""What answers that the drain has ended get to leave; who does not read them is cut off."""


class GatewayServer(uvicorn.Server):
    """uvicorn, with the signals left to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone."""
        yield

    async def drain(self, admission: Admission, seconds: float, *, is_alone: bool) -> None:
        """Refuse what is new, end by name what still runs after ``seconds``, then exit.

        Until then the port of a gateway that is alone on it stays open: clients get 503 with its
        reason, and not a refused connection. Otherwise they get the others.
        """
        if not is_alone:
            for server in self.servers:
                server.close()
        structlog.get_logger().info("draining", num_open=admission.num_open, seconds=seconds)
        admission.drain.begin(seconds)
        try:
            async with asyncio.timeout(seconds + LAST_ANSWERS_SECONDS):
                await admission.wait_idle()
        except TimeoutError:
            structlog.get_logger().warning("answers_cut_off", num_open=admission.num_open)
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        self.should_exit = True
