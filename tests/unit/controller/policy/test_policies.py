import pytest

from services.controller.policy.cluster_view import ClusterView
from services.controller.policy.policies import make_policy
from services.controller.policy.views import Placement, RequestView, WorkerView
from tests.unit.controller.policy.builders import (
    BROKEN,
    UNKNOWN,
    WORKS,
    C,
    D,
    P,
    key,
    request,
    worker,
)

NAMES = ("round_robin", "random", "least_loaded", "power_of_two", "prefix_aware", "flowkv")


def choose(name: str, workers: list[WorkerView], asked: RequestView) -> Placement | None:
    return make_policy(name).choose(ClusterView(workers), asked)


def sides(placement: Placement | None) -> tuple[str, str] | None:
    return placement and (placement.prefill.worker_id, placement.decode.worker_id)


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown policy 'best'"):
        make_policy("best")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], None),
        ([worker("p", P)], None),
        ([worker("d", D)], None),
        ([worker("p", P), worker("d", D)], ("p", "d")),
        ([worker("c", C)], ("c", "c")),
        ([worker("p", P), worker("c", C)], ("c", "c")),
        ([worker("p", P, total=16), worker("d", D)], None),
        ([worker("p", P), worker("d", D, total=16)], None),
        ([worker("p", P, can_take_prompt=False), worker("d", D)], None),
        ([worker("p", P, pairings={"d": BROKEN}), worker("d", D)], None),
        ([worker("p", P, pairings={"d": UNKNOWN}), worker("d", D)], ("p", "d")),
        # Help makes a worker able to do it all alone.
        ([worker("p", P, may_decode=True)], ("p", "p")),
        ([worker("d", D, may_prefill=True)], ("d", "d")),
    ],
)
def test_every_policy_places_where_roles_pools_time_and_pairs_allow_it(
    name: str, workers: list[WorkerView], expected: tuple[str, str] | None
) -> None:
    assert sides(choose(name, workers, request(1024))) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        # a pair that works before one that may
        (
            [worker("p", P, pairings={"d1": WORKS}), worker("d0", D), worker("d1", D, used=900)],
            ("p", "d1"),
        ),
        (
            [
                worker("p0", P, pairings={"d": UNKNOWN}),
                worker("p1", P, 99, pairings={"d": WORKS}),
                worker("d", D),
            ],
            ("p1", "d"),
        ),
        # room now before room later
        ([worker("p", P), worker("d0", D, used=990), worker("d1", D, used=970)], ("p", "d1")),
        # no room anywhere: it may come
        ([worker("p", P), worker("d", D, used=1000)], ("p", "d")),
        # a worker that has enough to compute gets nothing
        (
            [worker("p0", P, can_take_prompt=False), worker("p1", P, 400), worker("d", D)],
            ("p1", "d"),
        ),
    ],
)
def test_every_policy_prefers_what_works_and_has_room(
    name: str, workers: list[WorkerView], expected: tuple[str, str]
) -> None:
    assert sides(choose(name, workers, request(1024))) == expected


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker("p0", P, 10), worker("p1", P, 5), worker("d", D)], ("p1", "d")),
        ([worker("p0", P), worker("p1", P), worker("d", D)], ("p0", "d")),
        ([worker("p0", P, used=9), worker("p1", P), worker("d", D)], ("p1", "d")),
        ([worker("p", P), worker("d0", D, used=50), worker("d1", D, used=40)], ("p", "d1")),
        # a share, not a count: 300 of 1 000 is emptier than 200 of 500
        (
            [worker("p", P), worker("d0", D, used=200, total=500), worker("d1", D, used=300)],
            ("p", "d1"),
        ),
        ([worker("c0", C, 7), worker("c1", C, 3)], ("c1", "c1")),
        ([worker("p", P, 9), worker("d", D), worker("c", C, 1)], ("c", "c")),
        (
            [worker("p0", P, pairings={"d": BROKEN}), worker("p1", P, 99), worker("d", D)],
            ("p1", "d"),
        ),
    ],
)
def test_the_least_loaded_are_those_with_fewest_waiting_tokens_and_most_room(
    workers: list[WorkerView], expected: tuple[str, str]
) -> None:
    assert sides(choose("least_loaded", workers, request(1024))) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_placement_says_what_it_was_made_from(name: str) -> None:
    placement = choose(name, [worker("p", P, 7), worker("d", D, used=250)], request())
    assert placement is not None
    assert placement.reason
    assert dict(placement.inputs)["uncomputed_tokens"] == 7
    assert dict(placement.inputs)["decode_used_share"] == 0.25


