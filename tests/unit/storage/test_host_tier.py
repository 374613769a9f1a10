"""The tier of host memory: what stays in it, what gives way, and that its bytes are whole."""

import random

import pytest

from common.storage.host_tier import HostTier
from tests.support.stored_blocks import BLOCK_BYTES, chain, payload


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
