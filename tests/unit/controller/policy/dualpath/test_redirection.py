"""Moving waiting requests away from hot places."""

from hypothesis import given
from hypothesis import strategies as st

from services.controller.policy.dualpath.engines import GroupId, QueuedRequest
from services.controller.policy.dualpath.redirection import HOT_FACTOR, Place, redirections


def requests(*tokens: int, name: str = "r") -> list[QueuedRequest]:
    return [QueuedRequest(f"{name}{n}", size, size) for n, size in enumerate(tokens)]


def place(name: int, tokens: int, *waiting: int, pool: int = 1000) -> Place:
    return Place(GroupId(name), 1, tokens, pool, requests(*waiting, name=f"{name}-"))


def moves(places: list[Place], **options: float) -> list[tuple[str, int, int]]:
    found = redirections(places, **options)
    return [(move.request.request_id, move.source, move.target) for move in found]


def test_the_newest_leave_a_hot_place_for_the_emptiest_until_it_is_hot_no_more() -> None:
    places = [place(0, 400, 50, 60, 70), place(1, 100), place(2, 40)]
    # The mean is 180: hot is above 270.
    assert moves(places) == [("0-2", 0, 2), ("0-1", 0, 1)]
    assert [one.num_tokens for one in places] == [270, 160, 110]


def test_nothing_moves_while_no_place_has_far_more_than_its_share() -> None:
    assert moves([place(0, 149, 40), place(1, 51)]) == []
    assert moves([place(0, 400, 50), place(1, 0)], min_tokens=400) == []


def test_what_would_only_make_another_place_as_hot_stays() -> None:
    assert moves([place(0, 400, 400), place(1, 0)]) == []


def test_a_request_moves_only_where_a_pool_can_hold_it() -> None:
    assert moves([place(0, 400, 50), place(1, 0, pool=49), place(2, 20)]) == [("0-0", 0, 2)]


def test_a_round_moves_no_more_than_it_may() -> None:
    places = [place(0, 400, *[10] * 30), place(1, 0)]
    assert len(redirections(places, max_moves=3)) == 3


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 200), st.lists(st.integers(1, 80), max_size=8)),
        min_size=1,
        max_size=6,
    )
)
def test_moves_keep_all_requests_and_never_raise_the_largest_load(
    drawn: list[tuple[int, int, list[int]]],
) -> None:
    places = [
        Place(GroupId(n), engines, running + sum(sizes), 1000, requests(*sizes, name=f"{n}-"))
        for n, (engines, running, sizes) in enumerate(drawn)
    ]
    before, total = max(one.load for one in places), sum(one.num_tokens for one in places)
    mean = total / sum(one.num_engines for one in places)
    found = redirections(places)
    assert sum(one.num_tokens for one in places) == total
    assert max(one.load for one in places) <= before
    moved = [move.request.request_id for move in found]
    assert len(moved) == len(set(moved))
    assert not found or before > HOT_FACTOR * mean
    assert all(move.source != move.target for move in found)
