from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import InvariantViolationError, RemoteProtocolError
from common.kv.prefix_cache import PrefixCache
from services.controller.policy.prefix_index import COMPACT_SLACK, PrefixIndex
from tests.unit.controller.policy.builders import key

A, B = key("a"), key("b")


def chain(length: int, seed: int = 0) -> list[bytes]:
    dice = Random(seed)
    tokens = [dice.randrange(1000) for _ in range(length * 8)]
    return list(PrefixCache(8, "salt").chain(None, tokens))


def snapshot(index: PrefixIndex, worker: tuple, hashes: list[bytes], sequence: int = 1) -> None:
    assert index.apply(worker, sequence, b"".join(hashes), b"", is_snapshot=True)


def test_a_walk_tells_each_worker_s_longest_prefix() -> None:
    hashes, index = chain(5), PrefixIndex()
    snapshot(index, A, hashes[:3])
    snapshot(index, B, hashes)
    assert index.hits(hashes) == {A: 3, B: 5}
    assert index.hits(hashes[:2]) == {A: 2, B: 2}
    assert index.hits(chain(5, seed=1)) == {}
    assert index.hits([]) == {}
    assert index.num_blocks == 5
    assert (index.num_blocks_of(A), index.num_blocks_of(B), index.num_blocks_of(key("c"))) == (
        3,
        5,
        0,
    )


def test_blocks_after_a_hole_do_not_count() -> None:
    hashes, index = chain(5), PrefixIndex()
    snapshot(index, A, [hashes[0], *hashes[2:]])
    snapshot(index, B, hashes[1:])
    assert index.hits(hashes) == {A: 1}


def test_batches_add_and_remove() -> None:
    hashes, index = chain(4), PrefixIndex()
    assert index.apply(A, 1, b"".join(hashes), b"", is_snapshot=False)
    assert index.apply(A, 2, b"", b"".join(hashes[2:]), is_snapshot=False)
    assert index.hits(hashes) == {A: 2}
    assert index.apply(A, 3, hashes[2], hashes[2] + hashes[1], is_snapshot=False)
    assert index.hits(hashes) == {A: 1}, "a hash that was added and removed is there"
    assert index.num_blocks == 2
    assert index.sequence_of(A) == 3


def test_after_a_gap_only_a_snapshot_is_taken() -> None:
    hashes, index = chain(4), PrefixIndex()
    assert index.apply(A, 1, hashes[0], b"", is_snapshot=False)
    assert not index.apply(A, 3, hashes[1], b"", is_snapshot=False)
    assert not index.apply(A, 4, hashes[2], b"", is_snapshot=False)
    assert (index.hits(hashes), index.sequence_of(A)) == ({A: 1}, 1)
    assert index.apply(A, 5, b"".join(hashes[:3]), b"", is_snapshot=True)
    assert index.hits(hashes) == {A: 3}
    assert index.apply(A, 6, hashes[3], b"", is_snapshot=False)
    assert index.hits(hashes) == {A: 4}


def test_an_unknown_worker_begins_with_its_first_batch_or_a_snapshot() -> None:
    hashes, index = chain(2), PrefixIndex()
    assert not index.apply(A, 7, hashes[0], b"", is_snapshot=False)
    assert index.num_blocks == 0
    assert index.apply(A, 8, hashes[0], b"", is_snapshot=True)
    assert index.hits(hashes) == {A: 1}


def test_a_repeat_changes_nothing() -> None:
    hashes, index = chain(3), PrefixIndex()
    assert index.apply(A, 1, b"".join(hashes), b"", is_snapshot=True)
    assert index.apply(A, 2, b"", hashes[2], is_snapshot=False)
    assert index.apply(A, 1, b"".join(hashes), b"", is_snapshot=True)
    assert index.hits(hashes) == {A: 2}


