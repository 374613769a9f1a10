"""Which blocks are stored, and which of them goes next: the trie of prefix hashes.

Theory of operation
-------------------
A node is one Full Block, its parent the block before it. A block's hash names its whole prefix, so
the trie needs no edges to walk: a prefix is followed by looking its hashes up one by one.

Only leaves are given up, the least recently used first, so whole tails go before what they hang
from. A block whose parent is missing (somebody deleted a file) is a root of its own until the
parent comes back; then it hangs from it again.

``_oldest`` is a heap of (last use, key) with an entry for every leaf, and stale ones between them:
an entry counts only while its block is a leaf and was not used since.
"""

import heapq
from dataclasses import dataclass

from common.errors import InvariantViolationError

Key = bytes


@dataclass(slots=True)
class _Node:
    parent: Key | None
    num_bytes: int
    used_ns: int
    saved_ns: int


class BlockTree:
    """Pure: times are arguments, in nanoseconds since 1970."""

    def __init__(self) -> None:
        self._nodes: dict[Key, _Node] = {}
        # How many present children a block has, also a missing one.
        self._num_children: dict[Key, int] = {}
        self._oldest: list[tuple[int, Key]] = []
        self.num_bytes = 0
        """Of all blocks together."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def add(self, key: Key, parent: Key | None, num_bytes: int, used_ns: int) -> None:
        """Add a block that is stored since, or was last used at, ``used_ns``.

        A known one is touched.
        """
        if key in self._nodes:
            self.touch(key, used_ns)
            return
        self._nodes[key] = _Node(parent, num_bytes, used_ns, used_ns)
        self.num_bytes += num_bytes
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._push_leaf(key)

    def touch(self, key: Key, used_ns: int) -> None:
        """Make a use known; an older one than the last, and an unknown block, change nothing."""
        node = self._nodes.get(key)
        if node is not None and node.used_ns < used_ns:
            node.used_ns = used_ns
            self._push_leaf(key)

    def is_unsaved(self, key: Key, lag_ns: int) -> bool:
        """Tell whether the last use is known here for ``lag_ns`` longer than to others."""
        node = self._nodes.get(key)
        return node is not None and node.used_ns - node.saved_ns > lag_ns

    def mark_saved(self, key: Key) -> None:
        """Take note that the last use is known to others."""
        node = self._nodes.get(key)
        if node is not None:
            node.saved_ns = node.used_ns

    def remove(self, key: Key) -> None:
        """Forget a block; nothing changes for an unknown one."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        self.num_bytes -= node.num_bytes
        parent = node.parent
        if parent is None:
            return
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            self._push_leaf(parent)

    def used_ns(self, key: Key) -> int | None:
        """Return when the block was last used; None for an unknown one."""
        node = self._nodes.get(key)
        return None if node is None else node.used_ns

    def parent(self, key: Key) -> Key | None:
        """Return the key of the block before; None for a first or an unknown one."""
        node = self._nodes.get(key)
        return None if node is None else node.parent

    def oldest_leaf(self) -> Key | None:
        """Return the least recently used block without children; None in an empty tree."""
        while self._oldest:
            used_ns, key = self._oldest[0]
            if self._is_current(used_ns, key):
                return key
            heapq.heappop(self._oldest)
        return None

    def validate(self) -> None:
        """Raise InvariantViolationError where sums, children or the order disagree."""
        total = sum(node.num_bytes for node in self._nodes.values())
        if total != self.num_bytes:
            raise InvariantViolationError(f"block tree: {self.num_bytes} bytes are {total}")
        children: dict[Key, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                children[node.parent] = children.get(node.parent, 0) + 1
        if children != self._num_children:
            raise InvariantViolationError("block tree: children are miscounted")
        leaves = {key for key in self._nodes if key not in children}
        listed = {key for used_ns, key in self._oldest if self._is_current(used_ns, key)}
        if leaves != listed:
            raise InvariantViolationError("block tree: a leaf could not be evicted")

    def _is_current(self, used_ns: int, key: Key) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.used_ns == used_ns and key not in self._num_children

    def _push_leaf(self, key: Key) -> None:
        node = self._nodes.get(key)
        if node is None or key in self._num_children:
            return
        heapq.heappush(self._oldest, (node.used_ns, key))
        if len(self._oldest) > 2 * len(self._nodes) + 64:
            self._oldest = [
                (node.used_ns, key)
                for key, node in self._nodes.items()
                if key not in self._num_children
            ]
            heapq.heapify(self._oldest)
