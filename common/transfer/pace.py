"""How transports wait for a device or a network: by looking, so that every wait can be ended.

Between two looks at the work a wait looks at the stream to the peer, which shows its death at once,
and gives up when nothing moves.
"""

import threading
from collections.abc import Callable
from time import monotonic

from common.errors import TransferError

POLL_SECONDS = 20e-6
"""Between two looks at the work; the system's timers make it some more."""
LOOK_SECONDS = 1e-3
"""Between two looks at the stream, each of which gives the interpreter's lock away once more."""


class Pace:
    """Waits of one stream; ``look`` raises what ends them."""

    def __init__(self, look: Callable[[], None], stall_seconds: float) -> None:
        self._look = look
        self._stall_seconds = stall_seconds
        self._never = threading.Event()

    def until(
        self, progress: Callable[[], int], goal: int, stall_seconds: float | None = None
    ) -> None:
        """Wait until ``progress()`` is ``goal``; TransferError when it stays the same too long."""
        limit = self._stall_seconds if stall_seconds is None else stall_seconds
        before, deadline, next_look = -1, 0.0, 0.0
        while (count := progress()) < goal:
            now = monotonic()
            if now >= next_look:
                self._look()
                next_look = now + LOOK_SECONDS
            if count != before:
                before, deadline = count, now + limit
            elif now > deadline:
                raise TransferError(f"nothing moved for {limit:.1f} s")
            self._never.wait(POLL_SECONDS)
