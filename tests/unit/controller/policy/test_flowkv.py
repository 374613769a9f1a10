from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.fields import Role
from services.controller.policy.cluster_view import ClusterView
from services.controller.policy.estimates import (
    DEFAULT_PREFILL_RATE,
    Objectives,
    decode_score,
    decode_weight,
    link_rate,
    prefill_score,
)
from services.controller.policy.flowkv import COPY_SECONDS
from services.controller.policy.policies import make_policy
from services.controller.policy.views import Pairing, Placement, RequestView, WorkerView
from tests.unit.controller.policy.builders import BROKEN, WORKS, C, D, P, key, request, worker

POLICY = make_policy("flowkv")


def choose(workers: list[WorkerView], asked: RequestView) -> Placement:
    placement = POLICY.choose(ClusterView(workers), asked)
    assert placement is not None
    return placement


def sides(workers: list[WorkerView], asked: RequestView) -> tuple[str, str]:
    placement = choose(workers, asked)
    return placement.prefill.worker_id, placement.decode.worker_id


def test_queue_computation_and_transfer_make_the_estimate() -> None:
    workers = [worker("p", P, 500, links={"d": 1e8}), worker("d", D)]
    placement = choose(workers, request(1000, p=5, d=6))
    # 500 tokens wait and 1 000 - 320 are left, at 1 000 a second; 10 blocks of 1 MB at 100 MB/s
    assert placement.estimate_seconds == pytest.approx(0.5 + 0.68 + 0.1)
    assert dict(placement.inputs)["transfer_seconds"] == pytest.approx(0.1)


def test_the_shorter_wait_wins_unless_a_prefix_makes_up_for_it() -> None:
    workers = [worker("p0", P, 400), worker("p1", P), worker("d", D)]
    slow = [replace(view, link_rates={key("p1"): 1e3}) for view in workers]
    assert sides(slow, request(1024)) == ("p1", "d")
    assert sides(slow, request(1024, p0=5)) == ("p1", "d")
    assert sides(slow, request(1024, p0=10)) == ("p0", "d")


def test_a_fast_worker_gets_the_prompt_though_more_waits_there() -> None:
    workers = [worker("p0", P, 100), worker("p1", P, 800, prefill_rate=4000), worker("d", D)]
    assert sides(workers, request(1024)) == ("p1", "d")


def test_a_worker_that_was_not_measured_yet_counts_as_the_fastest() -> None:
    workers = [worker("p0", P), worker("p1", P, prefill_rate=0.0), worker("d", D)]
    assert sides(workers, request(1024)) == ("p0", "d")
    workers[0] = worker("p0", P, 1)
    assert sides(workers, request(1024)) == ("p1", "d")


def test_a_loaded_decode_side_is_spared() -> None:
    workers = [worker("p", P), worker("d0", D, decoding=40, step=0.04), worker("d1", D)]
    assert sides(workers, request(1024)) == ("p", "d1")


def test_an_idle_worker_is_not_judged_by_its_last_step() -> None:
    idle = worker("d", D, step=5.0)
    assert decode_score(idle, Objectives()) == 0
    assert decode_score(replace(idle, num_decoding=1), Objectives()) > 1


def test_what_the_decode_side_has_cached_is_not_moved() -> None:
    links = {"d0": 1e7, "d1": 1e7}
    workers = [worker("p", P, links=links), worker("d0", D), worker("d1", D, used=100)]
    assert sides(workers, request(1024)) == ("p", "d0")
    assert sides(workers, request(1024, d1=10)) == ("p", "d1")


def test_a_slow_link_is_avoided() -> None:
    links = {"d0": 1e6, "d1": 1e9}
    workers = [worker("p", P, links=links), worker("d0", D), worker("d1", D, used=300)]
    assert sides(workers, request(1024)) == ("p", "d1")


@pytest.mark.parametrize(
    ("tokens", "hit", "expected"),
    [
        (128, 0, ("d", "d")),
        (129, 0, ("p", "d")),
        (1024, 14, ("d", "d")),
        (1024, 13, ("p", "d")),
    ],
)
def test_a_decode_worker_computes_at_most_two_missing_blocks_itself(
    tokens: int, hit: int, expected: tuple[str, str]
) -> None:
    workers = [worker("p", P), worker("d", D)]
    assert sides(workers, request(tokens, d=hit, p=hit)) == expected


