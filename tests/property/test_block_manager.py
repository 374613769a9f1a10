"""The block manager beside a plain model that scans lists for every question."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from common.kv.blocks import BlockManager, Hold
from common.kv.journal import replay
from common.kv.prefix_cache import HASH_BYTES, PrefixCache
from common.kv.runs import to_runs

BLOCK_SIZE = 2
Prefix = tuple[int, ...]

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
holds = st.sampled_from(Hold)


@dataclass
class Owner:
    hold: Hold
    blocks: list[int]
    tokens: list[int]
    published: list[Prefix] = field(default_factory=list)
    ancestors: list[Prefix] = field(default_factory=list)
    """Of an owner that holds the later blocks of a prompt only: the prefixes before them."""


@dataclass
class Model:
    """Owners, and the index of prefixes with the time of their last use."""

    num_blocks: int
    owners: dict[str, Owner] = field(default_factory=dict)
    index: dict[Prefix, int] = field(default_factory=dict)
    used_at: dict[Prefix, int] = field(default_factory=dict)
    now: int = 0

    def holders(self, block: int) -> list[Owner]:
        return [owner for owner in self.owners.values() if block in owner.blocks]

    def evictable(self) -> list[Prefix]:
        return [prefix for prefix, block in self.index.items() if not self.holders(block)]

    def free(self) -> set[int]:
        cached = {self.index[prefix] for prefix in self.evictable()}
        return {b for b in range(self.num_blocks) if not self.holders(b)} - cached

    def hits(self, tokens: list[int], limit: int) -> list[Prefix]:
        found: list[Prefix] = []
        for end in range(BLOCK_SIZE, min(len(tokens), limit) + 1, BLOCK_SIZE):
            if tuple(tokens[:end]) not in self.index:
                break
            found.append(tuple(tokens[:end]))
        return found

    def make_room(self, num_new: int) -> bool:
        """Evict the oldest prefixes, the longest of equally old ones first.

        Beyond what is missing, half as many more while no free run is long enough.
        """
        missing = num_new - len(self.free())
        candidates = sorted(self.evictable(), key=lambda p: (self.used_at[p], -len(p)))
        if missing > len(candidates):
            return False
        num_more = (num_new + 1) // 2
        for prefix in candidates:
            if missing <= 0:
                if num_more == 0 or self.longest_free() >= num_new:
                    break
                num_more -= 1
            del self.index[prefix]
            missing -= 1
        return True

    def longest_free(self) -> int:
        return max((length for _, length in to_runs(sorted(self.free()))), default=0)

    def publish(self, owner: Owner, num_tokens: int) -> None:
        for number in range(len(owner.published), num_tokens // BLOCK_SIZE):
            prefix = tuple(owner.tokens[: (number + 1) * BLOCK_SIZE])
            self.index.setdefault(prefix, owner.blocks[number])
            owner.published.append(prefix)

    def release(self, name: str) -> None:
        owner = self.owners.pop(name)
        self.now += 1
        is_reachable = all(prefix in self.index for prefix in owner.ancestors)
        if is_reachable:
            self.used_at.update(dict.fromkeys(owner.ancestors, self.now))
        for prefix, block in zip(owner.published, owner.blocks, strict=False):
            is_reachable = is_reachable and prefix in self.index
            if is_reachable:
                self.used_at[prefix] = self.now
            elif self.index.get(prefix) == block and not self.holders(block):
                del self.index[prefix]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE)


def hashes_in(joined: bytes) -> set[bytes]:
    assert len(joined) % HASH_BYTES == 0
    return {joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)}


def hash_of(prefix: tuple[int, ...]) -> bytes:
    *_, last = PrefixCache(BLOCK_SIZE, "m").chain(None, prefix)
    return last


class BlockManagerMachine(RuleBasedStateMachine):
    owners = Bundle("owners")
    parts = Bundle("parts")

    @initialize(num_blocks=st.integers(1, 20), min_remainder=st.integers(0, 1))
    def start(self, num_blocks: int, min_remainder: int) -> None:
        self.lines: list[str] = []
        self.model = Model(num_blocks)
        self.manager = BlockManager(
            num_blocks, BLOCK_SIZE, min_remainder, "m", lambda op: self.lines.append(op.to_json())
        )
        self.num_names = 0
        self.told: set[bytes] = set()

    def new_name(self) -> str:
        self.num_names += 1
        return f"owner-{self.num_names}"

    @rule(
        target=owners,
        tokens=prompts,
        hold=holds,
        limit=st.integers(0, 16),
        extra=st.integers(0, 6),
    )
    def acquire(self, tokens: list[int], hold: Hold, limit: int, extra: int):  # type: ignore[no-untyped-def]  # multiple() has no public type
        return self.acquire_checked(tokens, hold, limit, extra)

    @rule(
        target=owners,
        like=owners,
        more=st.lists(st.integers(0, 1), max_size=4),
        limit=st.sampled_from((0, 99)),
    )
    def acquire_alike(self, like: str, more: list[int], limit: int):  # type: ignore[no-untyped-def]  # as above
        """Share another owner's prefix, or hold duplicates of it (limit 0)."""
        tokens = [*self.model.owners[like].tokens, *more]
        return self.acquire_checked(tokens, Hold.REQUEST, limit, 0)

    def acquire_checked(self, tokens: list[int], hold: Hold, limit: int, extra: int):  # type: ignore[no-untyped-def]  # as above
        name = self.new_name()
        hits = self.model.hits(tokens, limit)
        assert self.manager.match(tokens, limit) == len(hits) * BLOCK_SIZE
        shared = [self.model.index[prefix] for prefix in hits]
        capacity = len(tokens) + extra
        num_new = self.model.num_blocks_for(capacity) - len(shared)
        # The shared blocks are held before anything is evicted.
        trial = Owner(hold, list(shared), list(tokens), list(hits))
        self.model.owners[name] = trial
        has_room = self.model.make_room(num_new)
        acquired = self.manager.acquire(
            name, tokens, hold=hold, max_cached_tokens=limit, capacity_tokens=capacity
        )
        assert (acquired is not None) == has_room
        if acquired is None:
            del self.model.owners[name]
            return multiple()
        assert acquired.num_cached_tokens == len(hits) * BLOCK_SIZE
        assert list(acquired.block_ids[: len(shared)]) == shared
        self.extend(trial, acquired.block_ids, num_new)
        return name

    def extend(self, owner: Owner, blocks: tuple[int, ...], num_new: int) -> None:
        new = blocks[len(owner.blocks) :]
        assert list(blocks[: len(owner.blocks)]) == owner.blocks
        assert len(new) == num_new
        assert self.model.free().issuperset(new), "new blocks were free"
        longest = self.model.longest_free()
        follows = bool(owner.blocks) and bool(new) and new[0] == owner.blocks[-1] + 1
        if new and not follows and longest >= num_new:
            assert len(to_runs(new)) == 1, "one run where one is long enough"
        if new and owner.blocks and owner.blocks[-1] + 1 in self.model.free():
            assert follows, "in place where the next block is free"
        owner.blocks.extend(new)

    @rule(target=owners, tokens=prompts)
    def hold_prefix(self, tokens: list[int]):  # type: ignore[no-untyped-def]  # as above
        name = self.new_name()
        hits = self.model.hits(tokens, 99)
        assert self.manager.hold_prefix(name, tokens) == len(hits) * BLOCK_SIZE
        assert self.manager.is_held(name) == bool(hits)
        if not hits:
            return multiple()
        shared = [self.model.index[prefix] for prefix in hits]
        assert list(self.manager.block_ids(name)) == shared
        held = tokens[: len(hits) * BLOCK_SIZE]
        self.model.owners[name] = Owner(Hold.TRANSFER, shared, held, list(hits))
        return name

    @rule(target=parts, parent=owners, data=st.data())
    def hold_published(self, parent: str, data: st.DataObject):  # type: ignore[no-untyped-def]  # as above
        source = self.model.owners[parent]
        if not source.published:
            return multiple()
        name = self.new_name()
        first = data.draw(st.integers(0, len(source.published) - 1))
        held = self.manager.hold_published(name, parent, first)
        part = Owner(
            Hold.TRANSFER,
            source.blocks[first : len(source.published)],
            [],
            source.published[first:],
            source.published[:first],
        )
        assert list(held.block_ids) == part.blocks
        assert list(held.hashes) == [hash_of(prefix) for prefix in part.published]
        assert list(held.before) == [hash_of(prefix) for prefix in part.ancestors]
        assert held.previous == (hash_of(part.ancestors[-1]) if first else None)
        self.model.owners[name] = part
        return name

    @rule(target=parts, tokens=prompts, first=st.integers(0, 3))
    def hold_found(self, tokens: list[int], first: int):  # type: ignore[no-untyped-def]  # as above
        ends = range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)
        prefixes = [tuple(tokens[:end]) for end in ends]
        before, wanted = prefixes[:first], prefixes[first:]
        name = self.new_name()
        held = self.manager.hold_found(
            name, [hash_of(p) for p in wanted], [hash_of(p) for p in before]
        )
        is_there = bool(wanted) and all(prefix in self.model.index for prefix in wanted)
        assert (held is not None) == is_there == self.manager.is_held(name)
        if held is None:
            return multiple()
        blocks = [self.model.index[prefix] for prefix in wanted]
        assert list(held.block_ids) == blocks
        self.model.owners[name] = Owner(Hold.TRANSFER, blocks, [], wanted, before)
        return name

    @rule(is_snapshot=st.sampled_from((False, False, False, True)))
    def take_index_changes(self, is_snapshot: bool) -> None:
        changes = self.manager.take_index_changes(is_snapshot=is_snapshot)
        assert changes.is_snapshot or not is_snapshot
        if changes.is_snapshot:
            self.told = set()
        added, removed = hashes_in(changes.added), hashes_in(changes.removed)
        assert not added & (self.told | removed), "told twice"
        assert removed <= self.told, "removed what was never told"
        self.told = (self.told - removed) | added
        assert self.told == {hash_of(prefix) for prefix in self.model.index}

    @rule(name=owners, new_tokens=st.lists(st.integers(0, 1), max_size=5))
    def grow(self, name: str, new_tokens: list[int]) -> None:
        owner = self.model.owners[name]
        num_tokens = len(owner.tokens) + len(new_tokens)
        num_new = max(0, self.model.num_blocks_for(num_tokens) - len(owner.blocks))
        has_room = self.model.make_room(num_new)
        assert self.manager.grow(name, num_tokens) == has_room
        if has_room:
            owner.tokens.extend(new_tokens)
            self.extend(owner, self.manager.block_ids(name), num_new)

    @rule(target=owners, parent=owners, data=st.data())
    def fork(self, parent: str, data: st.DataObject):  # type: ignore[no-untyped-def]  # as above
        name = self.new_name()
        source = self.model.owners[parent]
        num_tokens = data.draw(st.integers(1, len(source.tokens)))
        num_full, rest = divmod(num_tokens, BLOCK_SIZE)
        has_room = self.model.make_room(1 if rest else 0)
        copies = self.manager.fork(parent, name, num_tokens)
        assert (copies is not None) == has_room
        if copies is None:
            return multiple()
        child = Owner(
            source.hold,
            source.blocks[:num_full],
            source.tokens[:num_tokens],
            source.published[:num_full],
        )
        blocks = self.manager.block_ids(name)
        assert copies == (((source.blocks[num_full], blocks[-1]),) if rest else ())
        self.extend(child, blocks, 1 if rest else 0)
        self.model.owners[name] = child
        return name

    @rule(name=owners, data=st.data())
    def publish(self, name: str, data: st.DataObject) -> None:
        owner = self.model.owners[name]
        num_tokens = data.draw(st.integers(0, len(owner.tokens)))
        self.manager.publish(name, owner.tokens[:num_tokens])
        self.model.publish(owner, num_tokens)

    @rule(name=owners, hold=holds)
    def set_hold(self, name: str, hold: Hold) -> None:
        self.manager.set_hold(name, hold)
        self.model.owners[name].hold = hold

    @rule(name=consumes(parts))
    def release_part(self, name: str) -> None:
        self.release_checked(name)

    @rule(name=consumes(owners))
    def release(self, name: str) -> None:
        self.release_checked(name)

    def release_checked(self, name: str) -> None:
        self.manager.release(name)
        self.model.release(name)
        assert not self.manager.is_held(name)

    @rule()
    def clear_cache(self) -> None:
        self.manager.clear_cache()
        self.model.index.clear()

    @invariant()
    def agree(self) -> None:
        manager, model = self.manager, self.model
        manager.validate()
        held = [model.holders(block) for block in range(model.num_blocks)]
        in_transfer = sum(any(o.hold is Hold.TRANSFER for o in owners) for owners in held)
        counts = manager.counts()
        assert counts.total == model.num_blocks
        assert counts.free == len(model.free())
        assert counts.cached == len(model.evictable())
        assert counts.in_transfer == in_transfer
        assert counts.referenced == sum(bool(owners) for owners in held) - in_transfer
        assert counts.largest_free_run == model.longest_free()
        # A hit is right when its block is one that the model wrote this very prefix to.
        for prefix in {*model.index, *(p for o in model.owners.values() for p in o.published)}:
            assert manager.match(prefix, 99) == len(model.hits(list(prefix), 99)) * BLOCK_SIZE

    @invariant()
    def the_log_tells_the_same(self) -> None:
        state = replay(self.lines)
        assert state.free == self.model.free()
        assert state.owners == {name: owner.blocks for name, owner in self.model.owners.items()}


BlockManagerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestBlockManager = BlockManagerMachine.TestCase
