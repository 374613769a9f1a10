"""The bounds of ``benchmarks/copies_per_transfer.py``, which measures no time, as a test."""

import pytest

from benchmarks.churn import Workload
from benchmarks.copies_per_transfer import MAX_COPIES, measure


@pytest.mark.parametrize("workload", list(Workload))
def test_a_request_between_two_churned_pools_moves_in_few_copies(workload: Workload) -> None:
    segments, free_lists = measure(workload, num_pairs=1)
    p50, maximum = MAX_COPIES[workload]
    assert segments.p50 <= p50
    assert segments.maximum <= maximum
    if workload is not Workload.WHOLE:
        assert free_lists.p50 > 12, "a plain free list needs about one for each of the 16 blocks"


def test_the_targets_are_those_that_the_project_promises() -> None:
    assert MAX_COPIES[Workload.WHOLE] == (1, 1)
    assert MAX_COPIES[Workload.CACHED] == MAX_COPIES[Workload.SINGLE] == (5, 12)
