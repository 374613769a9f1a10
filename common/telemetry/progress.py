"""How a program tells whoever started it how far its start is."""

import sys
from time import monotonic

import structlog

log = structlog.get_logger()

PROGRESS = "progress: "
"""What such a line on standard error begins with."""

SECONDS_BETWEEN = 1.0


class Progress:
    """Takes lines; those that come too soon after another one only go to the log."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def __call__(self, line: str) -> None:
        """Tell one step."""
        log.info("progress", detail=line)
        now = monotonic()
        if now >= self._next_at:
            self._next_at = now + SECONDS_BETWEEN
            sys.stderr.write(f"{PROGRESS}{line}\n")
            sys.stderr.flush()
