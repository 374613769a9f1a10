"""Watching processes of this host by their ids."""

from collections.abc import Iterable
from pathlib import Path

_START_FIELD = 19
"""Place of the start time behind the command's closing bracket in /proc/<pid>/stat."""


class ProcessWatch:
    """Tells which of the asked processes do not run; a reused id counts as gone."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._started: dict[int, str] = {}

    def gone_of(self, pids: Iterable[int]) -> frozenset[int]:
        """Return those of ``pids`` that do not run any more: gone, zombie, or somebody else."""
        asked = frozenset(pids)
        gone = frozenset(pid for pid in asked if not self._runs(pid))
        kept = asked - gone
        self._started = {pid: start for pid, start in self._started.items() if pid in kept}
        return gone

    def _runs(self, pid: int) -> bool:
        try:
            stat = (self._proc / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            return False
        fields = stat.rpartition(")")[2].split()
        if len(fields) <= _START_FIELD or fields[0] in ("Z", "X"):
            return False
        return self._started.setdefault(pid, fields[_START_FIELD]) == fields[_START_FIELD]