def test_a_decode_worker_computes_nothing_itself_where_roles_are_fixed_or_it_is_busy() -> None:
    workers = [worker("p", P), worker("d", D)]
    fixed = ClusterView(workers, has_fixed_roles=True)
    placement = POLICY.choose(fixed, request(64))
    assert placement is not None
    assert (placement.prefill.worker_id, placement.decode.worker_id) == ("p", "d")
    busy = [worker("p", P), worker("d", D, can_take_prompt=False)]
    assert sides(busy, request(64)) == ("p", "d")
    behind = [worker("p", P, pairings={"d": WORKS}), worker("d", D, 2000)]
    assert sides(behind, request(64)) == ("p", "d")


def test_a_helper_takes_long_prompts_when_the_prefill_workers_are_behind() -> None:
    prefill, helper = worker("p", P, 100, pairings={"d": WORKS}), worker("d", D, may_prefill=True)
    assert sides([prefill, helper], request(1024)) == ("d", "d")
    busy = replace(helper, uncomputed_tokens=3000)
    assert sides([prefill, busy], request(1024)) == ("p", "d")


def test_what_works_alone_goes_before_a_pair_that_is_not_known() -> None:
    workers = [worker("p", P), worker("d", D, 900, may_prefill=True)]
    assert sides(workers, request(1024)) == ("d", "d")


def test_a_missing_prefix_is_copied_where_that_is_cheaper_than_computing_it() -> None:
    holder = worker("p0", P, 4000, links={"p1": 1e9})
    placement = choose([holder, worker("p1", P), worker("d", D)], request(1024, p0=12))
    assert placement.prefill.worker_id == "p1"
    assert placement.copy_from == key("p0")
    assert placement.num_copy_blocks == 12
    slow = replace(holder, link_rates={key("p1"): 1e7})
    placement = choose([slow, worker("p1", P), worker("d", D)], request(1024, p0=12))
    assert (placement.copy_from, placement.num_copy_blocks) == (None, 0)


def test_a_prefix_that_is_computed_as_fast_as_it_is_asked_for_is_not_copied() -> None:
    fast = 64 * 12 / (COPY_SECONDS + 0.012)  # as fast as the copy of 12 blocks of 1 MB at 1 GB/s
    for rate, is_copied in ((0.45 * fast, True), (0.55 * fast, False)):
        rates = {"prefill_rate": rate, "links": {"p1": 1e9}}
        workers = [worker("p0", P, 4000, **rates), worker("p1", P, **rates), worker("d", D)]
        placement = choose(workers, request(1024, p0=12))
        assert placement.prefill.worker_id == "p1"
        assert (placement.copy_from is not None) == is_copied


def test_a_decode_worker_gives_a_prefix_to_a_prefill_worker() -> None:
    workers = [worker("p", P), worker("d", D, links={"p": 1e9})]
    placement = choose(workers, request(1024, d=10))
    assert (placement.prefill.worker_id, placement.copy_from) == ("p", key("d"))
    assert placement.num_copy_blocks == 10


def test_nothing_is_copied_over_a_broken_pair_nor_for_one_block() -> None:
    broken = worker("p0", P, 4000, pairings={"p1": BROKEN, "d": WORKS})
    workers = [broken, worker("p1", P, pairings={"d": WORKS}), worker("d", D)]
    assert choose(workers, request(1024, p0=12)).copy_from is None
    workers[0] = worker("p0", P, 4000)
    assert choose(workers, request(1024, p0=1)).copy_from is None


def test_a_prompt_that_is_stored_goes_to_the_idle_worker_not_to_where_it_is_cached() -> None:
    workers = [
        replace(worker("p0", P, 400), has_store=True, read_rate=100_000.0),
        replace(worker("p1", P), has_store=True, read_rate=100_000.0),
        worker("d", D),
    ]
    slow = [replace(view, link_rates={key("p1"): 1e3}) for view in workers]
    assert sides(slow, request(1024, p0=10)) == ("p0", "d")
    placement = choose(slow, replace(request(1024, p0=10), num_stored_blocks=10))
    assert (placement.prefill.worker_id, placement.copy_from) == ("p1", None)
    # 384 tokens are computed at 1 000 a second, 640 read at 100 000; 16 blocks go over the link.
    assert placement.estimate_seconds == pytest.approx(0.384 + 0.0064 + 0.016)


