"""DualPath's algorithms over the controller's workers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    request,
    worker,
)


def choose(workers: Sequence[WorkerView], asked: RequestView | None = None) -> Placement | None:
    return make_policy("dualpath").choose(ClusterView(workers), asked or request())


def sides(placement: Placement | None) -> tuple[str, str] | None:
    return placement and (placement.prefill.worker_id, placement.decode.worker_id)


def reading(view: WorkerView, queue: int, rate: float = 100.0, host: str = "") -> WorkerView:
    return replace(view, read_queue_tokens=queue, read_rate=rate, host=host or view.worker_id)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], None),
        ([worker("p", P)], None),
        ([worker("d", D)], None),
        ([worker("p", P), worker("d", D)], ("p", "d")),
        ([worker("c", C)], ("c", "c")),
        ([worker("p", P, 99), worker("d", D), worker("c", C)], ("c", "c")),
        ([worker("p", P, total=16), worker("d", D)], None),
        ([worker("p", P), worker("d", D, total=16)], None),
        ([worker("p", P, pairings={"d": BROKEN}), worker("d", D)], None),
        ([worker("p", P, pairings={"d": UNKNOWN}), worker("d", D)], ("p", "d")),
        ([worker("p", P, may_decode=True)], ("p", "p")),
        ([worker("d", D, may_prefill=True)], ("d", "d")),
        # a pair that works before one that may, and before a decode side with less to do
        (
            [
                worker("p0", P, pairings={"d": UNKNOWN}),
                worker("p1", P, 99, pairings={"d": WORKS}),
                worker("d", D),
            ],
            ("p1", "d"),
        ),
        (
            [worker("p", P, pairings={"d1": WORKS}), worker("d0", D), worker("d1", D, used=900)],
            ("p", "d1"),
        ),
        # no room: the request stays queued, unlike with the other policies
        ([worker("p", P), worker("d", D, used=1000)], None),
        # a helper keeps what it has room for
        (
            [worker("d0", D, used=500, may_prefill=True, pairings={"d1": WORKS}), worker("d1", D)],
            ("d0", "d0"),
        ),
        (
            [worker("d0", D, used=990, may_prefill=True, pairings={"d1": WORKS}), worker("d1", D)],
            ("d0", "d1"),
        ),
    ],
)
def test_it_places_where_roles_pools_and_pairs_allow_it(
    workers: list[WorkerView], expected: tuple[str, str] | None
) -> None:
    assert sides(choose(workers)) == expected


def test_a_short_queue_of_reads_goes_before_few_tokens() -> None:
    busy_link, idle_link = worker("p0", P, 10), worker("p1", P, 900)
    workers = [reading(busy_link, 301), reading(idle_link, 300), worker("d", D)]
    placement = choose(workers)
    assert placement is not None
    assert sides(placement) == ("p1", "d")
    inputs = dict(placement.inputs)
    assert (inputs["prefill_category"], inputs["alpha"], inputs["beta"]) == ("C2", 300, 5000)
    both_long = [reading(busy_link, 301), reading(idle_link, 301), worker("d", D)]
    placement = choose(both_long)
    assert sides(placement) == ("p0", "d")
    assert placement is not None
    assert dict(placement.inputs)["prefill_category"] == "C3"


def test_the_workers_of_a_host_share_its_queue_and_its_rate() -> None:
    shared = [
        reading(worker("p0", P), 0, host="a"),
        reading(worker("d0", D), 601, host="a"),
        reading(worker("p1", P, 9), 0, host="b"),
    ]
    assert sides(choose(shared)) == ("p1", "d0")
    shared[1] = reading(worker("d0", D), 600, host="a")
    assert sides(choose(shared)) == ("p0", "d0")


def test_of_equal_engines_of_a_host_the_one_with_fewer_reads_of_its_own_is_taken() -> None:
    workers = [
        reading(worker("p0", P), 9, host="a"),
        reading(worker("p1", P), 8, host="a"),
        worker("d", D),
    ]
    assert sides(choose(workers)) == ("p1", "d")


def test_beyond_beta_nobody_gets_a_prompt_and_within_it_even_who_has_much_to_compute() -> None:
    full = [worker("p", P, 5001), worker("d", D)]
    assert choose(full) is None
    assert sides(choose([worker("p", P, 5000, can_take_prompt=False), worker("d", D)])) == (
        "p",
        "d",
    )
    # beta is five seconds of its own rate
    assert sides(choose([worker("p", P, 5001, prefill_rate=1001.0), worker("d", D)])) == ("p", "d")


def test_a_cached_prefix_counts_as_tokens_that_need_no_computing() -> None:
    workers = [worker("p0", P), worker("p1", P, 600), worker("d", D)]
    assert sides(choose(workers, request(1024, p1=10))) == ("p1", "d")
    assert sides(choose(workers, request(1024, p1=9))) == ("p0", "d")


@pytest.mark.parametrize(
    ("read_rate", "waiting", "expected"),
    [
        # 960 tokens are read in the time of 96 to compute: so much is a cached prefix worth
        (10_000.0, 96, "p1"),
        (10_000.0, 97, "p0"),
        # reads are slower than computing: as if nothing were stored
        (500.0, 960, "p1"),
        (500.0, 961, "p0"),
        # not measured: loading is tried
        (0.0, 1, "p0"),
    ],
)
def test_what_is_loaded_counts_as_what_could_be_computed_in_that_time(
    read_rate: float, waiting: int, expected: str
) -> None:
    workers = [
        replace(worker("p0", P), read_rate=read_rate),
        replace(worker("p1", P, waiting), read_rate=read_rate),
        worker("d", D),
    ]
    asked = replace(request(1024, p1=15), num_stored_blocks=15)
    # Equal costs: the first by number is taken, so let p1 be one token better.
    workers[1] = replace(workers[1], uncomputed_tokens=waiting - 1)
    assert sides(choose(workers, asked)) == (expected, "d")


@pytest.mark.parametrize(("preset", "most"), [("small", 2500), ("medium", 5000), ("large", 10_000)])
def test_a_preset_says_how_far_ahead_a_worker_gets_work(preset: str, most: int) -> None:
    for tokens, is_placed in ((most, True), (most + 1, False)):
        cluster = ClusterView([replace(worker("p", P, tokens), prefill_rate=1000), worker("d", D)])
        found = make_policy("dualpath", preset=preset).choose(cluster, request())
        assert (found is not None) is is_placed
    with pytest.raises(KeyError, match="tiny"):
        make_policy("dualpath", preset="tiny")


def test_the_host_with_fewer_tokens_a_worker_gets_the_decode() -> None:
    workers = [
        worker("p", P),
        replace(worker("d0", D, used=30), host="a", num_unfinished=1),
        replace(worker("d1", D, used=50), host="a", num_unfinished=1),
        replace(worker("d2", D, used=45), host="b", num_unfinished=9),
    ]
    assert sides(choose(workers)) == ("p", "d0")
    workers[1] = replace(workers[1], used_blocks=41)
    assert sides(choose(workers)) == ("p", "d2")


def test_within_z_the_fewest_requests_decide_and_beyond_it_the_fewest_tokens() -> None:
    def cluster(*loads: tuple[int, int]) -> list[WorkerView]:
        decodes = [
            replace(worker(f"d{n}", D, used=used), num_unfinished=count)
            for n, (used, count) in enumerate(loads)
        ]
        return [worker("p", P), *decodes]

    # Z = 1.05 x (16 + 900) / 3 = 320.6 blocks
    low = choose(cluster((304, 2), (300, 5), (296, 9)))
    assert sides(low) == ("p", "d0")
    assert low is not None
    assert dict(low.inputs)["decode_category"] == "low_token"
    # 305 + 16 is beyond Z
    assert sides(choose(cluster((305, 2), (300, 5), (295, 9)))) == ("p", "d1")
    high = choose(cluster((1, 0), (2, 0), (3, 0)))
    assert sides(high) == ("p", "d0")
    assert high is not None
    assert dict(high.inputs)["decode_category"] == "high_token"


def test_among_decode_sides_of_equal_requests_the_one_with_the_prefix_is_taken() -> None:
    workers = [worker("p", P), *(worker(f"d{n}", D, used=400 + n) for n in range(3))]
    assert sides(choose(workers, request(128, d2=1))) == ("p", "d2")


def test_a_placement_says_what_it_was_made_from() -> None:
    placement = choose([worker("p", P, 7), worker("d", D, used=250)])
    assert placement is not None
    assert "fewest tokens" in placement.reason
    inputs = dict(placement.inputs)
    assert inputs["uncomputed_tokens"] == 7
    assert inputs["decode_used_share"] == 0.25
    assert inputs["alpha"] == "unknown"


@st.composite
def clusters(draw: st.DrawFn) -> list[WorkerView]:
    count = draw(st.integers(1, 4))
    names = [f"d{n}" for n in range(count)]
    workers = [
        replace(
            worker(name, D, used=draw(st.integers(0, 1000))),
            num_unfinished=draw(st.integers(0, 5)),
            host=draw(st.sampled_from("ab")),
        )
        for name in names
    ]
    for n in range(draw(st.integers(1, 4))):
        pairings = {name: draw(st.sampled_from((WORKS, UNKNOWN, BROKEN))) for name in names}
        view = worker(f"p{n}", P, draw(st.integers(0, 6000)), pairings=pairings)
        workers.append(reading(view, draw(st.integers(0, 500)), host=draw(st.sampled_from("abc"))))
    return workers


@given(clusters(), st.integers(1, 400))
def test_it_is_the_plain_reading_of_the_paper(workers: list[WorkerView], blocks: int) -> None:
    asked = request(64 * blocks)
    assert sides(choose(workers, asked)) == _plain_choice(workers, asked)


def _plain_choice(workers: list[WorkerView], asked: RequestView) -> tuple[str, str] | None:
    """The paper's steps one after the other, with nothing shared with the policy."""
    prefills = [w for w in workers if w.role is P and w.uncomputed_tokens <= 5 * 1000]

    def rank(view: WorkerView) -> tuple[bool, int, int, int, int]:
        mates = [w for w in workers if w.host == view.host]
        queue = sum(w.read_queue_tokens for w in mates)
        rate = sum(w.read_rate for w in mates)
        is_long = rate > 0 and queue > 3 * rate
        own = (view.read_queue_tokens, workers.index(view))
        return (is_long, view.uncomputed_tokens, queue, *own)

    for tier in (WORKS, UNKNOWN):
        for prefill in sorted(prefills, key=rank):
            allowed = [
                w for w in workers if w.role is D and prefill.pairing_with(w).value <= tier.value
            ]
            found = _plain_decode(workers, allowed, asked)
            if found:
                return prefill.worker_id, found
    return None


def _plain_decode(
    workers: list[WorkerView], allowed: list[WorkerView], asked: RequestView
) -> str | None:
    decodes = [w for w in workers if w.role is D]
    hosts = list(dict.fromkeys(w.host for w in decodes))

    def mean(host: str) -> float:
        used = [w.used_blocks for w in decodes if w.host == host]
        return sum(used) * 64 / len(used)

    for host in sorted(hosts, key=lambda name: (mean(name), hosts.index(name))):
        group = [w for w in decodes if w.host == host]
        length = asked.num_prompt_tokens
        total = sum(w.used_blocks * 64 for w in group) + length
        fits = [w for w in group if w in allowed and 1000 - w.used_blocks >= asked.num_blocks]
        low = [w for w in fits if 100 * len(group) * (w.used_blocks * 64 + length) <= 105 * total]
        if low:
            return min(
                low, key=lambda w: (w.num_unfinished, w.used_blocks, workers.index(w))
            ).worker_id
        if fits:
            return min(
                fits, key=lambda w: (w.used_blocks, w.num_unfinished, workers.index(w))
            ).worker_id
    return None
