"""What a prefix cache tells of its changes, and what it forgets when nobody asks."""

from common.kv.blocks import BlockManager, Hold
from common.kv.index_log import IndexChanges, IndexLog

A, B, C = (bytes([letter]) * 16 for letter in b"abc")


def test_changes_that_undo_each_other_are_not_told() -> None:
    log = IndexLog()
    assert log.take([A]) == IndexChanges(A, b"", is_snapshot=True)
    log.add(B)
    log.remove(B)
    log.remove(A)
    log.add(A)
    log.add(C)
    assert log.take([A, C]) == IndexChanges(C, b"", is_snapshot=False)
    assert log.take([A, C]).is_empty


def test_nothing_is_kept_before_the_first_take() -> None:
    log = IndexLog(max_changes=0)
    log.add(A)
    assert log.take([A]) == IndexChanges(A, b"", is_snapshot=True)


def test_too_many_changes_make_the_next_take_a_snapshot() -> None:
    log = IndexLog(max_changes=2)
    log.take([])
    log.add(A)
    log.remove(B)
    log.add(C)
    log.add(B)
    assert log.take([A, B, C]) == IndexChanges(A + B + C, b"", is_snapshot=True)
    log.remove(A)
    assert log.take([B, C]) == IndexChanges(b"", A, is_snapshot=False)


def test_a_cache_that_was_cleared_tells_that_nothing_is_findable() -> None:
    manager = BlockManager(8, 4, 0, "m")
    manager.acquire("o", range(8), hold=Hold.REQUEST, max_cached_tokens=0)
    manager.take_index_changes()
    manager.publish("o", range(8))
    manager.clear_cache()
    assert manager.take_index_changes() == IndexChanges(b"", b"", is_snapshot=True)


def test_a_held_prefix_is_whole_blocks_that_outlive_their_eviction() -> None:
    manager = BlockManager(4, 4, 0, "m")
    manager.acquire("o", range(8), hold=Hold.REQUEST, max_cached_tokens=0)
    manager.publish("o", range(8))
    blocks = manager.block_ids("o")
    manager.release("o")
    assert manager.hold_prefix("p", range(100, 110)) == 0
    assert not manager.is_held("p")
    assert manager.hold_prefix("p", range(11)) == 8
    assert manager.block_ids("p") == blocks
    assert manager.counts().in_transfer == 2
    assert manager.acquire("big", range(200, 212), hold=Hold.REQUEST, max_cached_tokens=0) is None
    manager.release("p")
    assert manager.counts().cached == 2
    manager.validate()