# An L20 computes about as fast as an H20 is slow, and the H20 has five times its memory bandwidth
# (FlowKV's heterogeneous case); rates of an 8B model, per worker.
L20 = {"prefill_rate": 12_000.0, "step": 0.030, "decode_rate": 900.0}
H20 = {"prefill_rate": 8_000.0, "step": 0.011, "decode_rate": 2600.0}


def test_prefill_goes_to_the_compute_rich_and_decode_to_the_bandwidth_rich() -> None:
    workers = [
        worker("l20-p", P, **L20),
        worker("h20-p", P, **H20),
        worker("l20-d", D, decoding=8, **L20),
        worker("h20-d", D, decoding=8, **H20),
    ]
    for tokens in (1024, 8192):
        assert sides(workers, request(tokens)) == ("l20-p", "h20-d")
    idle = [replace(view, num_decoding=0) for view in workers]
    assert sides(idle, request(1024)) == ("l20-p", "h20-d")


def test_unequal_workers_get_work_in_proportion_to_their_speed() -> None:
    cluster = ClusterView([worker("l20", P, **L20), worker("h20", P, **H20), worker("d", D)])
    counts = {"l20": 0, "h20": 0}
    for _ in range(100):
        placement = POLICY.choose(cluster, request(1024))
        assert placement is not None
        prefill = placement.prefill
        counts[prefill.worker_id] += 1
        cluster.update(replace(prefill, uncomputed_tokens=prefill.uncomputed_tokens + 1024))
    assert counts == {"l20": 60, "h20": 40}


def transfer_seconds(source: WorkerView, target: WorkerView, num_blocks: int) -> float:
    if source.key == target.key:
        return 0.0
    return num_blocks * source.block_bytes / link_rate(source, target)


def ttft_seconds(p: WorkerView, d: WorkerView, asked: RequestView, rate: float) -> float:
    uncached = asked.num_uncached(asked.hits.get(p.key, 0))
    missing = asked.num_prompt_blocks - asked.hits.get(d.key, 0)
    return (p.uncomputed_tokens + uncached) / rate + transfer_seconds(p, d, missing)


def load_seconds(view: WorkerView, asked: RequestView) -> float:
    missing = max(0, asked.num_stored_blocks - asked.hits.get(view.key, 0)) * asked.block_size
    if not view.has_store:
        return inf
    return (view.read_queue_tokens + missing) / view.read_rate if view.read_rate else 0.0


def gained_by_loading(
    workers: list[WorkerView], p: WorkerView, asked: RequestView, fastest: float
) -> float:
    stored = max(0, asked.num_stored_blocks - asked.hits.get(p.key, 0)) * asked.block_size
    saved = stored / (p.prefill_rate or fastest)
    readers = [p, *(w for w in workers if w.can_decode)]
    load = min(load_seconds(view, asked) for view in readers)
    return saved - load if load < 0.9 * saved else 0.0


