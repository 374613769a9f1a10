"""The controller's own time: it stands still while the controller does.

Theory of operation
-------------------
All timers of the core tell how long somebody else was silent, late or busy. A controller that was
stopped (SIGSTOP, a suspended host, a long garbage collection) heard nobody meanwhile, and what they
said is still in its sockets when it wakes. So time that it did not run is nobody's silence: between
two events, which ticks keep close together, at most ``MAX_STEP_SECONDS`` pass. Peers, look-ups,
waits for room and cool-downs are all judged by this time, and have as much of their limit left
after the pause as they had before it.
"""

from services.controller.limits import ControllerLimits

MAX_STEP_SECONDS = 0.5
"""What may pass between two events, several ticks; a third of ``death_seconds`` if that is less."""


class OwnTime:
    """Follows the clock, but for the times in which no event came though ticks were due."""

    def __init__(self, limits: ControllerLimits, now: float) -> None:
        self.max_step_seconds = min(MAX_STEP_SECONDS, limits.death_seconds / 3)
        self._seen_at = now
        self._stood_seconds = 0.0

    def take(self, now: float) -> float:
        """Note that an event comes ``now``; returns for how long we stood still before it."""
        stood = max(0.0, now - self._seen_at - self.max_step_seconds)
        self._stood_seconds += stood
        self._seen_at = now
        return stood

    def at(self, now: float) -> float:
        """Return what the own time is at a time of the clock; without pauses they are the same."""
        unseen = max(0.0, now - self._seen_at - self.max_step_seconds)
        return now - self._stood_seconds - unseen
