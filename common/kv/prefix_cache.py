"""Which computed blocks can be found by their tokens, and in which order they are evicted.

Theory of operation
-------------------
A full block's hash is ``blake2b(hash of the block before, its token ids)``, begun from the pool's
salt, so that one hash names a whole prefix. ``find`` walks a prompt's hashes from the front and
stops at the first unknown one.

Indexed blocks that nobody holds wait in ``_evictable``, least recently used first. An owner that
lets go of its blocks does so from its last block to its first and renews every hash on its way,
also where its own block is a duplicate of the indexed one. Hence in that order each block stands
before its ancestors: whole tails go first, and eviction never cuts a chain in the middle. The one
exception is a chain whose later blocks are held by a duplicate's owner: they stay, cannot be found,
and are freed with that owner.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import InvariantViolationError, LocalProtocolError
from common.kv.index_log import IndexChanges, IndexLog

TokenIds = Sequence[int] | NDArray[np.integer]

HASH_BYTES = 16


def _token_bytes(token_ids: TokenIds) -> bytes:
    """Return the ids as int32; an id beyond that raises OverflowError or ValueError."""
    if isinstance(token_ids, np.ndarray):
        return np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
    return array("i", token_ids).tobytes()


class PrefixCache:
    """Index of computed blocks by prefix hash. Counts no references: its owner does."""

    def __init__(self, block_size: int, salt: str) -> None:
        self._block_size = block_size
        self._root = hashlib.blake2b(
            f"{block_size}:{salt}".encode(), digest_size=HASH_BYTES, person=b"flowpath-kv"
        ).digest()
        self._block_of: dict[bytes, int] = {}
        # Each indexed block's own hash, and that of the block before it.
        self._hashes_of: dict[int, tuple[bytes, bytes]] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._log = IndexLog()

    @property
    def num_evictable(self) -> int:
        """Indexed blocks that nobody holds."""
        return len(self._evictable)

    def chain(self, previous: bytes | None, token_ids: TokenIds) -> Iterator[bytes]:
        """Yield the hash of each full block of ``token_ids``, which follow hash ``previous``.

        None starts a prompt.
        """
        stride = self._block_size * 4
        data = _token_bytes(token_ids)
        current = self._root if previous is None else previous
        for start in range(0, len(data) - stride + 1, stride):
            current = hashlib.blake2b(
                current + data[start : start + stride], digest_size=HASH_BYTES
            ).digest()
            yield current

    def find(self, token_ids: TokenIds, max_blocks: int) -> tuple[list[int], list[bytes]]:
        """Return blocks and hashes of the longest indexed prefix of at most ``max_blocks``."""
        blocks: list[int] = []
        hashes: list[bytes] = []
        if max_blocks < 1 or not self._block_of:
            return blocks, hashes
        for digest in self.chain(None, token_ids[: max_blocks * self._block_size]):
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
            hashes.append(digest)
        return blocks, hashes

    def add(self, block: int, digest: bytes, previous: bytes | None) -> None:
        """Index a held block, unless its hash has a block already."""
        known = self._hashes_of.get(block)
        if known is not None:
            if known[0] != digest:
                raise LocalProtocolError(f"block {block} was published with other tokens before")
            return
        if digest in self._block_of:
            return
        self._block_of[digest] = block
        self._log.add(digest)
        self._hashes_of[block] = (digest, self._root if previous is None else previous)

    def evictable(self) -> list[int]:
        """Return the indexed blocks that nobody holds, in the order of eviction."""
        return list(self._evictable)

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Index evictable blocks under other numbers, in their places in the order of eviction."""
        for source, target in moves.items():
            hashes = self._hashes_of.pop(source)
            self._hashes_of[target] = hashes
            self._block_of[hashes[0]] = target
        self._evictable = OrderedDict((moves.get(block, block), None) for block in self._evictable)

    def is_evictable(self, block: int) -> bool:
        """Tell whether the block is indexed and held by nobody."""
        return block in self._evictable

    def block_of(self, digest: bytes) -> int | None:
        """Return the block that the hash leads to."""
        return self._block_of.get(digest)

    def num_reachable(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading hashes are indexed: those that ``find`` would reach."""
        for index, digest in enumerate(hashes):
            if digest not in self._block_of:
                return index
        return len(hashes)

    def ancestors(self, previous: bytes | None) -> list[int] | None:
        """Return the blocks up to and with that of hash ``previous``, the last one first.

        ``previous`` is None before the first block. None where one of them is indexed no more.
        """
        blocks: list[int] = []
        current = self._root if previous is None else previous
        while current != self._root:
            block = self._block_of.get(current)
            if block is None:
                return None
            blocks.append(block)
            current = self._hashes_of[block][1]
        return blocks

    def retain(self, block: int) -> None:
        """Keep the block from eviction: somebody holds it. Does nothing for a held block."""
        self._evictable.pop(block, None)

    def let_go(self, block: int) -> None:
        """Make an indexed block evictable, as the most recently used one."""
        self._evictable[block] = None

    def renew(self, block: int) -> None:
        """Make an evictable block the most recently used one. Does nothing for a held block."""
        if block in self._evictable:
            self._evictable.move_to_end(block)

    def evict(self) -> int:
        """Forget the least recently used evictable block and return it."""
        block, _ = self._evictable.popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: int) -> None:
        """Take a block that is not evictable out of the index; no effect where it is not in."""
        hashes = self._hashes_of.pop(block, None)
        if hashes is not None:
            del self._block_of[hashes[0]]
            self._log.remove(hashes[0])

    def clear(self) -> list[int]:
        """Forget everything and return the blocks that were evictable."""
        blocks = list(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._hashes_of.clear()
        self._log.lose()
        return blocks

    def take_changes(self, *, is_snapshot: bool) -> IndexChanges:
        """Return which hashes were indexed and forgotten since the last call, or all of them."""
        if is_snapshot:
            self._log.lose()
        return self._log.take(self._block_of)

    def validate(self, is_held: Callable[[int], bool]) -> None:
        """Raise InvariantViolationError where index, order of eviction and holders disagree."""
        if len(self._block_of) != len(self._hashes_of):
            raise InvariantViolationError(
                f"prefix cache: {len(self._block_of)} hashes, {len(self._hashes_of)} blocks"
            )
        place = {block: index for index, block in enumerate(self._evictable)}
        for block, (digest, previous) in self._hashes_of.items():
            if self._block_of.get(digest) != block:
                raise InvariantViolationError(f"prefix cache: block {block} has no hash")
            if is_held(block) == (block in place):
                raise InvariantViolationError(f"prefix cache: block {block} is held and evictable")
            if block not in place or previous == self._root:
                continue
            parent = self._block_of.get(previous)
            if parent is None or place.get(parent, len(place)) < place[block]:
                raise InvariantViolationError(
                    f"prefix cache: block {block} would outlive block {parent} before it"
                )
        if not place.keys() <= self._hashes_of.keys():
            raise InvariantViolationError("prefix cache: an evictable block is not indexed")
