import pytest

from common.kv.runs import contiguous_ratio, to_blocks, to_runs


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([], []),
        ([7], [(7, 1)]),
        ([5, 6, 2], [(5, 2), (2, 1)]),
        ([3, 2, 1], [(3, 1), (2, 1), (1, 1)]),
        ([0, 1, 2, 3], [(0, 4)]),
        ([4, 5, 5, 6], [(4, 2), (5, 2)]),
    ],
)
def test_neighbours_join_in_the_given_order(blocks: list[int], runs: list[tuple[int, int]]) -> None:
    assert to_runs(blocks) == runs
    assert to_blocks(runs) == blocks


@pytest.mark.parametrize(
    ("blocks", "ratio"),
    [([], 1.0), ([9], 1.0), ([1, 2, 3], 1.0), ([1, 3, 5], 0.0), ([1, 2, 9, 10], 2 / 3)],
)
def test_the_contiguous_ratio_is_the_share_of_neighbouring_pairs(
    blocks: list[int], ratio: float
) -> None:
    assert contiguous_ratio(blocks) == pytest.approx(ratio)
