"""Tokens of requests that nobody here asked for: when to have their decodes ended. Pure.

A gateway that died together with its controller leaves decodes behind which nobody else knows of,
and their tokens come to its successor. Tokens of a request that has just ended are no such news:
what was under way comes for a moment.
"""

from collections import OrderedDict

from common.ids import RequestId

QUIET_SECONDS = 2.0
"""How long tokens may come after an end, or after a cancel, before one is due."""
MAX_KEPT = 8192
"""Ids that are remembered. One too many costs a cancel that changes nothing."""


class Strays:
    """When each request ended, or was cancelled as a stray, last."""

    def __init__(self) -> None:
        self._noted_at: OrderedDict[RequestId, float] = OrderedDict()  # the oldest first

    def note(self, request_id: RequestId, now: float) -> None:
        """Note that a request has ended, or was cancelled."""
        self._noted_at[request_id] = now
        self._noted_at.move_to_end(request_id)
        while self._noted_at:
            oldest = next(iter(self._noted_at))
            is_over = now - self._noted_at[oldest] > QUIET_SECONDS
            if not is_over and len(self._noted_at) <= MAX_KEPT:
                break
            del self._noted_at[oldest]

    def is_due(self, request_id: RequestId, now: float) -> bool:
        """Whether a request that nobody here has, and whose tokens come, is to be cancelled now."""
        noted_at = self._noted_at.get(request_id)
        return noted_at is None or now - noted_at > QUIET_SECONDS