def test_a_dropped_worker_leaves_no_block_and_its_place_to_another() -> None:
    hashes, index = chain(3), PrefixIndex()
    snapshot(index, A, hashes)
    snapshot(index, B, hashes[:1])
    index.drop(A)
    index.drop(A)
    assert index.hits(hashes) == {B: 1}
    assert index.num_blocks == 1
    snapshot(index, key("c"), hashes[:2])
    assert index.hits(hashes) == {B: 1, key("c"): 2}


def test_half_a_hash_is_the_peer_s_fault() -> None:
    index = PrefixIndex()
    with pytest.raises(RemoteProtocolError, match="a: hashes of 17 and 0 bytes"):
        index.apply(A, 1, b"x" * 17, b"", is_snapshot=False)
    with pytest.raises(RemoteProtocolError, match="a: hashes of 0 and 8 bytes"):
        index.apply(A, 1, b"", b"x" * 8, is_snapshot=False)


def test_churn_does_not_make_a_worker_s_keys_grow() -> None:
    index, dice = PrefixIndex(), Random(1)
    before = b""
    for sequence in range(1, 200):
        hashes = b"".join(dice.randbytes(16) for _ in range(50))
        assert index.apply(A, sequence, hashes, before, is_snapshot=False)
        before = hashes
    holder = index._holders[A]
    assert index.num_blocks == holder.num_blocks == 50
    assert len(holder.keys) <= 2 * 50 + COMPACT_SLACK
    index.validate()


def test_validate_finds_a_lost_key() -> None:
    index = PrefixIndex()
    snapshot(index, A, chain(3))
    index._masks.popitem()
    with pytest.raises(InvariantViolationError, match="lost keys"):
        index.validate()


WORKERS = [key(name) for name in "abcd"]
CHAINS = [chain(6, seed) for seed in range(3)]
HASHES = [digest for hashes in CHAINS for digest in hashes]
BATCH = st.lists(st.sampled_from(HASHES), max_size=8)


class IndexAgainstSets(RuleBasedStateMachine):
    """The index against a set of hashes for each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.sets: dict[tuple, set[bytes]] = {}
        self.sequences: dict[tuple, int] = {}

    @rule(worker=st.sampled_from(WORKERS), added=BATCH, removed=BATCH, step=st.integers(-1, 2))
    def batch(self, worker: tuple, added: list[bytes], removed: list[bytes], step: int) -> None:
        last = self.sequences.get(worker, 0)
        sequence = max(0, last + step)
        taken = self.index.apply(
            worker, sequence, b"".join(added), b"".join(removed), is_snapshot=False
        )
        assert taken == (sequence <= last + 1)
        if sequence == last + 1:
            held = self.sets.setdefault(worker, set())
            held -= set(removed)
            held |= set(added)
            self.sequences[worker] = sequence

    @rule(worker=st.sampled_from(WORKERS), added=BATCH, step=st.integers(1, 3))
    def snapshot(self, worker: tuple, added: list[bytes], step: int) -> None:
        sequence = self.sequences.get(worker, 0) + step
        assert self.index.apply(worker, sequence, b"".join(added), b"", is_snapshot=True)
        self.sets[worker] = set(added)
        self.sequences[worker] = sequence

    @rule(worker=st.sampled_from(WORKERS))
    def drop(self, worker: tuple) -> None:
        self.index.drop(worker)
        self.sets.pop(worker, None)
        self.sequences.pop(worker, None)

    @invariant()
    def agrees(self) -> None:
        for hashes in CHAINS:
            expected = {}
            for worker, held in self.sets.items():
                missing = (n for n, digest in enumerate(hashes) if digest not in held)
                if count := next(missing, len(hashes)):
                    expected[worker] = count
            assert self.index.hits(hashes) == expected
        everything = set().union(*self.sets.values()) if self.sets else set()
        assert self.index.num_blocks == len(everything)
        for worker in WORKERS:
            assert self.index.num_blocks_of(worker) == len(self.sets.get(worker, ()))
            assert self.index.sequence_of(worker) == self.sequences.get(worker, 0)
        self.index.validate()


TestIndexAgainstSets = IndexAgainstSets.TestCase
