"""How often those who are no members are told so: once in a while, whatever they send. Pure."""

from collections import OrderedDict

from services.controller.effects import PeerKey

TELL_AGAIN_SECONDS = 1.0
"""A burst of queued messages has one answer; one that was lost is sent again."""
LOG_AGAIN_SECONDS = 60.0
"""A hello that is refused again and again is answered each time and logged so often."""
MAX_TOLD_KEPT = 4096


class Strangers:
    """When each incarnation that is no member was told so last."""

    def __init__(self, again_seconds: float) -> None:
        self._again_seconds = again_seconds
        self._told_at: OrderedDict[PeerKey, float] = OrderedDict()

    def note_if_due(self, key: PeerKey, now: float) -> bool:
        """Whether to tell this one now; then it is noted as told."""
        while self._told_at:
            oldest = next(iter(self._told_at))
            if now - self._told_at[oldest] < self._again_seconds:
                break
            del self._told_at[oldest]
        if key in self._told_at:
            return False
        self._told_at[key] = now
        if len(self._told_at) > MAX_TOLD_KEPT:
            self._told_at.popitem(last=False)
        return True
