"""Which copies of hot prefixes are ordered, and which never are."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.fields import Role
from services.controller.policy.prefix_heat import MIN_HOT_BLOCKS, HotPrefix
from services.controller.policy.replicas import (
    MAX_PREFIX_SHARE,
    MAX_USED_SHARE,
    CopyUnderWay,
    Replica,
    Rest,
    plan_replicas,
)
from services.controller.policy.views import Incarnation, WorkerView
from tests.unit.controller.policy.builders import BROKEN, WORKS, C, D, P, key, worker

NUM_BLOCKS = 10


def prefix(name: int = 0, num_blocks: int = NUM_BLOCKS) -> HotPrefix:
    hashes = tuple(bytes([name, place]) for place in range(num_blocks))
    return HotPrefix(hashes, bytes(256 * num_blocks), 5.0)


def plan(
    workers: list[WorkerView],
    hits: Mapping[str, int],
    *under_way: CopyUnderWay,
    hot_replicas: int = 2,
    resting: frozenset[Rest] = frozenset(),
) -> list[tuple[str, str, int]]:
    """Return source, target and number of blocks of each copy of the one hot prefix."""
    held = {key(name): count for name, count in hits.items()}
    replicas = plan_replicas([(prefix(), held)], workers, under_way, resting, hot_replicas)
    return [(one.source[0], one.target[0], one.num_blocks) for one in replicas]


def test_an_idle_worker_gets_what_too_few_hold() -> None:
    workers = [worker("p0", P, uncomputed=9000), worker("p1", P, 300), worker("p2", P)]
    assert plan(workers, {"p0": NUM_BLOCKS}) == [("p0", "p2", NUM_BLOCKS)]


def test_nothing_is_copied_where_enough_workers_hold_it() -> None:
    workers = [worker("p0", P), worker("p1", P), worker("p2", P)]
    both = {"p0": NUM_BLOCKS, "p1": NUM_BLOCKS}
    assert plan(workers, both) == []
    assert plan(workers, both, hot_replicas=3) == [("p0", "p2", NUM_BLOCKS)]


def test_a_decode_worker_is_a_source_but_neither_a_target_nor_one_of_the_holders() -> None:
    workers = [worker("p0", P), worker("d0", D), worker("d1", D)]
    assert plan(workers, {"d0": NUM_BLOCKS}) == [("d0", "p0", NUM_BLOCKS)]
    assert plan(workers[1:], {"d0": NUM_BLOCKS}) == []


def test_what_is_held_of_a_prefix_is_copied_when_nobody_holds_all() -> None:
    workers = [worker("p0", P), worker("p1", P)]
    assert plan(workers, {"p0": 6}) == [("p0", "p1", 6)]
    assert plan(workers, {"p0": MIN_HOT_BLOCKS - 1}) == []


def test_a_worker_that_lacks_little_is_left_alone() -> None:
    workers = [worker("p0", P), worker("p1", P)]
    assert plan(workers, {"p0": NUM_BLOCKS, "p1": NUM_BLOCKS - MIN_HOT_BLOCKS + 1}) == []


@pytest.mark.parametrize(
    "target",
    [
        worker("p1", P, uncomputed=513),
        worker("p1", P, used=int(MAX_USED_SHARE * 1000) - NUM_BLOCKS + 1),
        worker("p1", P, total=int(NUM_BLOCKS / MAX_PREFIX_SHARE) - 1),
        worker("p1", P, can_take_prompt=False),
        worker("p1", P, is_draining=True),
        worker("p1", P, has_heartbeat=False),
        worker("p1", C),
    ],
    ids=["busy", "full", "small", "at its bound", "draining", "silent", "combined"],
)
def test_a_worker_without_time_or_room_gets_nothing(target: WorkerView) -> None:
    assert plan([worker("p0", P), target], {"p0": NUM_BLOCKS}) == []


def test_a_pair_that_works_is_preferred_and_a_broken_one_is_not_used() -> None:
    to_target = {"p1": BROKEN}
    workers = [worker("p0", P, pairings=to_target), worker("p1", P), worker("d0", D)]
    assert plan(workers, {"p0": NUM_BLOCKS}) == []
    held = {"p0": NUM_BLOCKS, "d0": NUM_BLOCKS}
    assert plan(workers, held) == [("d0", "p1", NUM_BLOCKS)]
    workers.append(worker("d1", D, pairings={"p1": WORKS}))
    assert plan(workers, {**held, "d1": NUM_BLOCKS}) == [("d1", "p1", NUM_BLOCKS)]


def test_a_copy_that_is_coming_counts_and_keeps_both_its_sides() -> None:
    workers = [worker(name, P) for name in ("p0", "p1", "p2")]
    held = {"p0": NUM_BLOCKS}
    coming = CopyUnderWay(prefix().digest, key("d9"), key("p1"))
    assert plan(workers, held, coming) == []
    assert plan(workers, held, coming, hot_replicas=3) == [("p0", "p2", NUM_BLOCKS)]
    from_the_only_holder = CopyUnderWay(b"other", key("p0"), key("p9"))
    assert plan(workers, held, from_the_only_holder) == []


def test_a_prefix_rests_for_the_worker_that_it_was_copied_to() -> None:
    workers = [worker("p0", P), worker("p1", P), worker("p2", P, 100)]
    resting = frozenset({(prefix().digest, key("p1"))})
    assert plan(workers, {"p0": NUM_BLOCKS}, resting=resting) == [("p0", "p2", NUM_BLOCKS)]


NAMES = ("a", "b", "c", "d", "e")
keys = st.sampled_from([key(name) for name in NAMES])
workers_of_all_kinds = st.tuples(
    *(
        st.builds(
            worker,
            st.just(name),
            st.sampled_from([P, D, C]),
            st.integers(0, 800),
            st.integers(0, 60),
            st.integers(20, 60),
            is_draining=st.booleans(),
        )
        for name in NAMES
    )
)
held_blocks = st.dictionaries(keys, st.integers(0, NUM_BLOCKS))
copies = st.builds(CopyUnderWay, st.sampled_from([prefix(0).digest, b"x"]), keys, keys)


@settings(max_examples=150, deadline=None)
@given(
    workers=workers_of_all_kinds,
    hits=st.lists(held_blocks, max_size=4),
    under_way=st.lists(copies, max_size=2),
    resting=st.frozensets(st.tuples(st.just(prefix(0).digest), keys), max_size=2),
    hot_replicas=st.integers(0, 4),
)
def test_every_plan_keeps_the_rules(
    workers: tuple[WorkerView, ...],
    hits: list[dict[Incarnation, int]],
    under_way: list[CopyUnderWay],
    resting: frozenset[Rest],
    hot_replicas: int,
) -> None:
    hot = [(prefix(number), held) for number, held in enumerate(hits)]
    replicas = plan_replicas(hot, workers, under_way, resting, hot_replicas)
    views = {view.key: view for view in workers}
    sides = [side for one in replicas for side in (one.source, one.target)]
    sides += {side for copy in under_way for side in (copy.source, copy.target)}
    assert len(sides) == len(set(sides)), "a worker is in two copies"
    for replica in replicas:
        held = hits[replica.prefix.hashes[0][0]]
        assert_allowed(replica, held, views[replica.target], views[replica.source])
        assert (replica.digest, replica.target) not in resting
        holders = [w for w in workers if held.get(w.key, 0) >= replica.num_blocks]
        assert sum(w.role is not Role.DECODE for w in holders) < hot_replicas


def assert_allowed(
    replica: Replica, held: dict[Incarnation, int], target: WorkerView, source: WorkerView
) -> None:
    assert held[source.key] >= replica.num_blocks
    assert replica.num_missing == replica.num_blocks - held.get(target.key, 0)
    assert replica.num_missing >= MIN_HOT_BLOCKS
    assert target.role is not Role.DECODE
    assert not target.is_draining
    assert target.uncomputed_tokens <= target.max_num_batched_tokens
    assert target.used_blocks + replica.num_missing <= MAX_USED_SHARE * target.total_blocks
