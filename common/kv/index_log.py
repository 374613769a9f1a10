"""Which prefix hashes became findable or were forgotten since somebody asked last.

Costs one test a change until the first ``take``, and again after more than ``max_changes`` changes
that nobody took: then the next take is a snapshot of all that is findable.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_CHANGES = 65536


@dataclass(frozen=True, slots=True)
class IndexChanges:
    """Hashes of 16 bytes each, joined. A snapshot replaces all that was told before.

    Elsewhere no hash is both in ``added`` and in ``removed``, and their order means nothing.
    """

    added: bytes
    removed: bytes
    is_snapshot: bool

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it. An empty snapshot still says that nothing is findable."""
        return not self.added and not self.removed


class IndexLog:
    """The net changes since the last ``take``."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        self._is_following = False
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()

    def add(self, digest: bytes) -> None:
        """A hash became findable."""
        if self._is_following:
            self._note(digest, self._added, self._removed)

    def remove(self, digest: bytes) -> None:
        """A hash was forgotten."""
        if self._is_following:
            self._note(digest, self._removed, self._added)

    def lose(self) -> None:
        """Too much changed to tell what: the next take is a snapshot."""
        self._is_following = False
        self._added.clear()
        self._removed.clear()

    def take(self, findable: Iterable[bytes]) -> IndexChanges:
        """Return what changed, or all of ``findable`` when that is not known."""
        if not self._is_following:
            self._is_following = True
            return IndexChanges(b"".join(findable), b"", is_snapshot=True)
        changes = IndexChanges(b"".join(self._added), b"".join(self._removed), is_snapshot=False)
        self._added.clear()
        self._removed.clear()
        return changes

    def _note(self, digest: bytes, same: set[bytes], opposite: set[bytes]) -> None:
        if digest in opposite:
            opposite.discard(digest)
            return
        same.add(digest)
        if len(self._added) + len(self._removed) > self._max_changes:
            self.lose()
