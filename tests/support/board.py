"""Waiting for what other tasks and threads do, with deadlines and without sleeping."""

import asyncio
import threading
from collections.abc import Callable
from time import monotonic

WAIT_SECONDS = 30.0


class HarnessError(Exception):
    """What a test waited for did not come."""


class Board:
    """What has been seen so far; ``post`` wakes whoever waits for it."""

    def __init__(self) -> None:
        self._posted = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def post(self) -> None:
        """Something has changed."""
        self._posted.set()

    def post_from_thread(self) -> None:
        """Something has changed in another thread."""
        self._loop.call_soon_threadsafe(self._posted.set)

    async def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until a change makes it so. HarnessError at the deadline."""
        deadline = monotonic() + WAIT_SECONDS
        while not is_so():
            self._posted.clear()
            try:
                async with asyncio.timeout_at(self._loop.time() + max(0.0, deadline - monotonic())):
                    await self._posted.wait()
            except TimeoutError:
                raise HarnessError(f"not within {WAIT_SECONDS:g} s: {what}") from None


class Gate:
    """Lets calls from other threads through, or holds them back: all, or all but a number."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._change = threading.Condition()
        self._num_permits: int | None = None
        self.num_arrived = 0

    @property
    def is_held(self) -> bool:
        """Whether nobody is let through now."""
        return self._num_permits == 0

    def hold(self, num_permits: int = 0) -> None:
        """From now on let only so many more calls through."""
        with self._change:
            self._num_permits = num_permits
            self._change.notify_all()

    def open(self) -> None:
        """Let all through."""
        with self._change:
            self._num_permits = None
            self._change.notify_all()

    def pass_through(self) -> None:
        """Arrive, and wait to be let through."""
        with self._change:
            self.num_arrived += 1
            self._board.post_from_thread()
            if not self._change.wait_for(lambda: self._num_permits != 0, WAIT_SECONDS):
                raise HarnessError("a gate was held to the deadline")
            if self._num_permits is not None:
                self._num_permits -= 1

    async def arrived(self, num_calls: int) -> None:
        """Wait until so many calls have arrived in all."""
        await self._board.wait_for(f"{num_calls} calls", lambda: self.num_arrived >= num_calls)
