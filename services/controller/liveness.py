"""When a silent process is suspect, and when it is dead."""

from enum import Enum

from services.controller.limits import ControllerLimits


class Life(Enum):
    """What silence and process id tell; the value is the reason."""

    ALIVE = ""
    SUSPECT = "silent, but its process runs"
    GONE = "its process is gone"
    SILENT = "no heartbeat"

    @property
    def is_dead(self) -> bool:
        """Whether it is taken for dead."""
        return self in (Life.GONE, Life.SILENT)

    @property
    def reason(self) -> str:
        """The reason in words."""
        return self.value


def life_of(
    silent_seconds: float, limits: ControllerLimits, *, is_local: bool, is_gone: bool
) -> Life:
    """Judge one process.

    ``is_gone`` says that a local process does not run. A local one that runs and is silent (a
    long step, a stopped process) is only suspect until ``suspect_factor`` death periods are over.
    """
    if is_gone:
        return Life.GONE
    if silent_seconds <= limits.death_seconds:
        return Life.ALIVE
    if is_local and silent_seconds <= limits.suspect_factor * limits.death_seconds:
        return Life.SUSPECT
    return Life.SILENT
