"""Groups that fetch, requests that get both engines, and who reads."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.policy.dualpath.engines import (
    EngineGroup,
    EngineId,
    EngineReport,
    Fetch,
    GroupId,
    NodeId,
    QueuedRequest,
    Side,
)
from services.controller.policy.dualpath.scheduler import DualPathScheduler
from services.controller.policy.dualpath.thresholds import Thresholds

PREFILLS, DECODES, OTHERS = GroupId(0), GroupId(1), GroupId(2)
POOL = 100


def group(name: GroupId, side: Side, first: int, count: int = 2) -> EngineGroup:
    """Engines of one node, which has the group's number."""
    ids = [EngineId(first + n) for n in range(count)]
    return EngineGroup(name, side, dict.fromkeys(ids, NodeId(name)))


GROUPS = [
    group(PREFILLS, Side.PREFILL, 0),
    group(DECODES, Side.DECODE, 10),
    group(OTHERS, Side.DECODE, 20),
]


def scheduler(beta: int = 1000) -> DualPathScheduler:
    return DualPathScheduler(GROUPS, Thresholds(1000, beta))


def fetch(
    name: GroupId,
    *tokens: int,
    free: int = POOL,
    reads: Mapping[int, int] | None = None,
) -> Fetch:
    first = {PREFILLS: 0, DECODES: 10, OTHERS: 20}[name]
    reports = [
        EngineReport(EngineId(first + n), 0, held, free, POOL)
        for n, held in enumerate(tokens or (0, 0))
    ]
    return Fetch(name, tuple(reports), {NodeId(n): q for n, q in (reads or {}).items()})


def request(name: str, tokens: int = 10, blocks: int = 1, stored: int = 0) -> QueuedRequest:
    return QueuedRequest(name, tokens, blocks, stored)


def test_a_request_with_both_engines_is_placed_and_read_on_the_side_with_less_to_read() -> None:
    under_test = scheduler()
    under_test.submit(request("a", stored=640))
    first = under_test.fetch(fetch(PREFILLS, 5, 3, reads={0: 7}))
    assert [(one.engine, one.category) for one in first.assigned] == [(1, "C2")]
    assert first.placed == ()
    second = under_test.fetch(fetch(DECODES, reads={1: 6}))
    assert [one.side for one in second.assigned] == [Side.DECODE]
    (placed,) = second.placed
    assert (placed.prefill, placed.decode, placed.reads) == (1, 10, Side.DECODE)
    assert dict(placed.inputs) == {"prefill_read_queue": 7, "decode_read_queue": 6}
    assert under_test.read_queue(NodeId(1)) == 646
    assert under_test.num_waiting == (0, 0)


def test_a_read_counts_at_once_and_until_the_next_report() -> None:
    under_test = scheduler()
    for name in "abc":
        under_test.submit(request(name, stored=100))
    under_test.fetch(fetch(PREFILLS))
    paths = [placed.reads for placed in under_test.fetch(fetch(DECODES)).placed]
    # Equal queues: the prefill side; then the decode side's is shorter; then they are equal again.
    assert paths == [Side.PREFILL, Side.DECODE, Side.PREFILL]
    under_test.fetch(fetch(PREFILLS, reads={0: 30}))
    assert under_test.read_queue(NodeId(0)) == 30


def test_where_nothing_is_stored_nothing_is_read() -> None:
    under_test = scheduler()
    under_test.submit(request("a"))
    under_test.fetch(fetch(DECODES))
    (placed,) = under_test.fetch(fetch(PREFILLS)).placed
    assert (placed.reads, placed.reason) == (None, "nothing is stored")


def test_prompts_wait_while_every_engine_has_more_than_beta() -> None:
    under_test = scheduler(beta=100)
    for name in "ab":
        under_test.submit(request(name, tokens=60))
    assert under_test.fetch(fetch(PREFILLS, 101, 101)).assigned == ()
    found = under_test.fetch(fetch(PREFILLS, 90, 101)).assigned
    assert [one.request.request_id for one in found] == ["a"]
    assert under_test.num_waiting == (1, 2)


def test_groups_that_were_not_heard_of_get_nothing_and_others_by_their_tokens() -> None:
    under_test = scheduler()
    under_test.fetch(fetch(DECODES, 100, 100))
    for name in "ab":
        under_test.submit(request(name))
    # The first fetch of the other group: it has fewer tokens, and so gets both.
    found = under_test.fetch(fetch(OTHERS, 0, 0)).assigned
    assert [one.request.request_id for one in found] == ["a", "b"]
    under_test.submit(request("c"))
    assert [one.engine for one in under_test.fetch(fetch(DECODES, 0, 9)).assigned] == [10]


def test_what_waits_for_a_group_counts_as_its_load() -> None:
    under_test = scheduler()
    under_test.fetch(fetch(DECODES, 0, 0, free=0))
    under_test.fetch(fetch(OTHERS, 5, 0, free=0))
    for name in "abcd":
        under_test.submit(request(name))
    under_test.fetch(fetch(DECODES, 0, 0, free=0))
    assert [one.request.request_id for one in under_test.fetch(fetch(DECODES)).assigned] == [
        "a",
        "c",
    ]
    assert [one.request.request_id for one in under_test.fetch(fetch(OTHERS)).assigned] == [
        "b",
        "d",
    ]


