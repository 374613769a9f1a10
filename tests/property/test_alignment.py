"""Alignment against a brute-force optimum and a plain reference."""

import numpy as np
import pytest
from flowpath_native import align
from hypothesis import given, settings
from hypothesis import strategies as st

Copy = tuple[int, int, int]


def align_reference(src: list[int], dst: list[int], max_length: int = 0) -> list[Copy]:
    copies: list[Copy] = []
    for a, b in sorted(zip(src, dst, strict=True), key=lambda pair: (pair[1] - pair[0], pair[0])):
        if copies:
            from_block, to_block, length = copies[-1]
            continues = a == from_block + length and b == to_block + length
            if continues and (max_length == 0 or length < max_length):
                copies[-1] = (from_block, to_block, length + 1)
                continue
        copies.append((a, b, 1))
    return copies


def fewest_copies(pairs: set[tuple[int, int]]) -> int:
    """Try every set of contiguous copies, shortest plan first: exponential and obviously right."""
    if not pairs:
        return 0
    first = min(pairs)
    best = len(pairs)
    length = 0
    rest = set(pairs)
    while (pair := (first[0] + length, first[1] + length)) in pairs:
        rest.discard(pair)
        length += 1
        best = min(best, 1 + fewest_copies(rest))
    return best


@st.composite
def block_lists(draw: st.DrawFn, max_size: int = 40, top: int = 60) -> tuple[list[int], list[int]]:
    """Lists that are runs here and there, as real ones are; sources may repeat."""
    src: list[int] = []
    dst: list[int] = []
    used: set[int] = set()
    for _ in range(draw(st.integers(0, 8))):
        a, b, length = draw(st.tuples(st.integers(0, top), st.integers(0, top), st.integers(1, 9)))
        for i in range(length):
            if b + i not in used and len(src) < max_size:
                used.add(b + i)
                src.append(a + i)
                dst.append(b + i)
    order = draw(st.permutations(range(len(src)))) if draw(st.booleans()) else range(len(src))
    return [src[i] for i in order], [dst[i] for i in order]


def as_copies(rows: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> list[Copy]:
    assert rows.dtype == np.int32
    assert rows.shape == (len(rows), 3)
    return [(int(a), int(b), int(n)) for a, b, n in rows]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(block_lists(), st.integers(0, 5))
def test_alignment_equals_the_reference(
    lists: tuple[list[int], list[int]], max_length: int
) -> None:
    src, dst = lists
    expected = align_reference(src, dst, max_length)
    assert as_copies(align(src, dst, max_length)) == expected
    arrays = np.array(src, dtype=np.int32), np.array(dst, dtype=np.int32)
    assert as_copies(align(*arrays, max_length=max_length)) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(block_lists(max_size=7, top=6))
def test_no_plan_has_fewer_copies(lists: tuple[list[int], list[int]]) -> None:
    src, dst = lists
    assert len(align(src, dst)) == fewest_copies(set(zip(src, dst, strict=True)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(block_lists())
def test_copies_carry_exactly_the_given_pairs(lists: tuple[list[int], list[int]]) -> None:
    src, dst = lists
    carried = [(a + i, b + i) for a, b, n in as_copies(align(src, dst)) for i in range(n)]
    assert sorted(carried) == sorted(zip(src, dst, strict=True))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(block_lists(), st.data())
def test_a_repeated_target_is_refused_by_number(
    lists: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    src, dst = lists
    if not dst:
        return
    again = data.draw(st.sampled_from(dst))
    with pytest.raises(ValueError, match=rf"dst block {again} is given twice"):
        align([*src, data.draw(st.integers(0, 60))], [*dst, again])


@pytest.mark.parametrize("count", [255, 256, 3000, 100_000])
def test_long_permutations_equal_the_reference(count: int) -> None:
    """From 256 pieces on, the pieces are sorted by radix."""
    random = np.random.default_rng(count)
    src = random.permutation(count).astype(np.int32)
    dst = random.permutation(2 * count)[:count].astype(np.int32)
    keep = slice(None) if count <= 3000 else slice(0, 5000)
    src, dst = src[keep], dst[keep]
    assert as_copies(align(src, dst)) == align_reference(src.tolist(), dst.tolist())


def test_ids_at_the_top_of_their_range_keep_their_order() -> None:
    top = 2**31 - 1
    src, dst = [top, 0, top - 1], [0, top, 1]
    assert as_copies(align(src, dst)) == align_reference(src, dst)
