"""What one process knows of the blocks in a store's folder.

Theory of operation
-------------------
The index is a hint: the folder is the truth, and others change it at any time. A block that is
looked up and unknown is looked for on the disk, where one name says whether it is there; a block
that turns out to be gone is forgotten. ``refresh`` brings the whole index up to date: it lists the
folders that changed since they were last listed. A folder's time of change has the granularity of
the system's clock, so one that changed moments before it was listed is listed again.

Times of use are kept in memory, and now and then on the file itself, so that they survive a restart
and other processes know them.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from common.storage.folder import SHARD_KEY_BYTES, StoreFolder, block_path, parse_block
from common.storage.tree import BlockTree, Key

SAVE_LAG_NS = 60 * 10**9
"""How long others may not know of a use."""

_SETTLED_NS = 2 * 10**9


class FolderIndex:
    """The tree of all blocks in the folder, of every identity; safe with several threads."""

    def __init__(self, folder: StoreFolder, clock: Callable[[], int] = time.time_ns) -> None:
        self._folder = folder
        self._clock = clock
        self._mutex = threading.Lock()
        self._tree = BlockTree()
        self._keys: defaultdict[bytes, set[Key]] = defaultdict(set)  # the tree's, by their folder
        # When each listed folder was last changed, None where that may not have been the last time;
        # of the one thread that refreshes.
        self._listings: dict[str, int | None] = {}

    def totals(self) -> tuple[int, int]:
        """Return how many blocks are known, and their bytes."""
        with self._mutex:
            return len(self._tree), self._tree.num_bytes

    def is_known(self, key: Key) -> bool:
        """Tell whether the block is known, without a look at the disk."""
        with self._mutex:
            return key in self._tree

    def find(self, key: Key, parent: Key | None) -> bool:
        """Tell whether the block is stored, asking the disk where it is unknown. OSError."""
        if self.is_known(key):
            return True
        found = self._folder.regular_stat(block_path(key, parent))
        if found is None:
            return False
        self._add(key, parent, found.st_size, found.st_mtime_ns)
        return True

    def path_of(self, key: Key) -> str | None:
        """Return where a known block lies; None for an unknown one."""
        with self._mutex:
            return block_path(key, self._tree.parent(key)) if key in self._tree else None

    def add(self, key: Key, parent: Key | None, num_bytes: int) -> None:
        """Add a block that is stored now."""
        self._add(key, parent, num_bytes, self._clock())

    def forget(self, key: Key) -> None:
        """Forget a block that is gone."""
        with self._mutex:
            self._tree.remove(key)
            self._keys[key[:SHARD_KEY_BYTES]].discard(key)

    def use(self, keys: Sequence[Key]) -> list[Key]:
        """Take note that successive blocks were used; return those whose files should say so.

        The last comes first, so that none seems older than what hangs from it.
        """
        now = self._clock()
        with self._mutex:
            for key in reversed(keys):
                self._tree.touch(key, now)
            unsaved = [key for key in reversed(keys) if self._tree.is_unsaved(key, SAVE_LAG_NS)]
            for key in unsaved:
                self._tree.mark_saved(key)
        return unsaved

    def ancestors(self, keys: Sequence[Key]) -> set[Key]:
        """Return the known blocks of all prefixes that end with ``keys``, as used just now."""
        now = self._clock()
        found: set[Key] = set()
        with self._mutex:
            for key in keys:
                at: Key | None = key
                while at is not None and at in self._tree and at not in found:
                    found.add(at)
                    at = self._tree.parent(at)
            for key in found:
                self._tree.touch(key, now)
        return found

    def save_use(self, key: Key) -> None:
        """Write a block's last use to its file, for others and for after a restart."""
        with self._mutex:
            used_ns = self._tree.used_ns(key)
            path = block_path(key, self._tree.parent(key))
        if used_ns is not None:
            self._folder.set_time(path, used_ns)

    def oldest(self) -> tuple[Key, str] | None:
        """Return the block to give up next and its path: a leaf, as far as anybody knows. OSError.

        Uses that other processes noted on the files count.
        """
        while True:
            with self._mutex:
                key = self._tree.oldest_leaf()
                if key is None:
                    return None
                path = block_path(key, self._tree.parent(key))
                used_ns = self._tree.used_ns(key) or 0
            found = self._folder.stat(path)
            if found is None:
                self.forget(key)
            elif found.st_mtime_ns > used_ns:
                with self._mutex:
                    self._tree.touch(key, found.st_mtime_ns)
            else:
                return key, path

    def refresh(self) -> None:
        """Bring everything up to date with the folder; one thread at a time. OSError.

        Exact when the caller holds the folder's lock: then no block is named meanwhile.
        """
        present = set(self._folder.shards())
        for path in self._listings.keys() - present:
            del self._listings[path]
            self._keep_only(path, {})
        for path in present:
            self._refresh_shard(path)

    def _refresh_shard(self, path: str) -> None:
        found = self._folder.stat(path)
        changed_ns = 0 if found is None else found.st_mtime_ns
        if self._listings.get(path) == changed_ns:
            return
        is_settled = abs(time.time_ns() - changed_ns) > _SETTLED_NS
        listed: dict[Key, tuple[str, Key | None]] = {}
        for name in self._folder.names(path):
            parsed = parse_block(path, name)
            if parsed is not None:
                listed[parsed[0]] = (name, parsed[1])
        for key in self._keep_only(path, listed):
            name, parent = listed[key]
            file = self._folder.regular_stat(f"{path}/{name}")
            if file is not None:
                self._add(key, parent, file.st_size, file.st_mtime_ns)
        self._listings[path] = changed_ns if is_settled else None

    def _keep_only(self, path: str, listed: Mapping[Key, object]) -> list[Key]:
        """Forget a folder's blocks that are not listed, and return the listed unknown ones."""
        with self._mutex:
            known = self._keys[bytes.fromhex(path.replace("/", ""))]
            for key in known - listed.keys():
                self._tree.remove(key)
            known.intersection_update(listed)
            return [key for key in listed if key not in known]

    def _add(self, key: Key, parent: Key | None, num_bytes: int, used_ns: int) -> None:
        with self._mutex:
            self._tree.add(key, parent, num_bytes, used_ns)
            self._keys[key[:SHARD_KEY_BYTES]].add(key)
