"""Who owns each block of a KV pool: requests, transfers, the prefix cache, or nobody.

Theory of operation
-------------------
An owner is a name with a table of blocks and a hold. Several owners may share a block. A block
counts once, by the strongest claim on it::

    in transfer   an owner with a TRANSFER hold has it (reserved, being written, or draining)
    referenced    owners with a REQUEST hold alone have it
    cached        nobody has it, and its tokens can be found (prefix_cache.py)
    free          the segment allocator has it

``acquire`` and ``fork`` make owners, ``grow`` extends them, ``publish`` makes computed blocks
findable, ``release`` ends them. Every operation is all or nothing. The code is pure: block ids in,
block ids out; nobody's bytes are touched.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from flowpath_native import SegmentAllocator

from common.errors import InvariantViolationError, LocalProtocolError
from common.kv.compaction import Move, plan_moves
from common.kv.index_log import IndexChanges
from common.kv.journal import AllocOp, AllocOpKind
from common.kv.prefix_cache import PrefixCache, TokenIds
from common.kv.runs import Run, contiguous_ratio, to_blocks, to_runs
from common.messages.fields import KVCounts


class Hold(StrEnum):
    """Why an owner has its blocks."""

    REQUEST = "request"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class Acquired:
    """An owner's blocks in order; those of ``num_cached_tokens`` hold this prefix already."""

    block_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PublishedBlocks:
    """Successive blocks that ``owner`` holds, with their hashes, and all those ``before`` them."""

    owner: str
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    before: tuple[bytes, ...]

    @property
    def previous(self) -> bytes | None:
        """The hash before the first block; None where that begins the prompt."""
        return self.before[-1] if self.before else None


