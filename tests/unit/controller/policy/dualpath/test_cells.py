"""Cutting large groups into cells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.policy.dualpath.cells import split
from services.controller.policy.dualpath.engines import (
    EngineGroup,
    EngineId,
    GroupId,
    NodeId,
    Side,
    check_groups,
)


def group(*node_sizes: int, name: int = 0, first: int = 0, first_node: int = 0) -> EngineGroup:
    nodes = [NodeId(first_node + n) for n, size in enumerate(node_sizes) for _ in range(size)]
    ids = [EngineId(first + n) for n in range(len(nodes))]
    return EngineGroup(GroupId(name), Side.DECODE, dict(zip(ids, nodes, strict=True)))


def test_a_group_up_to_the_size_is_one_cell() -> None:
    assert split(group(8, 8), 16) == [tuple(range(16))]


def test_a_larger_one_is_cut_between_nodes() -> None:
    assert split(group(8, 8, 8), 16) == [(*range(8), *range(16, 24)), tuple(range(8, 16))]
    assert split(group(8), 3) == [tuple(range(8))]
    with pytest.raises(ValueError, match="at least one"):
        split(group(8), 0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 30))
def test_cells_hold_everyone_once_and_whole_nodes(sizes: list[int], most: int) -> None:
    whole = group(*sizes)
    cells = split(whole, most)
    assert sorted(engine for cell in cells for engine in cell) == sorted(whole.nodes)
    for cell in cells:
        nodes = {whole.nodes[engine] for engine in cell}
        assert all(engine in cell for engine, node in whole.nodes.items() if node in nodes)
        assert len(cell) <= most or len(nodes) == 1


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([group(8), group(8)], "two groups are called 0"),
        ([group(8), group(8, name=1)], "engine 0 is in two groups"),
        ([group(8), group(8, name=1, first=8)], "node 0 is in groups 0 and 1"),
        ([group()], "no engines"),
    ],
)
def test_groups_that_do_not_fit_together_are_refused(groups: list[EngineGroup], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_groups(groups)