def brute_force(workers: list[WorkerView], asked: RequestView, *, is_fixed: bool) -> float:
    """The cost of the best choice, from the formulas and every pair."""
    objectives = Objectives()
    fastest = max((w.prefill_rate for w in workers), default=0) or DEFAULT_PREFILL_RATE
    holder = max(workers, key=lambda w: asked.hits.get(w.key, 0))
    best = inf
    for p in workers:
        for d in workers:
            if not (p.can_hold(asked.num_blocks) and d.can_hold(asked.num_blocks)):
                continue
            if not (d.can_decode and p.can_take_prompt):
                continue
            if p.key != d.key and (C in (p.role, d.role) or p.pairing_with(d) is Pairing.BROKEN):
                continue
            tier = 0.0
            tier += 4e6 if not d.has_room(asked.num_blocks) else 0
            tier += 2e6 if decode_score(d, objectives) >= 1 else 0
            weight = decode_weight(d, decode_score(d, objectives), objectives)
            seconds = ttft_seconds(p, d, asked, p.prefill_rate or fastest)
            hit = asked.hits.get(p.key, 0)
            is_little = asked.num_prompt_tokens - hit * asked.block_size <= 2 * asked.block_size
            if is_little and p.key == d.key and p.role is Role.DECODE and not is_fixed:
                best = min(best, seconds * weight + tier)
            if not p.can_prefill:
                continue
            gain = asked.hits.get(holder.key, 0) - hit
            copied = COPY_SECONDS + transfer_seconds(holder, p, gain)
            saved = gain * asked.block_size / (p.prefill_rate or fastest)
            may_copy = C not in (p.role, holder.role) and holder.pairing_with(p) is not BROKEN
            if gain >= 2 and copied <= saved / 2 and may_copy:
                seconds += copied - saved
            without = ttft_seconds(p, d, asked, p.prefill_rate or fastest)
            seconds = min(seconds, without - gained_by_loading(workers, p, asked, fastest))
            tier += 1e6 if prefill_score(p, 0, objectives) >= 1 else 0
            tier += 8e6 if p.key != d.key and p.pairing_with(d) is Pairing.UNKNOWN else 0
            best = min(best, seconds * weight + tier)
    return best


NAMES = [f"w{number}" for number in range(14)]


@st.composite
def clusters(draw: st.DrawFn) -> list[WorkerView]:
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    views = []
    for name in names:
        role = draw(st.sampled_from([P, P, D, D, C]))
        others = st.sampled_from(names)
        pairings = draw(st.dictionaries(others, st.sampled_from(list(Pairing))))
        view = worker(
            name,
            role,
            draw(st.integers(0, 5000)),
            draw(st.integers(0, 40)),
            draw(st.sampled_from([10, 40])),
            pairings=pairings,
            links=draw(st.dictionaries(others, st.sampled_from([1e6, 1e8, 1e10]))),
            prefill_rate=draw(st.sampled_from([0.0, 500.0, 1000.0, 4000.0])),
            step=draw(st.sampled_from([0.0, 0.02, 0.1])),
            decode_rate=draw(st.sampled_from([0.0, 50.0, 500.0])),
            decoding=draw(st.integers(0, 64)),
            may_prefill=role is not C and draw(st.booleans()),
            may_decode=role is not C and draw(st.booleans()),
            can_take_prompt=draw(st.booleans()),
        )
        has_store = draw(st.booleans())
        read_rate = draw(st.sampled_from([0.0, 500.0, 10_000.0]))
        queue = draw(st.sampled_from([0, 100, 5000]))
        views.append(
            replace(view, has_store=has_store, read_rate=read_rate, read_queue_tokens=queue)
        )
    return views


@settings(deadline=None)
@given(
    clusters(),
    st.sampled_from([10, 64, 300, 1000]),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 15)),
    st.booleans(),
    st.sampled_from([0, 4, 12]),
)
def test_the_choice_costs_what_the_best_of_all_pairs_costs(
    workers: list[WorkerView], tokens: int, hits: dict[str, int], is_fixed: bool, num_stored: int
) -> None:
    names = {view.worker_id for view in workers}
    hits = {name: min(hit, tokens // 64) for name, hit in hits.items() if name in names}
    num_stored = min(num_stored, (tokens - 1) // 64)
    asked = replace(request(tokens, **hits), num_stored_blocks=num_stored)
    expected = brute_force(workers, asked, is_fixed=is_fixed)
    placement = POLICY.choose(ClusterView(workers, has_fixed_roles=is_fixed), asked)
    if placement is None:
        assert expected == inf
        return
    chosen = brute_force_of(workers, asked, placement, is_fixed=is_fixed)
    assert chosen == pytest.approx(expected, rel=1e-9, abs=1e-6)


def brute_force_of(
    workers: list[WorkerView], asked: RequestView, chosen: Placement, *, is_fixed: bool
) -> float:
    """The least cost of the chosen pair alone: nobody else may prefill or decode."""
    others = []
    for view in workers:
        if view.key == chosen.prefill.key:
            others.append(view)
        elif view.key == chosen.decode.key:
            others.append(replace(view, can_take_prompt=False))
        else:
            others.append(replace(view, can_take_prompt=False, total_blocks=0))
    return brute_force(others, asked, is_fixed=is_fixed)
