"""Alpha and beta."""

from math import inf

import pytest

from services.controller.policy.dualpath.thresholds import (
    LEAST_FACTOR,
    MOST_FACTOR,
    PRESETS,
    Adaptive,
    Thresholds,
)


def test_they_are_three_seconds_of_reads_and_five_of_computing_in_tokens() -> None:
    assert Thresholds.of(1000.0, 200.0) == Thresholds(3000.0, 1000.0)


def test_what_was_not_measured_holds_nobody_back() -> None:
    assert Thresholds.of(0.0, 0.0) == Thresholds(inf, inf)


def test_presets_grow_with_the_cluster_and_medium_is_the_papers() -> None:
    small, medium, large = (PRESETS[name] for name in ("small", "medium", "large"))
    assert (medium.read_seconds, medium.compute_seconds) == (3, 5)
    assert small.read_seconds < medium.read_seconds < large.read_seconds
    assert small.compute_seconds < medium.compute_seconds < large.compute_seconds
    assert Thresholds.of(1000.0, 200.0, small) == Thresholds(1500.0, 500.0)


@pytest.mark.parametrize(
    ("link_use", "compute_use", "expected"),
    [
        (0.9, 0.6, Adaptive(0.9, 1.0)),
        (0.8, 0.5, Adaptive(1.0, 1.0)),
        (0.4, 0.9, Adaptive(1.1, 0.9)),
    ],
)
def test_use_moves_them(link_use: float, compute_use: float, expected: Adaptive) -> None:
    assert Adaptive().after(link_use, compute_use) == expected


def test_they_stay_within_bounds_and_come_back() -> None:
    factors = Adaptive()
    for _ in range(100):
        factors = factors.after(1.0, 0.0)
    assert factors == Adaptive(LEAST_FACTOR, MOST_FACTOR)
    assert factors.applied_to(Thresholds(3000, 1000)) == Thresholds(1500, 2000)
    assert factors.after(0.0, 1.0).read_factor > LEAST_FACTOR
