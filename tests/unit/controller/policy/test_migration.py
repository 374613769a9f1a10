from hypothesis import given
from hypothesis import strategies as st

from common.ids import RequestId
from services.controller.policy.migration import (
    MAX_MOVING,
    MAX_TARGET_SHARE,
    PRESSURE,
    DecodeView,
    plan_migrations,
)
from services.controller.policy.views import WorkerView
from tests.unit.controller.policy.builders import BROKEN, UNKNOWN, WORKS, C, D, P, key, worker


def decode(name: str, where: str, blocks: int = 30, *, is_movable: bool = True) -> DecodeView:
    return DecodeView(RequestId(name), key(where), blocks, is_movable)


def moves(
    workers: list[WorkerView], decodes: list[DecodeView], num_moving: int = 0
) -> list[tuple[str, str, str]]:
    planned = plan_migrations(workers, decodes, num_moving)
    return [(move.request_id, move.source[0], move.target[0]) for move in planned]


def test_a_full_pool_gives_its_largest_decodes_away_until_it_is_relieved() -> None:
    workers = [worker("d0", D, used=930), worker("d1", D)]
    decodes = [decode("small", "d0", 10), decode("large", "d0", 60), decode("middle", "d0", 40)]
    assert moves(workers, decodes) == [("large", "d0", "d1"), ("middle", "d0", "d1")]


def test_at_ninety_percent_nothing_moves_yet() -> None:
    assert moves([worker("d0", D, used=900), worker("d1", D)], [decode("r", "d0")]) == []


def test_a_draining_worker_gives_all_away_a_few_at_once() -> None:
    workers = [worker("d0", D, used=100, is_draining=True), worker("d1", D)]
    decodes = [decode(f"r{n}", "d0", 10) for n in range(6)]
    assert len(moves(workers, decodes)) == MAX_MOVING
    assert len(moves(workers, decodes, num_moving=MAX_MOVING - 1)) == 1
    assert moves(workers, decodes, num_moving=MAX_MOVING) == []


def test_draining_goes_before_relief() -> None:
    full, drained = worker("d0", D, used=999), worker("d1", D, used=100, is_draining=True)
    decodes = [decode("a", "d0", 100), *(decode(f"b{n}", "d1", 20) for n in range(4))]
    planned = moves([full, drained, worker("d2", D)], decodes)
    assert [source for _, source, _ in planned] == ["d1"] * 4


def test_the_target_has_most_room_and_a_pair_that_is_not_broken() -> None:
    source = worker("d0", D, used=950, pairings={"d1": BROKEN, "d2": UNKNOWN, "d3": UNKNOWN})
    others = [worker("d1", D), worker("d2", D, used=200), worker("d3", D, used=100)]
    assert moves([source, *others], [decode("r", "d0", 100)]) == [("r", "d0", "d3")]
    source = worker("d0", D, used=950, pairings={"d2": WORKS})
    assert moves([source, *others], [decode("r", "d0", 100)]) == [("r", "d0", "d2")]


def test_planned_moves_take_their_room() -> None:
    source = worker("d0", D, used=990)
    workers = [source, worker("d1", D, used=700), worker("d2", D, used=710)]
    decodes = [decode("a", "d0", 80), decode("b", "d0", 70)]
    assert moves(workers, decodes) == [("a", "d0", "d1"), ("b", "d0", "d2")]


def test_nothing_moves_where_it_would_press_the_target() -> None:
    assert moves([worker("d0", D, used=950), worker("d1", D, used=790)], [decode("r", "d0")]) == []


def test_who_may_not_decode_gets_nothing() -> None:
    source = worker("d0", D, used=950)
    others = [
        worker("p", P),
        worker("c", C),
        worker("d1", D, is_draining=True),
        worker("d2", D, has_heartbeat=False),
    ]
    assert moves([source, *others], [decode("r", "d0")]) == []
    helper = worker("helper", P, may_decode=True)
    assert moves([source, *others, helper], [decode("r", "d0")]) == [("r", "d0", "helper")]


def test_combined_workers_exchange_decodes_among_themselves() -> None:
    workers = [worker("c0", C, is_draining=True), worker("d", D), worker("c1", C)]
    assert moves(workers, [decode("r", "c0")]) == [("r", "c0", "c1")]


def test_what_cannot_be_moved_stays() -> None:
    workers = [worker("d0", D, is_draining=True), worker("d1", D)]
    assert moves(workers, [decode("r", "d0", is_movable=False)]) == []


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 300)), max_size=20),
    st.integers(0, 6),
)
def test_moves_are_few_and_never_press_their_targets(
    pools: list[tuple[int, bool]], held: list[tuple[int, int]], num_moving: int
) -> None:
    workers = [
        worker(f"d{n}", D, used=used, is_draining=is_draining)
        for n, (used, is_draining) in enumerate(pools)
    ]
    decodes = [
        decode(f"r{n}", f"d{where}", blocks)
        for n, (where, blocks) in enumerate(held)
        if where < len(workers)
    ]
    planned = plan_migrations(workers, decodes, num_moving)
    assert len(planned) <= max(0, MAX_MOVING - num_moving)
    assert len({move.request_id for move in planned}) == len(planned)
    for view in workers:
        gained = sum(move.num_blocks for move in planned if move.target == view.key)
        is_source = any(move.source == view.key for move in planned)
        assert not (gained and view.is_draining)
        if gained:
            assert view.used_blocks + gained <= PRESSURE * view.total_blocks
            assert not is_source
        if is_source:
            assert view.is_draining or view.used_share > PRESSURE
    drains = {view.key for view in workers if view.is_draining}
    if not any(move.source in drains for move in planned):
        for move in planned:
            target = next(view for view in workers if view.key == move.target)
            assert target.used_blocks + move.num_blocks <= MAX_TARGET_SHARE * target.total_blocks
