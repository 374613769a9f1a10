import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from common.errors import InvariantViolationError, LocalProtocolError
from common.kv.blocks import Acquired, BlockManager, Hold

SIZE = 4


def make(num_blocks: int, salt: str = "model") -> BlockManager:
    return BlockManager(num_blocks, SIZE, min_remainder_blocks=0, salt=salt)


def tokens(num_blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_blocks * SIZE))


def acquire(
    manager: BlockManager,
    owner: str,
    token_ids: Sequence[int],
    hold: Hold = Hold.REQUEST,
    max_cached_tokens: int = 10**6,
) -> Acquired:
    acquired = manager.acquire(owner, token_ids, hold=hold, max_cached_tokens=max_cached_tokens)
    assert acquired is not None
    manager.validate()
    return acquired


def cache(manager: BlockManager, owner: str, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Compute, publish and release a prompt; its full blocks stay cached."""
    blocks = acquire(manager, owner, token_ids).block_ids
    manager.publish(owner, token_ids)
    manager.release(owner)
    manager.validate()
    return blocks


@pytest.mark.parametrize("num_blocks", [4, 5, 6])
def test_there_is_room_where_an_acquire_finds_some(num_blocks: int) -> None:
    manager = make(num_blocks)
    prompt = tokens(3)
    cache(manager, "cached", prompt)
    held = acquire(manager, "held", prompt[: 2 * SIZE])
    assert held.num_cached_tokens == 2 * SIZE
    asked = {"max_cached_tokens": 10**6, "capacity_tokens": 5 * SIZE}
    before = manager.counts()
    can = manager.can_acquire(prompt, **asked)
    assert manager.counts() == before
    assert can is (num_blocks >= 5)
    assert (manager.acquire("a", prompt, hold=Hold.REQUEST, **asked) is not None) is can


def test_a_new_request_gets_adjacent_blocks_in_order() -> None:
    manager = make(8)
    assert acquire(manager, "a", [1] * 10) == Acquired((0, 1, 2), 0)
    assert manager.block_ids("a") == (0, 1, 2)
    assert manager.contiguous_ratio("a") == 1.0
    counts = manager.counts()
    assert (counts.total, counts.free, counts.referenced) == (8, 5, 3)
    assert (counts.cached, counts.in_transfer, counts.largest_free_run) == (0, 0, 5)


def test_capacity_reserves_more_than_the_tokens_need() -> None:
    manager = make(8)
    acquired = manager.acquire(
        "a", [1, 2], hold=Hold.REQUEST, max_cached_tokens=0, capacity_tokens=17
    )
    assert acquired == Acquired((0, 1, 2, 3, 4), 0)


def test_no_room_is_refused_and_changes_nothing() -> None:
    manager = make(4)
    cached = cache(manager, "old", tokens(2))
    acquire(manager, "a", [9] * 5)
    before = manager.counts()
    assert manager.acquire("b", [8] * 9, hold=Hold.REQUEST, max_cached_tokens=99) is None
    # A hit on the cached blocks does not make room where the rest does not fit.
    wish = [*tokens(2), 5]
    assert manager.acquire("b", wish, hold=Hold.REQUEST, max_cached_tokens=99) is None
    assert manager.counts() == before
    assert not manager.is_held("b")
    assert manager.match(tokens(2), 99) == len(cached) * SIZE
    manager.validate()


def test_whether_a_pool_can_ever_hold_a_request_ignores_what_it_holds_now() -> None:
    manager = make(4)
    acquire(manager, "a", tokens(4))
    assert manager.can_ever_hold(16)
    assert not manager.can_ever_hold(17)


def test_a_released_prefix_is_found_and_shared() -> None:
    manager = make(16)
    prompt = tokens(3)
    blocks = cache(manager, "a", prompt)
    assert manager.counts().cached == 3
    acquired = acquire(manager, "b", [*prompt, 77])
    assert acquired.num_cached_tokens == 12
    assert acquired.block_ids == (*blocks, 3), "the new block follows the shared ones"
    assert manager.counts().cached == 0
    assert manager.counts().referenced == 4


def test_a_live_request_shares_its_published_blocks() -> None:
    manager = make(16)
    prompt = tokens(2)
    first = acquire(manager, "a", prompt)
    manager.publish("a", prompt)
    second = acquire(manager, "b", [*prompt, 1, 2])
    assert second.block_ids[:2] == first.block_ids
    manager.release("a")
    assert manager.counts().referenced == 3
    manager.release("b")
    counts = manager.counts()
    assert (counts.cached, counts.free) == (2, 14)
    manager.validate()


def test_a_hit_is_cut_to_the_callers_limit_in_whole_blocks() -> None:
    manager = make(16)
    prompt = tokens(3)
    cache(manager, "a", prompt)
    assert manager.match(prompt, 12) == 12
    assert manager.match(prompt, 11) == 8
    assert manager.match(prompt, 3) == 0
    assert acquire(manager, "b", prompt, max_cached_tokens=11).num_cached_tokens == 8


def test_unpublished_and_partial_blocks_are_never_found() -> None:
    manager = make(16)
    prompt = tokens(3)
    acquire(manager, "a", prompt)
    manager.publish("a", prompt[:7])
    assert manager.match(prompt, 99) == 4
    manager.release("a")
    assert manager.counts().cached == 1


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    manager = make(16)
    cache(manager, "a", [1, 1, 1, 1, 5, 5, 5, 5])
    assert manager.match([2, 2, 2, 2, 5, 5, 5, 5], 99) == 0
    assert manager.match([5, 5, 5, 5], 99) == 0


def test_lists_and_arrays_of_any_integer_type_name_the_same_prefix() -> None:
    manager = make(16)
    prompt = tokens(2)
    cache(manager, "a", prompt)
    assert manager.match(np.array(prompt, dtype=np.int32), 99) == 8
    strided_and_wide = np.repeat(np.array(prompt, dtype=np.int64), 2)[::2]
    assert manager.match(strided_and_wide, 99) == 8


def test_blocks_are_published_by_hashes_that_are_known() -> None:
    manager = make(16)
    prompt = tokens(4)
    hashes = manager.prefix_hashes(prompt)
    acquired = acquire(manager, "a", prompt)
    for count in (1, 3, 2):
        manager.publish_hashed("a", hashes[:count])
    assert manager.match(prompt, 99) == 3 * SIZE
    manager.publish("a", prompt)
    with pytest.raises(LocalProtocolError, match="does not hold 5 blocks to publish"):
        manager.publish_hashed("a", [*hashes, b"h" * 16])
    manager.release("a")
    assert acquire(manager, "b", prompt).block_ids == acquired.block_ids
    manager.validate()


def test_publishing_again_or_less_changes_nothing() -> None:
    manager = make(16)
    prompt = tokens(3)
    acquire(manager, "a", prompt)
    for length in (5, 5, 4, 12, 8):
        manager.publish("a", prompt[:length])
        manager.validate()
    assert manager.match(prompt, 99) == 12


def test_a_known_hash_keeps_its_first_block() -> None:
    manager = make(16)
    prompt = tokens(2)
    first = acquire(manager, "a", prompt).block_ids
    second = acquire(manager, "b", prompt).block_ids
    manager.publish("a", prompt)
    manager.publish("b", prompt)
    manager.release("b")
    counts = manager.counts()
    assert (counts.referenced, counts.cached) == (2, 0), "the duplicate is freed"
    assert acquire(manager, "c", prompt).block_ids == first != second


def test_the_oldest_tail_is_evicted_first() -> None:
    manager = make(6)
    old, young = tokens(3), tokens(3, first=100)
    cache(manager, "old", old)
    cache(manager, "young", young)
    acquire(manager, "x", [7] * 8)
    assert manager.match(old, 99) == 4, "the prefix outlives its tail"
    assert manager.match(young, 99) == 12
    acquire(manager, "y", [8] * 4)
    assert manager.match(old, 99) == 0
    assert manager.match(young, 99) == 12


def scatter_cache(manager: BlockManager, num_blocks: int) -> None:
    """Fill the pool with one cached block per prompt, the evens older than the odds."""
    for block in range(num_blocks):
        acquire(manager, f"{block}", tokens(1, first=100 * block))
        manager.publish(f"{block}", tokens(1, first=100 * block))
    for block in (*range(0, num_blocks, 2), *range(1, num_blocks, 2)):
        manager.release(f"{block}")


def test_eviction_goes_on_for_half_a_request_to_join_what_is_free() -> None:
    manager = make(12)
    scatter_cache(manager, 12)
    # The oldest six are every other block. The next three join 0 to 6, and that is long enough.
    assert acquire(manager, "x", [7] * 24).block_ids == (0, 1, 2, 3, 4, 5)
    assert (manager.counts().free, manager.counts().cached) == (3, 3)


def test_eviction_beyond_need_stops_at_half_a_request() -> None:
    manager = make(12)
    scatter_cache(manager, 12)
    for wall in (2, 6):
        assert acquire(manager, f"wall-{wall}", tokens(1, first=100 * wall)).block_ids == (wall,)
    # Six are missing and three more are tried: the longest run is 7 to 10, and one block is left.
    assert acquire(manager, "x", [7] * 24).block_ids == (7, 8, 9, 10, 0, 1)
    assert (manager.counts().free, manager.counts().cached) == (3, 1)


def test_a_hit_renews_the_prefix_that_it_used_and_no_more() -> None:
    manager = make(6)
    old, young = tokens(3), tokens(3, first=100)
    cache(manager, "old", old)
    cache(manager, "young", young)
    acquire(manager, "hit", old[:8])
    manager.release("hit")
    acquire(manager, "x", [7] * 16)
    assert manager.match(old, 99) == 8
    assert manager.match(young, 99) == 0


def test_a_duplicates_owner_renews_the_block_that_is_found() -> None:
    manager = make(8)
    prompt = tokens(2)
    acquire(manager, "a", prompt)
    acquire(manager, "b", [*prompt, 9, 9, 9, 9])
    manager.publish("a", prompt)
    manager.publish("b", [*prompt, 9, 9, 9, 9])
    manager.release("a")
    manager.release("b")
    manager.validate()
    assert manager.match([*prompt, 9, 9, 9, 9], 99) == 12
    acquire(manager, "x", [7] * 24)
    assert manager.match([*prompt, 9, 9, 9, 9], 99) == 8, "the tail goes before its ancestors"


def test_blocks_that_can_no_longer_be_found_are_freed_on_release() -> None:
    manager = make(6)
    prompt = tokens(2)
    acquire(manager, "a", prompt[:4])
    acquire(manager, "b", prompt)
    manager.publish("a", prompt[:4])
    manager.publish("b", prompt)
    manager.release("a")
    acquire(manager, "x", [7] * 16)
    assert manager.match(prompt, 99) == 0, "the first block was evicted under b's second one"
    manager.release("b")
    manager.validate()
    counts = manager.counts()
    assert (counts.free, counts.cached) == (2, 0)


def test_who_holds_later_blocks_alone_keeps_those_before_them_longer_at_its_end() -> None:
    manager = make(6)
    blocks = acquire(manager, "a", tokens(3)).block_ids
    manager.publish("a", tokens(3))
    held = manager.hold_published("part", "a", 1)
    assert held.block_ids == blocks[1:]
    assert [held.previous, *held.hashes] == manager.prefix_hashes(tokens(3))
    manager.release("a")
    assert manager.counts().in_transfer == 2
    cache(manager, "b", tokens(2, first=100))
    manager.release("part")
    manager.validate()
    acquire(manager, "c", tokens(3, first=200))
    assert manager.match(tokens(2, first=100), 99) == 0, "it was used longer ago than the part"
    assert manager.match(tokens(3), 99) == 3 * SIZE


def test_blocks_are_held_by_their_hashes_while_all_of_them_are_cached() -> None:
    manager = make(6)
    blocks = cache(manager, "a", tokens(3))
    hashes = manager.prefix_hashes(tokens(4))
    assert manager.hold_found("part", hashes[2:], hashes[:2]) is None
    assert manager.hold_found("part", [], hashes) is None
    assert not manager.is_held("part")
    held = manager.hold_found("part", hashes[1:3], hashes[:1])
    assert held is not None
    assert (held.block_ids, held.previous) == (blocks[1:], hashes[0])
    assert manager.counts().in_transfer == 2
    manager.release("part")
    manager.validate()


def test_only_published_blocks_are_held_as_such() -> None:
    manager = make(6)
    acquire(manager, "a", tokens(3))
    manager.publish("a", tokens(1))
    for first in (1, 2):
        with pytest.raises(LocalProtocolError, match="has not published"):
            manager.hold_published("part", "a", first)
    with pytest.raises(LocalProtocolError, match="holds blocks already"):
        manager.hold_published("a", "a", 0)
    manager.publish("a", tokens(2))
    manager.hold_published("second", "a", 1)
    with pytest.raises(LocalProtocolError, match="has not published"):
        manager.hold_published("part", "second", 0)
    assert not manager.is_held("part")


def test_held_blocks_are_never_evicted() -> None:
    manager = make(4)
    prompt = tokens(2)
    acquire(manager, "a", prompt)
    manager.publish("a", prompt)
    assert manager.acquire("b", [7] * 12, hold=Hold.REQUEST, max_cached_tokens=0) is None
    assert manager.match(prompt, 99) == 8


def test_growth_goes_on_in_place_where_the_next_block_is_free() -> None:
    manager = make(8)
    acquire(manager, "a", tokens(2))
    assert manager.grow("a", 8)
    assert manager.block_ids("a") == (0, 1)
    assert manager.grow("a", 9)
    assert manager.block_ids("a") == (0, 1, 2)
    acquire(manager, "wall", [1])
    assert manager.grow("a", 13)
    assert manager.block_ids("a") == (0, 1, 2, 4)
    assert manager.contiguous_ratio("a") == pytest.approx(2 / 3)
    before = manager.counts()
    assert not manager.grow("a", 33)
    assert manager.counts() == before
    manager.validate()


def test_growth_evicts_what_nobody_holds() -> None:
    manager = make(3)
    cache(manager, "old", tokens(2))
    acquire(manager, "a", [9])
    assert manager.grow("a", 9)
    assert manager.counts().cached == 0
    manager.validate()


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    manager = make(8)
    acquire(manager, "parent", [1] * 10)
    assert manager.fork("parent", "child", 10) == ((2, 3),)
    assert manager.block_ids("child") == (0, 1, 3)
    assert manager.counts().referenced == 4
    manager.release("parent")
    assert manager.counts().referenced == 3
    manager.release("child")
    assert manager.counts().free == 8
    manager.validate()


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    manager = make(8)
    acquire(manager, "parent", [1] * 10)
    assert manager.fork("parent", "child", 8) == ()
    assert manager.block_ids("child") == (0, 1)


def test_a_fork_without_room_is_refused_and_changes_nothing() -> None:
    manager = make(3)
    acquire(manager, "parent", [1] * 10)
    assert manager.fork("parent", "child", 10) is None
    assert not manager.is_held("child")
    manager.validate()


def test_a_child_publishes_from_where_its_parent_had_come() -> None:
    manager = make(8)
    prompt = tokens(2)
    acquire(manager, "parent", [*prompt, 50])
    manager.publish("parent", prompt)
    manager.fork("parent", "child", 9)
    manager.publish("child", [*prompt, 50, 51, 52, 53])
    manager.release("child")
    manager.release("parent")
    assert manager.match([*prompt, 50, 51, 52, 53], 99) == 12
    manager.validate()


def test_a_transfer_hold_counts_before_a_request_hold() -> None:
    manager = make(8)
    prompt = tokens(2)
    acquire(manager, "request", prompt)
    manager.publish("request", prompt)
    acquire(manager, "transfer", [*prompt, 1], hold=Hold.TRANSFER)
    counts = manager.counts()
    assert (counts.in_transfer, counts.referenced) == (3, 0)
    manager.set_hold("transfer", Hold.REQUEST)
    manager.set_hold("transfer", Hold.REQUEST)
    assert (manager.counts().in_transfer, manager.counts().referenced) == (0, 3)
    manager.set_hold("request", Hold.TRANSFER)
    manager.release("transfer")
    assert (manager.counts().in_transfer, manager.counts().free) == (2, 6)
    manager.validate()


def test_a_cleared_cache_finds_nothing_and_frees_what_nobody_holds() -> None:
    manager = make(8)
    live, gone = tokens(2), tokens(2, first=100)
    cache(manager, "gone", gone)
    acquire(manager, "live", live)
    manager.publish("live", live)
    manager.clear_cache()
    manager.validate()
    assert (manager.match(live, 99), manager.match(gone, 99)) == (0, 0)
    assert (manager.counts().free, manager.counts().cached) == (6, 0)
    manager.release("live")
    assert manager.counts().free == 8
    manager.validate()


def test_an_unknown_owner_is_our_own_fault() -> None:
    manager = make(4)
    for ask in (
        lambda: manager.release("ghost"),
        lambda: manager.grow("ghost", 1),
        lambda: manager.fork("ghost", "child", 1),
        lambda: manager.publish("ghost", [1] * 4),
        lambda: manager.set_hold("ghost", Hold.TRANSFER),
        lambda: manager.block_ids("ghost"),
    ):
        with pytest.raises(LocalProtocolError, match="ghost holds no blocks"):
            ask()
    assert not manager.is_held("ghost")


def test_a_wrong_call_for_a_live_owner_is_our_own_fault() -> None:
    manager = make(8)
    acquire(manager, "a", tokens(2))
    acquire(manager, "b", tokens(1))
    with pytest.raises(LocalProtocolError, match="a holds blocks already"):
        manager.acquire("a", [1], hold=Hold.REQUEST, max_cached_tokens=0)
    with pytest.raises(LocalProtocolError, match="asks for no tokens"):
        manager.acquire("c", [], hold=Hold.REQUEST, max_cached_tokens=0)
    with pytest.raises(LocalProtocolError, match="b holds blocks already"):
        manager.fork("a", "b", 4)
    with pytest.raises(LocalProtocolError, match="does not hold 9 tokens to fork"):
        manager.fork("a", "c", 9)
    with pytest.raises(LocalProtocolError, match="does not hold 3 blocks to publish"):
        manager.publish("a", tokens(3))
    manager.validate()


def test_one_block_published_with_two_contents_is_our_own_fault() -> None:
    manager = make(8)
    acquire(manager, "a", [1] * 4)
    manager.fork("a", "b", 4)
    manager.publish("a", [1] * 4)
    with pytest.raises(LocalProtocolError, match="published with other tokens"):
        manager.publish("b", [2] * 4)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("_num_holders", [0] * 4, "reference counts differ"),
        ("_num_transfers", [1] * 4, "reference counts differ"),
        ("_num_in_transfer", 3, "blocks in transfer is wrong"),
    ],
)
def test_validate_finds_wrong_sums(attribute: str, value: object, message: str) -> None:
    manager = make(4)
    acquire(manager, "a", [1])
    setattr(manager, attribute, value)
    with pytest.raises(InvariantViolationError, match=message):
        manager.validate()


def test_validate_finds_a_lost_and_a_doubly_owned_block() -> None:
    manager = make(4)
    acquire(manager, "a", [1])
    manager._allocator.allocate(1)
    with pytest.raises(InvariantViolationError, match="block 1: held False, cached False, free"):
        manager.validate()
    manager._allocator.free([(0, 2)])
    with pytest.raises(InvariantViolationError, match="block 0: held True, cached False, free T"):
        manager.validate()


def test_another_salt_or_block_size_never_shares_a_hash() -> None:
    digests = set()
    for size, salt in ((4, "a"), (4, "b"), (8, "a")):
        cache_of = BlockManager(4, size, 0, salt)._cache
        digests.add(next(iter(cache_of.chain(None, [1] * 8))))
    assert len(digests) == 3


def test_hashing_a_long_prompt_costs_less_than_prefilling_a_token_would() -> None:
    manager = BlockManager(256, 64, 0, "model")
    prompt = np.arange(8192, dtype=np.int32)
    manager.acquire("a", prompt, hold=Hold.REQUEST, max_cached_tokens=0)
    manager.publish("a", prompt)
    times = [time.process_time()]
    for _ in range(20):
        assert manager.match(prompt, 8192) == 8192
        times.append(time.process_time())
    # Ten times the usual cost: a bound for a mistake of an order, not for the machine's mood.
    assert min(after - before for before, after in pairwise(times)) < 0.002
