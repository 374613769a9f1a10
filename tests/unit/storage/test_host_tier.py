"""The tier of host memory: what stays in it, what gives way, and that its bytes are whole."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.storage.host_tier import HostTier
from common.storage.interface import BlockStore
from tests.support.stored_blocks import (
    BLOCK_BYTES,
    chain,
    open_file_store,
    payload,
    store_chain,
)


def tier_of(num_slots: int) -> HostTier:
    return HostTier(bytearray(num_slots * BLOCK_BYTES), BLOCK_BYTES)


def put(tier: HostTier, hashes: list[bytes], previous: bytes | None = None) -> None:
    """Put successive blocks, which lie in another order."""
    ids = list(reversed(range(len(hashes))))
    source = b"".join(payload(block_hash) for block_hash in reversed(hashes))
    tier.put(hashes, previous, source, ids)
    tier.validate()


def read(tier: HostTier, hashes: list[bytes]) -> int:
    """Return how many leading blocks are here; AssertionError where one has other bytes."""
    buffer = bytearray(len(hashes) * BLOCK_BYTES)
    with tier.lent(hashes) as slots:
        tier.copy_out(slots, buffer, range(len(slots)))
    for number in range(len(slots)):
        found = bytes(buffer[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])
        assert found == payload(hashes[number]), f"block {number} has other bytes"
    tier.validate()
    return len(slots)


def test_blocks_come_back_as_they_were_up_to_the_first_that_is_not_here() -> None:
    tier, hashes = tier_of(8), chain("a", 6)
    put(tier, hashes[:3])
    put(tier, hashes[4:5], hashes[3])
    assert (tier.num_held(hashes), tier.num_missing(hashes)) == (3, 0)
    assert (tier.num_held(hashes[3:]), tier.num_missing(hashes[3:])) == (0, 1)
    assert read(tier, hashes) == 3
    assert read(tier, hashes[3:]) == 0
    stats = tier.stats()
    assert (stats.num_blocks, stats.num_hits, stats.num_added) == (4, 3, 4)


def test_the_least_recently_read_tail_makes_room() -> None:
    tier, first, second = tier_of(8), chain("a", 4), chain("b", 4)
    put(tier, first)
    put(tier, second)
    read(tier, first)
    put(tier, chain("c", 2))
    assert (tier.num_held(first), tier.num_held(second)) == (4, 2)
    assert tier.stats().num_evicted == 2


def test_what_is_read_again_and_again_outlasts_a_long_prompt_that_is_not() -> None:
    tier, hot, long = tier_of(8), chain("hot", 4), chain("long", 40)
    put(tier, hot)
    read(tier, hot)
    for start in range(0, 40, 4):
        put(tier, long[start : start + 4], long[start - 1] if start else None)
        read(tier, hot)
    assert tier.num_held(hot) == 4
    assert tier.num_held(long) == 4, "its front stays, not its end"
    assert tier.stats().num_refused == 36


def test_what_was_hot_gives_way_when_it_is_not_read_any_more() -> None:
    tier, hot = tier_of(8), chain("hot", 8)
    put(tier, hot)
    read(tier, hot)
    for number in range(20):
        put(tier, chain(f"{number}", 1))
    assert tier.num_held(hot) == 0


def test_a_lent_block_stays_as_it_is_until_it_is_given_back() -> None:
    tier, hashes = tier_of(2), chain("a", 2)
    put(tier, hashes)
    buffer = bytearray(BLOCK_BYTES)
    with tier.lent(hashes[1:]) as slots:
        for number in range(9):
            put(tier, chain(f"{number}", 2))
        tier.copy_out(slots, buffer, [0])
        assert tier.num_held(hashes) == 2
    assert bytes(buffer) == payload(hashes[1])
    put(tier, chain("9", 2))
    assert tier.num_held(hashes) == 0


def test_a_copy_that_fails_leaves_nothing_to_find_and_no_slot_lost() -> None:
    tier, hashes = tier_of(2), chain("a", 2)
    with pytest.raises(ValueError, match="out"):
        tier.put(hashes, None, payload(hashes[0]), [0, 5])
    tier.validate()
    assert tier.num_held(hashes) == 0
    put(tier, hashes)
    assert read(tier, hashes) == 2


def test_chains_of_any_order_never_give_other_bytes() -> None:
    source = random.Random(7)
    tier = tier_of(12)
    chains = [chain(f"{name}", 9) for name in range(5)]
    for _ in range(300):
        hashes = source.choice(chains)
        start = source.randrange(9)
        end = source.randint(start + 1, 9)
        if source.random() < 0.5:
            put(tier, hashes[start:end], hashes[start - 1] if start else None)
        else:
            read(tier, hashes[start:end])
    stats = tier.stats()
    assert stats.num_blocks <= 12
    assert stats.num_hits > 0
    assert stats.num_added == stats.num_evicted + stats.num_blocks


# ---- blocks that are here ahead of their first read ----------------------------------------------


def prefetch(
    tier: HostTier, stored: BlockStore, hashes: list[bytes], previous: bytes | None = None
) -> int:
    count = tier.prefetch(stored, hashes, previous)
    tier.validate()
    return count


def ended(tier: HostTier) -> tuple[int, int, int]:
    """Return how many blocks were prefetched, used and wasted."""
    stats = tier.stats()
    return stats.num_prefetched, stats.num_prefetch_used, stats.num_prefetch_wasted


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[BlockStore]:
    """A store that has chains a and b, of nine blocks each."""
    store = open_file_store(tmp_path)
    for name in "ab":
        assert all(store_chain(store, chain(name, 9)))
    yield store
    store.close()


def test_prefetched_blocks_are_whole_and_used_by_their_first_read_alone(stored: BlockStore) -> None:
    tier, hashes = tier_of(16), chain("a", 3)
    assert prefetch(tier, stored, hashes) == 3
    assert ended(tier) == (3, 0, 0)
    assert read(tier, hashes[:2]) == 2
    assert read(tier, hashes) == 3
    assert ended(tier) == (3, 3, 0)


def test_a_quarter_of_the_slots_at_most_is_ahead_of_its_read(stored: BlockStore) -> None:
    tier, hashes = tier_of(16), chain("a", 9)
    assert prefetch(tier, stored, hashes) == 4
    assert tier.prefetch_room == 0
    assert prefetch(tier, stored, hashes[4:], hashes[3]) == 0
    read(tier, hashes[:3])
    assert tier.prefetch_room == 3
    assert prefetch(tier, stored, hashes[4:], hashes[3]) == 3


def test_prefetches_displace_what_is_used_least_and_no_more_than_their_share(
    stored: BlockStore,
) -> None:
    tier, hot, cold = tier_of(16), chain("hot", 12), chain("cold", 4)
    put(tier, hot)
    put(tier, cold)
    read(tier, hot)
    for name in "ab":
        prefetch(tier, stored, chain(name, 9))
    assert (tier.num_held(hot), tier.num_held(cold)) == (12, 0)
    assert tier.stats().num_evicted == 4


def test_a_prefetched_block_that_is_evicted_before_its_read_is_wasted(stored: BlockStore) -> None:
    tier, hashes = tier_of(8), chain("a", 2)
    prefetch(tier, stored, hashes)
    put(tier, chain("other", 8))
    assert tier.num_held(hashes) == 0
    assert (ended(tier), tier.prefetch_room) == ((2, 0, 2), 2)


def test_abandoned_blocks_are_wasted_once_and_can_still_be_read(stored: BlockStore) -> None:
    tier, hashes = tier_of(16), chain("a", 4)
    prefetch(tier, stored, hashes)
    read(tier, hashes[:1])
    tier.abandon(hashes)
    tier.abandon(hashes)
    assert (ended(tier), tier.prefetch_room) == ((4, 1, 3), 4)
    assert read(tier, hashes) == 4
    assert ended(tier) == (4, 1, 3)


def test_a_prefetch_ends_at_what_is_here_or_is_not_stored(stored: BlockStore) -> None:
    tier, hashes = tier_of(64), chain("a", 12)
    put(tier, hashes[2:3], hashes[1])
    assert prefetch(tier, stored, hashes) == 2
    assert prefetch(tier, stored, hashes[3:], hashes[2]) == 6, "nine are stored"
    assert tier.num_held(hashes) == 9
    assert prefetch(tier, stored, []) == 0


def test_a_prefetch_displaces_others_though_what_it_goes_on_from_is_the_oldest(
    stored: BlockStore,
) -> None:
    tier, hashes, others = tier_of(16), chain("a", 6), chain("others", 14)
    put(tier, hashes[:2])
    put(tier, others)
    assert prefetch(tier, stored, hashes[2:], hashes[1]) == 4
    assert (tier.num_held(hashes), tier.num_held(others)) == (6, 10)


def test_what_those_who_ended_waited_for_makes_room_for_others(stored: BlockStore) -> None:
    tier = tier_of(16)
    assert prefetch(tier, stored, chain("a", 9)) == 4
    tier.abandon_all()
    assert (ended(tier), tier.prefetch_room) == ((4, 0, 4), 4)
    tier.abandon_all()
    assert ended(tier) == (4, 0, 4)