@dataclass(slots=True)
class _Table:
    hold: Hold
    blocks: list[int]
    hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the leading blocks that are published."""
    previous: bytes | None = None
    """The hash before the first block; None where that begins the prompt."""


class BlockManager:
    """Hands out blocks of one pool in few runs, shares and caches them. Not thread-safe.

    ``min_remainder_blocks`` is the shortest free piece worth leaving behind (SEGMENT_MIN_SIZE in
    blocks). ``salt`` keeps prefixes of other models or tenants apart. ``journal`` is told every
    operation that changes a table or the free memory.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        min_remainder_blocks: int,
        salt: str,
        journal: Callable[[AllocOp], None] | None = None,
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._allocator = SegmentAllocator(num_blocks, min_remainder_blocks)
        self._cache = PrefixCache(block_size, salt)
        self._tables: dict[str, _Table] = {}
        self._num_holders = [0] * num_blocks
        self._num_transfers = [0] * num_blocks
        self._num_in_transfer = 0
        self._journal = journal
        if journal is not None:
            journal(self._describe(AllocOpKind.OPEN, "", [], []))

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Tell whether an empty pool has room for ``num_tokens`` tokens."""
        return self._num_blocks_for(num_tokens) <= self._num_blocks

    def match(self, token_ids: TokenIds, max_cached_tokens: int) -> int:
        """Return how many leading tokens ``acquire`` would find cached. Changes nothing."""
        blocks, _ = self._cache.find(
            token_ids, self._max_cached_blocks(token_ids, max_cached_tokens)
        )
        return len(blocks) * self._block_size

    def can_acquire(
        self, token_ids: TokenIds, *, max_cached_tokens: int, capacity_tokens: int
    ) -> bool:
        """Tell whether ``acquire`` would find room now."""
        shared, _ = self._cache.find(
            token_ids, self._max_cached_blocks(token_ids, max_cached_tokens)
        )
        num_tokens = max(len(token_ids), capacity_tokens)
        num_new = self._num_blocks_for(num_tokens) - len(shared)
        return num_new <= self._num_obtainable(excluding=shared)

    def acquire(
        self,
        owner: str,
        token_ids: TokenIds,
        *,
        hold: Hold,
        max_cached_tokens: int,
        capacity_tokens: int | None = None,
    ) -> Acquired | None:
        """Give ``owner`` blocks for max(len(token_ids), capacity_tokens) tokens.

        The longest known prefix of at most ``max_cached_tokens`` is shared, in whole blocks; the
        rest is new, in as few runs as possible and right after the last shared block if it can be.
        Cached blocks that nobody holds are evicted as needed, and up to half as many as are new
        beyond that where it joins free memory. None: no room, nothing changed. A
        second acquire of a live owner, or one of no tokens at all, raises LocalProtocolError.
        """
        if owner in self._tables:
            raise LocalProtocolError(f"{owner} holds blocks already")
        num_tokens = max(len(token_ids), capacity_tokens or 0)
        if num_tokens < 1:
            raise LocalProtocolError(f"{owner} asks for no tokens")
        shared, hashes = self._cache.find(
            token_ids, self._max_cached_blocks(token_ids, max_cached_tokens)
        )
        num_new = self._num_blocks_for(num_tokens) - len(shared)
        if num_new > self._num_obtainable(excluding=shared):
            return None
        table = _Table(hold, [], hashes)
        self._tables[owner] = table
        self._add_holder(table, shared)
        runs = self._take(table, num_new)
        self._log(AllocOpKind.ACQUIRE, owner, runs, shared)
        return Acquired(tuple(table.blocks), len(shared) * self._block_size)

    def hold_prefix(self, owner: str, token_ids: TokenIds) -> int:
        """Let ``owner`` hold the longest known prefix, with a TRANSFER hold and no other block.

        Returns its length in tokens. 0: nothing is known of it, and ``owner`` holds nothing. A
        live owner raises LocalProtocolError.
        """
        if owner in self._tables:
            raise LocalProtocolError(f"{owner} holds blocks already")
        shared, hashes = self._cache.find(token_ids, len(token_ids) // self._block_size)
        if not shared:
            return 0
        table = _Table(Hold.TRANSFER, [], hashes)
        self._tables[owner] = table
        self._add_holder(table, shared)
        self._log(AllocOpKind.ACQUIRE, owner, [], shared)
        return len(shared) * self._block_size

    def hold_published(self, owner: str, parent: str, first: int) -> PublishedBlocks:
        """Let ``owner`` hold the parent's published blocks from number ``first`` on.

        It has a TRANSFER hold on them, and on none before. LocalProtocolError where ``owner`` is
        live, or the parent, which holds a prompt from its beginning, has not published so many.
        """
        source = self._table(parent)
        hashes = source.hashes[first:]
        if not hashes or source.previous is not None:
            raise LocalProtocolError(f"{parent} has not published block {first}")
        blocks = source.blocks[first : first + len(hashes)]
        return self._hold_part(owner, blocks, hashes, source.hashes[:first])

    def hold_found(
        self, owner: str, hashes: Sequence[bytes], before: Sequence[bytes]
    ) -> PublishedBlocks | None:
        """Let ``owner`` hold the blocks of successive hashes, which come after those ``before``.

        It has a TRANSFER hold on them. None: one of them cannot be found, and nothing changed.
        """
        found = [self._cache.block_of(digest) for digest in hashes]
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(found) or not blocks:
            return None
        return self._hold_part(owner, blocks, hashes, before)

    def _hold_part(
        self, owner: str, blocks: list[int], hashes: Sequence[bytes], before: Sequence[bytes]
    ) -> PublishedBlocks:
        if owner in self._tables:
            raise LocalProtocolError(f"{owner} holds blocks already")
        held = PublishedBlocks(owner, tuple(blocks), tuple(hashes), tuple(before))
        table = _Table(Hold.TRANSFER, [], list(hashes), held.previous)
        self._tables[owner] = table
        self._add_holder(table, blocks)
        self._log(AllocOpKind.ACQUIRE, owner, [], blocks)
        return held

    def prefix_hashes(self, token_ids: TokenIds) -> list[bytes]:
        """Return the hashes of the whole blocks of ``token_ids``, which begin a prompt."""
        return list(self._cache.chain(None, token_ids))

    def grow(self, owner: str, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens in all, in place at the tail where possible.

        False: no room, nothing changed.
        """
        table = self._table(owner)
        num_new = self._num_blocks_for(num_tokens) - len(table.blocks)
        if num_new <= 0:
            return True
        if num_new > self._num_obtainable():
            return False
        self._log(AllocOpKind.GROW, owner, self._take(table, num_new), [])
        return True

    def fork(self, parent: str, child: str, num_tokens: int) -> tuple[tuple[int, int], ...] | None:
        """Make ``child`` hold the parent's first ``num_tokens`` tokens, under the parent's hold.

        Full blocks are shared. A partial last block gets a block of its own, returned as a
        (source block, target block) copy to make before the child is used. None: no room, nothing
        changed.
        """
        source = self._table(parent)
        if child in self._tables:
            raise LocalProtocolError(f"{child} holds blocks already")
        if not 0 < num_tokens <= len(source.blocks) * self._block_size:
            raise LocalProtocolError(f"{parent} does not hold {num_tokens} tokens to fork")
        num_full, num_partial = divmod(num_tokens, self._block_size)
        num_new = 1 if num_partial else 0
        if num_new > self._num_obtainable():
            return None
        shared = source.blocks[:num_full]
        table = _Table(source.hold, [], source.hashes[:num_full])
        self._tables[child] = table
        self._add_holder(table, shared)
        runs = self._take(table, num_new)
        self._log(AllocOpKind.FORK, child, runs, shared)
        return tuple((source.blocks[num_full], target) for target in to_blocks(runs))

    def publish(self, owner: str, token_ids: TokenIds) -> None:
        """Make the full blocks of ``token_ids`` findable: the owner's first tokens, computed.

        Idempotent and incremental; the cost is that of the new blocks. A hash that leads to a
        block already keeps it, and this owner's own copy stays private.
        """
        table = self._table(owner)
        num_full = len(token_ids) // self._block_size
        first = len(table.hashes)
        self._refuse_unheld(owner, table, num_full)
        if num_full <= first:
            return
        previous = table.hashes[-1] if first else None
        new_ids = token_ids[first * self._block_size : num_full * self._block_size]
        self._publish(table, self._cache.chain(previous, new_ids))

    def publish_hashed(self, owner: str, hashes: Sequence[bytes]) -> None:
        """Publish the blocks of these hashes, which are the owner's first (see ``publish``)."""
        table = self._table(owner)
        self._refuse_unheld(owner, table, len(hashes))
        self._publish(table, hashes[len(table.hashes) :])

    def _refuse_unheld(self, owner: str, table: _Table, num_blocks: int) -> None:
        if num_blocks > len(table.blocks):
            raise LocalProtocolError(f"{owner} does not hold {num_blocks} blocks to publish")

    def _publish(self, table: _Table, new_hashes: Iterable[bytes]) -> None:
        """Publish the blocks after those that are published."""
        previous = table.hashes[-1] if table.hashes else None
        for digest in new_hashes:
            self._cache.add(table.blocks[len(table.hashes)], digest, previous)
            table.hashes.append(digest)
            previous = digest

    def set_hold(self, owner: str, hold: Hold) -> None:
        """Change why the owner has its blocks."""
        table = self._table(owner)
        if table.hold is hold:
            return
        for block in table.blocks:
            self._count_transfer(block, 1 if hold is Hold.TRANSFER else -1)
        table.hold = hold

    def release(self, owner: str) -> None:
        """End the owner.

        Of the blocks that nobody else holds, published ones stay cached and others are freed. An
        unknown owner raises LocalProtocolError.
        """
        table = self._table(owner)
        del self._tables[owner]
        ancestors = self._cache.ancestors(table.previous)
        num_reachable = 0 if ancestors is None else self._cache.num_reachable(table.hashes)
        unheld: list[int] = []
        # From the last block to the first: the order of eviction (prefix_cache.py).
        for index in reversed(range(len(table.blocks))):
            block = table.blocks[index]
            is_held = self._drop_holder(table, block)
            found = self._cache.block_of(table.hashes[index]) if index < num_reachable else None
            if found is not None and found != block:
                self._cache.renew(found)
            if is_held:
                continue
            if found == block:
                self._cache.let_go(block)
            else:
                self._cache.forget(block)
                unheld.append(block)
        for block in ancestors or ():
            self._cache.renew(block)
        self._log(AllocOpKind.RELEASE, owner, self._free(unheld), [])

    def is_held(self, owner: str) -> bool:
        """Tell whether the owner is live."""
        return owner in self._tables

    def block_ids(self, owner: str) -> tuple[int, ...]:
        """Return the owner's blocks in order."""
        return tuple(self._table(owner).blocks)

    def contiguous_ratio(self, owner: str) -> float:
        """Return the share of the owner's consecutive block pairs that are neighbours."""
        return contiguous_ratio(self._table(owner).blocks)

    def counts(self) -> KVCounts:
        """Count blocks by owner."""
        num_free = self._allocator.num_free
        num_cached = self._cache.num_evictable
        return KVCounts(
            total=self._num_blocks,
            free=num_free,
            referenced=self._num_blocks - num_free - num_cached - self._num_in_transfer,
            cached=num_cached,
            in_transfer=self._num_in_transfer,
            largest_free_run=self._allocator.largest_free,
        )

    def take_index_changes(self, *, is_snapshot: bool = False) -> IndexChanges:
        """Return which prefix hashes became findable or were forgotten since the last call.

        The first call, one with ``is_snapshot`` and one after too many changes return a snapshot.
        Applied to a set in order, all of them give the hashes that are findable.
        """
        return self._cache.take_changes(is_snapshot=is_snapshot)

    def free_runs(self) -> list[Run]:
        """Return the maximal free runs."""
        return list(self._allocator.free_segments())

    def plan_compaction(self, max_moves: int) -> list[Move]:
        """Return moves of cached blocks that nobody holds, after which the longest free run is
        longer (compaction.py). Changes nothing; it is for now alone."""
        return plan_moves(self.free_runs(), self._cache.evictable(), max_moves)

    def relocate(self, moves: Sequence[Move]) -> None:
        """Find cached blocks from now on where a plan of this moment moved their bytes."""
        if not moves:
            return
        targets = to_runs(target for _, target in moves)
        for start, length in targets:
            if self._allocator.allocate(length, start) != [(start, length)]:
                raise InvariantViolationError(f"blocks from {start} on are not free to move to")
        self._cache.relocate(dict(moves))
        runs = self._free([source for source, _ in moves])
        self._log(AllocOpKind.RELOCATE, "", runs, to_blocks(targets))

    def clear_cache(self) -> None:
        """Forget every prefix; what nobody holds is freed, what is held is freed on its release."""
        self._log(AllocOpKind.EVICT, "", self._free(self._cache.clear()), [])

    def validate(self) -> None:
        """Raise InvariantViolationError unless every block has exactly one place. O(blocks)."""
        try:
            self._allocator.check()
        except RuntimeError as error:
            raise InvariantViolationError(str(error)) from error
        num_holders = [0] * self._num_blocks
        num_transfers = [0] * self._num_blocks
        for owner, table in self._tables.items():
            if len(set(table.blocks)) != len(table.blocks):
                raise InvariantViolationError(f"{owner} has a block twice")
            for block in table.blocks:
                num_holders[block] += 1
                num_transfers[block] += table.hold is Hold.TRANSFER
        if num_holders != self._num_holders or num_transfers != self._num_transfers:
            raise InvariantViolationError("reference counts differ from the owners' tables")
        if sum(count > 0 for count in num_transfers) != self._num_in_transfer:
            raise InvariantViolationError("the number of blocks in transfer is wrong")
        self._cache.validate(lambda block: num_holders[block] > 0)
        is_free = [False] * self._num_blocks
        for block in to_blocks(self._allocator.free_segments()):
            is_free[block] = True
        for block in range(self._num_blocks):
            places = (num_holders[block] > 0, self._cache.is_evictable(block), is_free[block])
            if sum(places) != 1:
                raise InvariantViolationError(
                    f"block {block}: held {places[0]}, cached {places[1]}, free {places[2]}"
                )

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _max_cached_blocks(self, token_ids: TokenIds, max_cached_tokens: int) -> int:
        return min(len(token_ids), max_cached_tokens) // self._block_size

    def _table(self, owner: str) -> _Table:
        table = self._tables.get(owner)
        if table is None:
            raise LocalProtocolError(f"{owner} holds no blocks")
        return table

    def _num_obtainable(self, excluding: Iterable[int] = ()) -> int:
        """Blocks that are free or can be evicted, without those about to be shared."""
        num_excluded = sum(self._cache.is_evictable(block) for block in excluding)
        return self._allocator.num_free + self._cache.num_evictable - num_excluded

    def _add_holder(self, table: _Table, blocks: list[int]) -> None:
        for block in blocks:
            self._num_holders[block] += 1
            self._cache.retain(block)
            if table.hold is Hold.TRANSFER:
                self._count_transfer(block, 1)
        table.blocks.extend(blocks)

    def _drop_holder(self, table: _Table, block: int) -> bool:
        """Return whether others hold the block still."""
        self._num_holders[block] -= 1
        if table.hold is Hold.TRANSFER:
            self._count_transfer(block, -1)
        return self._num_holders[block] > 0

    def _count_transfer(self, block: int, change: int) -> None:
        before = self._num_transfers[block]
        self._num_transfers[block] = before + change
        self._num_in_transfer += (before + change > 0) - (before > 0)

    def _take(self, table: _Table, num_new: int) -> list[Run]:
        """Extend a table by blocks that ``_num_obtainable`` promised."""
        if num_new == 0:
            return []
        self._make_room(num_new)
        tail = table.blocks[-1] + 1 if table.blocks else None
        runs = self._allocator.allocate(num_new, tail)
        if runs is None:
            raise InvariantViolationError(f"{num_new} blocks were promised and are not free")
        self._add_holder(table, to_blocks(runs))
        return runs

    def _make_room(self, num_new: int) -> None:
        """Evict cached blocks, least recently used first, until ``num_new`` blocks are free.

        Then, while no free run holds them all, evict up to half as many more. With a cache that
        fills the pool, free memory would else be exactly the holes that eviction leaves, and every
        request would be cut into as many pieces (benchmarks/copies_per_transfer.py).
        """
        num_missing = max(0, num_new - self._allocator.num_free)
        evicted = [self._cache.evict() for _ in range(num_missing)]
        self._free(evicted)
        num_more = min((num_new + 1) // 2, self._cache.num_evictable)
        while num_more > 0 and self._allocator.largest_free < num_new:
            block = self._cache.evict()
            self._allocator.free([(block, 1)])
            evicted.append(block)
            num_more -= 1
        if evicted:
            self._log(AllocOpKind.EVICT, "", to_runs(sorted(evicted)), [])

    def _free(self, blocks: list[int]) -> list[Run]:
        runs = to_runs(sorted(blocks))
        self._allocator.free(runs)
        return runs

    def _log(self, kind: AllocOpKind, owner: str, runs: list[Run], shared: list[int]) -> None:
        if self._journal is not None:
            self._journal(self._describe(kind, owner, runs, shared))

    def _describe(
        self, kind: AllocOpKind, owner: str, runs: list[Run], shared: list[int]
    ) -> AllocOp:
        is_open = kind is AllocOpKind.OPEN
        return AllocOp(
            op=kind,
            owner=owner,
            n=self._num_blocks if is_open else sum(length for _, length in runs),
            pieces=len(runs),
            runs=tuple(runs),
            shared=tuple(to_runs(shared)),
            free=self._allocator.num_free,
            free_segments=self._allocator.num_segments,
            largest_free=self._allocator.largest_free,
            frag=self._allocator.fragmentation,
        )
