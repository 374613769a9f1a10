"""Cutting a step into passes over a small ring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.interface import StepRow
from common.engine.layerwise.passes import plan_passes

BLOCK_SIZE = 4


def test_a_pass_knows_what_comes_and_what_goes() -> None:
    rows = [StepRow([1] * 6, 5, [7, 3, 9]), StepRow([1] * 4, 4, [7, 5])]
    (only,) = plan_passes(rows, BLOCK_SIZE, 4)
    assert only.numbers == (0, 1)
    assert [list(row.block_table) for row in only.rows] == [[0, 1, 2], [0, 3]]
    # 5 earlier tokens lie in blocks 7 and 3, new ones in 3 and 9; the second row shares block 7.
    assert only.loads == ((7, 0), (3, 1))
    assert only.stores == ((3, 1), (9, 2), (5, 3))
    assert only.num_blocks == 4


def test_rows_that_do_not_fit_together_follow_each_other() -> None:
    rows = [StepRow([1] * 8, 0, [1, 2]), StepRow([1] * 8, 0, [3, 4]), StepRow([1], 8, [3, 4, 5])]
    passes = plan_passes(rows, BLOCK_SIZE, 3)
    assert [each.numbers for each in passes] == [(0,), (1, 2)]
    assert [each.num_blocks for each in passes] == [2, 3]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (StepRow([1] * 9, 0, [1, 2, 3]), "row 0 needs 3 blocks of the ring, which has 2"),
        (StepRow([1] * 5, 0, [1]), "row 0: 1 blocks, but its tokens need 2"),
    ],
)
def test_a_row_that_cannot_be_held_is_named(row: StepRow, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_passes([row], BLOCK_SIZE, 2)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(8, 12),
)
def test_every_row_is_in_one_pass_with_all_that_it_reads_and_writes(
    shapes: list[tuple[int, int]], num_places: int
) -> None:
    rows = []
    for number, (start, count) in enumerate(shapes):
        blocks = -(-(start + count) // BLOCK_SIZE)
        rows.append(StepRow([1] * count, start, range(100 * number, 100 * number + blocks)))
    passes = plan_passes(rows, BLOCK_SIZE, num_places)
    assert [number for each in passes for number in each.numbers] == list(range(len(rows)))
    for each in passes:
        assert each.num_blocks <= num_places
        moved = {ring for _, ring in (*each.loads, *each.stores)}
        assert moved == set(range(each.num_blocks))
        for number, local in zip(each.numbers, each.rows, strict=True):
            there = {ring: pool for pool, ring in (*each.loads, *each.stores)}
            assert [there[block] for block in local.block_table] == list(rows[number].block_table)
