"""Flattening rows into one ragged batch."""

import numpy as np
import pytest

from common.engine.batch import flatten
from common.engine.interface import SampleSpec, StepRow
from common.sampling import SamplingParams

SPEC = SampleSpec(SamplingParams(seed=0, max_tokens=1), 0, (), ())


def test_short_rows_go_first_and_samples_know_their_rows() -> None:
    rows = [
        StepRow([10, 11, 12, 13, 14], 2, [7, 3], (SPEC, SPEC)),
        StepRow([20], 8, [1, 0, 5], (SPEC,)),
        StepRow([30, 31, 32, 33, 34, 35], 0, [2, 6]),
        StepRow([40, 41], 3, [4, 9], (SPEC,)),
    ]
    batch = flatten(rows, block_size=4, vocab_size=50)
    assert batch.token_ids.tolist() == [20, 40, 41, 10, 11, 12, 13, 14, 30, 31, 32, 33, 34, 35]
    assert batch.positions.tolist() == [8, 3, 4, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    assert batch.slots.tolist() == [20, 19, 36, 30, 31, 12, 13, 14, 8, 9, 10, 11, 24, 25]
    assert np.array_equal(batch.tables, [[1, 0, 5], [4, 9, 0], [4, 9, 0], [7, 3, 0], [2, 6, 0]])
    assert batch.chunks.tolist() == [[3, 8, 2], [8, 14, 0]]
    assert batch.sampled_tokens.tolist() == [0, 2, 7]
    assert batch.sampled_rows == (1, 3, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (StepRow([], 0, [0]), "row 1 has no tokens"),
        (StepRow([1], 4, [0]), "row 1: 1 blocks do not hold positions 4 to 4"),
        (StepRow([1], -1, [0]), "row 1: 1 blocks do not hold positions -1"),
        (StepRow([1, 50], 0, [0]), "row 1 has a token id outside of the vocabulary of 50"),
        (StepRow([-1], 0, [0]), "row 1 has a token id outside"),
    ],
)
def test_a_malformed_row_is_named(row: StepRow, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flatten([StepRow([1], 0, [0]), row], block_size=4, vocab_size=50)
