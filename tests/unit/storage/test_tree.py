"""The trie of stored blocks and its order of eviction."""

import pytest

from common.storage.tree import BlockTree


def filled(*edges: tuple[str, str | None]) -> BlockTree:
    tree = BlockTree()
    for time, (key, parent) in enumerate(edges):
        tree.add(key.encode(), None if parent is None else parent.encode(), 10, time)
    return tree


def evict_all(tree: BlockTree) -> str:
    order = ""
    while (key := tree.oldest_leaf()) is not None:
        tree.remove(key)
        tree.validate()
        order += key.decode()
    return order


def test_tails_go_first_although_their_parents_are_older() -> None:
    assert evict_all(filled(("a", None), ("b", "a"), ("c", "b"))) == "cba"


def test_the_least_recently_used_tail_goes_first() -> None:
    tree = filled(("a", None), ("b", "a"), ("c", "a"), ("x", None), ("y", "x"))
    for key in (b"b", b"a"):
        tree.touch(key, 100)
    assert evict_all(tree) == "cyxba"


def test_an_older_use_and_an_unknown_block_change_nothing() -> None:
    tree = filled(("a", None), ("b", None))
    tree.touch(b"b", 0)
    tree.touch(b"z", 5)
    assert tree.used_ns(b"b") == 1
    assert evict_all(tree) == "ab"


def test_a_block_without_its_parent_is_a_root_until_the_parent_is_back() -> None:
    tree = filled(("a", None), ("b", "a"))
    tree.remove(b"a")
    assert tree.oldest_leaf() == b"b"
    tree.add(b"a", None, 10, 0)
    assert evict_all(tree) == "ba"


def test_bytes_are_summed_and_a_block_that_is_added_twice_counts_once() -> None:
    tree = filled(("a", None), ("b", "a"))
    tree.add(b"a", None, 10, 9)
    assert (len(tree), tree.num_bytes, tree.used_ns(b"a")) == (2, 20, 9)
    tree.remove(b"b")
    tree.remove(b"b")
    assert (len(tree), tree.num_bytes) == (1, 10)


def test_a_use_is_unsaved_until_it_is_marked() -> None:
    tree = filled(("a", None))
    tree.touch(b"a", 50)
    assert not tree.is_unsaved(b"a", 50)
    assert tree.is_unsaved(b"a", 49)
    tree.mark_saved(b"a")
    assert not tree.is_unsaved(b"a", 0)


def test_many_uses_keep_the_order_small() -> None:
    tree = filled(("a", None), ("b", None))
    for time in range(2, 10_000):
        tree.touch(b"ab"[time % 2 :][:1], time)
    tree.validate()
    assert len(tree._oldest) < 100
    assert evict_all(tree) == "ab"


@pytest.mark.parametrize("depth", [1, 50])
def test_an_empty_tree_has_no_leaf(depth: int) -> None:
    tree = filled(*[(str(i), str(i - 1) if i else None) for i in range(depth)])
    evict_all(tree)
    assert (len(tree), tree.num_bytes, tree.oldest_leaf()) == (0, 0, None)
