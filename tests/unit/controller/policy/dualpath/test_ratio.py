"""Prefill to decode nodes without a bottleneck."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.policy.dualpath.ratio import (
    NodeLinks,
    bottlenecks,
    demands,
    feasible_ratios,
)

PAPER = NodeLinks(
    num_engines=8,
    link_bytes_per_second=50e9,
    storage_bytes_per_second=50e9,
    memory_bytes_per_second=500e9,
)


def test_the_papers_nodes_may_be_from_one_to_seven_to_seven_to_two() -> None:
    assert feasible_ratios(PAPER) == pytest.approx((1 / 7, 7 / 2))
    for prefill, decode in [(1, 7), (7, 2), (2, 4), (1, 2), (1, 1), (48, 96), (44, 88)]:
        assert bottlenecks(PAPER, prefill, decode) == ()


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (1, 8, ["prefill link into memory"]),
        (11, 3, ["decode link into memory", "decode memory"]),
        (7, 1, ["decode link out of memory", "decode link into memory", "decode memory"]),
    ],
)
def test_a_ratio_beyond_that_is_told_with_what_is_full(
    prefill: int, decode: int, expected: list[str]
) -> None:
    assert [one.resource for one in bottlenecks(PAPER, prefill, decode)] == expected


def test_storage_as_fast_as_more_than_half_the_links_leaves_no_ratio() -> None:
    """The paper's text allows s up to g; what it counts allows half of that."""
    fast = NodeLinks(8, 50e9, 250e9, 5000e9)
    assert feasible_ratios(fast) is None
    assert "prefill link out of memory" in [one.resource for one in bottlenecks(fast, 1, 1)]


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 0)])
def test_both_sides_are_needed(prefill: int, decode: int) -> None:
    with pytest.raises(ValueError, match="cannot serve"):
        demands(PAPER, prefill, decode)


@given(
    st.integers(1, 16),
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 12),
)
def test_the_range_is_where_no_resource_is_asked_for_too_much(
    engines: int, storage: int, memory: int, prefill: int, decode: int
) -> None:
    """In units of one compute link, by the six inequalities as they stand in the paper's form."""
    g, s, m, ratio = engines, storage, memory, Fraction(prefill, decode)
    share = Fraction(s, g)
    holds = (
        2 * share <= 1
        and share * (1 + 1 / ratio) <= 1
        and share * (ratio + 2) <= 1
        and share * (2 * ratio + 1) <= 1
        and 2 * s <= m
        and (3 + 2 * ratio) * s <= m
    )
    links = NodeLinks(engines, 1.0, float(storage), float(memory))
    assert (not bottlenecks(links, prefill, decode)) == holds
    found = feasible_ratios(links)
    if holds:
        assert found is not None
        assert found[0] - 1e-9 <= ratio <= found[1] + 1e-9
    elif found is not None:
        assert not found[0] + 1e-9 < ratio < found[1] - 1e-9