def test_whether_waiting_can_help_is_told_apart_from_whether_there_is_time_now() -> None:
    busy = ClusterView([worker("p", P, can_take_prompt=False), worker("d", D)])
    assert make_policy("flowkv").choose(busy, request()) is None
    assert busy.can_serve(request())
    assert not busy.can_serve(request(64 * 1000))
    assert not ClusterView([worker("p", P)]).can_serve(request())
    assert not ClusterView([worker("p", P, pairings={"d": BROKEN}), worker("d", D)]).can_serve(
        request()
    )


def test_round_robin_takes_turns_on_both_sides() -> None:
    cluster = ClusterView([worker("p0", P), worker("d0", D), worker("d1", D), worker("p1", P)])
    policy = make_policy("round_robin")
    chosen = [sides(policy.choose(cluster, request())) for _ in range(3)]
    assert chosen == [("p0", "d0"), ("p1", "d1"), ("p0", "d0")]


def test_a_decode_worker_that_helps_keeps_the_prompt() -> None:
    cluster = ClusterView(
        [worker("d0", D, used=500, may_prefill=True, pairings={"d1": WORKS}), worker("d1", D)]
    )
    assert sides(make_policy("least_loaded").choose(cluster, request())) == ("d0", "d0")
    cluster.update(worker("d0", D, used=990, may_prefill=True, pairings={"d1": WORKS}))
    assert sides(make_policy("least_loaded").choose(cluster, request())) == ("d0", "d1")


@pytest.mark.parametrize("name", ["random", "power_of_two"])
def test_dice_of_one_seed_fall_alike_and_reach_everybody(name: str) -> None:
    workers = [worker(f"p{i}", P) for i in range(3)] + [worker(f"d{i}", D) for i in range(3)]
    cluster = ClusterView(workers)
    one, other = make_policy(name, seed=3), make_policy(name, seed=3)
    chosen = [sides(one.choose(cluster, request())) for _ in range(60)]
    assert chosen == [sides(other.choose(cluster, request())) for _ in range(60)]
    assert {pair and pair[0] for pair in chosen} == {"p0", "p1", "p2"}
    assert {pair and pair[1] for pair in chosen} == {"d0", "d1", "d2"}


def test_of_two_the_less_loaded_is_taken() -> None:
    cluster = ClusterView([worker("p0", P, 9), worker("p1", P, 5), worker("d", D)])
    policy = make_policy("power_of_two")
    assert {sides(policy.choose(cluster, request())) for _ in range(9)} == {("p1", "d")}


@pytest.mark.parametrize(
    ("waiting", "hit", "expected"),
    [(0, 10, "p1"), (600, 10, "p1"), (700, 10, "p0"), (700, 0, "p0")],
)
def test_a_prefix_is_worth_as_many_waiting_tokens_as_it_saves(
    waiting: int, hit: int, expected: str
) -> None:
    workers = [worker("p0", P), worker("p1", P, waiting), worker("d", D)]
    placement = choose("prefix_aware", workers, request(1024, p1=hit))
    assert sides(placement) == (expected, "d")


def test_among_equal_decode_sides_the_one_with_the_prefix_is_taken() -> None:
    workers = [worker("p", P), worker("d0", D), worker("d1", D)]
    assert sides(choose("prefix_aware", workers, request(1024, d1=9))) == ("p", "d1")


def test_a_removed_worker_is_gone_and_its_place_holds_nothing_of_it() -> None:
    cluster = ClusterView([worker("p", P, pairings={"d0": BROKEN}), worker("d0", D)])
    cluster.remove(key("d0"))
    cluster.remove(key("d0"))
    assert [view.worker_id for view in cluster] == ["p"]
    assert cluster.get(key("d0")) is None
    cluster.update(worker("d1", D))
    assert sides(make_policy("least_loaded").choose(cluster, request())) == ("p", "d1")
    assert len(cluster) == 2


def test_an_update_replaces_role_pairs_and_load() -> None:
    cluster = ClusterView([worker("p", P), worker("d0", D), worker("d1", D, used=10)])
    policy = make_policy("least_loaded")
    assert sides(policy.choose(cluster, request())) == ("p", "d0")
    cluster.update(worker("p", P, pairings={"d0": BROKEN}))
    assert sides(policy.choose(cluster, request())) == ("p", "d1")
    cluster.update(worker("d1", P))
    assert sides(policy.choose(cluster, request())) == ("d1", "d0")
