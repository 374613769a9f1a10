"""What goes wrong with stored bytes: logged once in a while, however often it happens."""

import threading
import time
from collections.abc import Callable

import structlog

QUIET_SECONDS = 30.0
"""How long one kind of trouble is silent after it was logged."""


class Troubles:
    """Logs each kind of trouble when it begins, and then how often it came since."""

    def __init__(self, store: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = structlog.get_logger()
        self._store = store
        self._clock = clock
        self._mutex = threading.Lock()
        self._logged_at: dict[str, float] = {}
        self._num_silent: dict[str, int] = {}

    def note(self, kind: str, **facts: str | int) -> None:
        """Log one more of its kind, unless that was done a moment ago."""
        now = self._clock()
        with self._mutex:
            last = self._logged_at.get(kind)
            if last is not None and now - last < QUIET_SECONDS:
                self._num_silent[kind] = self._num_silent.get(kind, 0) + 1
                return
            self._logged_at[kind] = now
            num_silent = self._num_silent.pop(kind, 0)
        self._log.warning(
            "store_trouble", store=self._store, kind=kind, num_unlogged=num_silent, **facts
        )