def test_what_was_assigned_counts_once_until_the_next_report() -> None:
    under_test = scheduler()
    under_test.fetch(fetch(OTHERS, 15, 0))
    under_test.fetch(fetch(DECODES))
    under_test.submit(request("a"))
    assert [one.engine for one in under_test.fetch(fetch(DECODES)).assigned] == [10]
    under_test.submit(request("b"))
    # 10 tokens of the one group against 15 of this one: "b" is the other's.
    assert under_test.fetch(fetch(OTHERS, 15, 0)).assigned == ()
    under_test.submit(request("c"))
    # And now it has 20: "c" stays here.
    found = under_test.fetch(fetch(OTHERS, 15, 0)).assigned
    assert [one.request.request_id for one in found] == ["c"]


def test_what_waited_for_a_dead_group_goes_to_another_before_all_newer_ones() -> None:
    under_test = scheduler()
    under_test.fetch(fetch(DECODES, free=0))
    for name in "ab":
        under_test.submit(request(name))
    under_test.fetch(fetch(DECODES, free=0))
    under_test.submit(request("c"))
    under_test.remove_group(DECODES)
    found = under_test.fetch(fetch(OTHERS)).assigned
    assert [one.request.request_id for one in found] == ["a", "b", "c"]
    with pytest.raises(KeyError):
        under_test.fetch(fetch(DECODES))


@pytest.mark.parametrize(("dead", "other"), [(PREFILLS, DECODES), (DECODES, PREFILLS)])
def test_a_request_with_an_engine_of_a_dead_group_alone_gets_another(
    dead: GroupId, other: GroupId
) -> None:
    more = EngineGroup(GroupId(7), GROUPS[dead].side, {EngineId(70): NodeId(7)})
    under_test = DualPathScheduler([*GROUPS[:2], more], Thresholds(1000, 1000))
    under_test.submit(request("a", stored=5))
    assert len(under_test.fetch(fetch(dead)).assigned) == 1
    under_test.submit(request("b", stored=5))
    under_test.remove_group(dead)
    report = EngineReport(EngineId(70), 0, 0, POOL, POOL)
    found = under_test.fetch(Fetch(GroupId(7), (report,)))
    assert [one.request.request_id for one in found.assigned] == ["a", "b"]
    assert [one.request.request_id for one in under_test.fetch(fetch(other)).placed] == ["a", "b"]


def test_a_queue_that_became_a_hot_spot_loses_its_newest_requests_once() -> None:
    under_test = scheduler()
    under_test.fetch(fetch(DECODES, free=0))
    for name in "abcd":
        under_test.submit(request(name))
    under_test.fetch(fetch(DECODES, free=0))
    assert under_test.num_waiting == (4, 4)
    under_test.fetch(fetch(OTHERS, free=0))
    moves = under_test.redirect()
    assert [(move.request.request_id, move.target) for move in moves] == [("d", 1)]
    found = under_test.fetch(fetch(OTHERS)).assigned
    assert [one.request.request_id for one in found] == ["d"]
    assert under_test.redirect() == [], "30 of 40 tokens is no hot spot any more"


def test_a_large_group_is_scheduled_in_cells() -> None:
    """16 engines on two nodes in cells of 8: the emptier cell first, then inside it."""
    nodes = {EngineId(n): NodeId(n // 8) for n in range(16)}
    decodes = EngineGroup(GroupId(0), Side.DECODE, nodes)
    under_test = DualPathScheduler([decodes], Thresholds(1, 1), max_cell_engines=8)
    # The emptiest engine is in the fuller cell.
    tokens = [0] + [100] * 7 + [50] * 8
    reports = [EngineReport(EngineId(n), 0, held, POOL, POOL) for n, held in enumerate(tokens)]
    under_test.submit(request("a"))
    (found,) = under_test.fetch(Fetch(GroupId(0), tuple(reports))).assigned
    assert found.engine == 8


@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(1, POOL)), min_size=1, max_size=30),
    st.integers(0, 200),
    st.lists(st.sampled_from([PREFILLS, DECODES, OTHERS]), max_size=30),
)
def test_nobody_starves_and_nobody_is_assigned_twice(
    sizes: list[tuple[int, int]], beta: int, order: list[GroupId]
) -> None:
    """Whatever the order of fetches: once engines are idle at each, all requests get both."""
    under_test = scheduler(beta)
    for n, (tokens, blocks) in enumerate(sizes):
        under_test.submit(request(f"r{n}", tokens, blocks, stored=tokens // 2))
    rounds = [*order, *[PREFILLS, DECODES, OTHERS] * len(sizes)]
    assigned: list[tuple[Side, str]] = []
    placed: list[str] = []
    for name in rounds:
        decisions = under_test.fetch(fetch(name))
        free = dict.fromkeys((one.engine for one in decisions.assigned), POOL)
        for one in decisions.assigned:
            assigned.append((one.side, one.request.request_id))
            free[one.engine] -= one.request.num_blocks
        if name is not PREFILLS:
            assert all(left >= 0 for left in free.values())
        placed += [one.request.request_id for one in decisions.placed]
    names = [f"r{n}" for n in range(len(sizes))]
    assert sorted(placed) == sorted(names)
    assert [name for side, name in assigned if side is Side.PREFILL] == names
    assert sorted(name for side, name in assigned if side is Side.DECODE) == sorted(names)
    assert under_test.num_waiting == (0, 0)
