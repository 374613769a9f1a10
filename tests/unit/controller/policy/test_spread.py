"""Decodes that move from long batches to short ones."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.ids import RequestId
from services.controller.policy.migration import MAX_TARGET_SHARE, DecodeView
from services.controller.policy.spread import (
    MAX_SPREADING,
    MIN_GAIN,
    PAYS,
    STILL_SECONDS,
    Batch,
    can_spread,
    plan_returns,
    plan_spread,
    step_there,
    would_gain,
)
from services.controller.policy.views import Incarnation, WorkerView
from tests.unit.controller.policy.builders import BROKEN, C, D, P, key, worker

LINE = (0.005, 0.001)


def decodes(where: str, count: int, num_left: int = 200, blocks: int = 2) -> list[DecodeView]:
    return [
        DecodeView(RequestId(f"{where}-{n:03}"), key(where), blocks, num_left=num_left)
        for n in range(count)
    ]


def batches(running: list[DecodeView]) -> dict[Incarnation, Batch]:
    there: dict[Incarnation, Batch] = {}
    for decode in running:
        there[decode.worker] = there.get(decode.worker, Batch()).with_one(decode.num_tokens)
    return there


def spread(
    workers: list[WorkerView], running: list[DecodeView], num_moving: int = 0
) -> list[tuple[str, str, str]]:
    under_way = {key("elsewhere"): [1] * num_moving}
    moves = plan_spread(workers, running, batches(running), under_way)
    return [(move.request_id, move.source[0], move.target[0]) for move in moves]


def test_decodes_move_until_steps_are_nearly_as_long_on_either_side() -> None:
    workers = [worker("d0", D, line=LINE), worker("d1", D, line=LINE)]
    moves = spread(workers, decodes("d0", 20))
    assert {(source, target) for _, source, target in moves} == {("d0", "d1")}
    left = 20 - len(moves)
    longer = 0.005 + 0.001 * left
    assert longer - (0.005 + 0.001 * (len(moves) + 1)) <= MIN_GAIN * longer, "one more is no gain"
    assert left > len(moves)
    assert len(moves) == 9


def test_a_worker_that_is_twice_as_fast_gets_twice_as_many() -> None:
    workers = [worker("d0", D, line=(0.0, 0.002)), worker("d1", D, line=(0.0, 0.001))]
    moves = spread(workers, decodes("d0", 15))
    assert len(moves) == 10
    assert spread([workers[0], workers[1]], decodes("d1", 3)) == []


def test_whose_line_is_not_known_is_taken_for_as_fast() -> None:
    workers = [worker("d0", D, line=LINE), worker("d1", D)]
    assert len(spread(workers, decodes("d0", 20))) == 9
    assert spread(workers, decodes("d1", 20)) == [], "of d1 nothing is known to gain"


def test_whose_line_is_not_known_is_taken_for_no_faster_than_its_steps() -> None:
    workers = [worker("d0", D, line=LINE), worker("d1", D, line=(0.05, 0.0))]
    assert spread(workers, decodes("d0", 20)) == []
    workers = [worker("d0", D, line=LINE), worker("d1", D, line=(0.018, 0.0))]
    assert len(spread(workers, decodes("d0", 20))) == 4
    assert spread(workers, decodes("d1", 20)) == [], "of d1 nothing is known to gain"


def test_long_contexts_count_by_their_tokens() -> None:
    """Two workers with as many sequences each, of which one reads ten times as many tokens."""
    cost = (0.005, 0.0001, 1e-7)
    workers = [worker("d0", D, line=cost), worker("d1", D, line=cost)]
    long = [replace(each, num_tokens=10_000) for each in decodes("d0", 10)]
    short = [replace(each, num_tokens=1_000) for each in decodes("d1", 10)]
    assert spread(workers, [*long, *short]) != []
    alike = [replace(each, num_tokens=10_000) for each in decodes("d1", 10)]
    assert spread(workers, [*long, *alike]) == []


def test_a_small_gain_moves_nothing() -> None:
    flat = (0.0046, 0.00005)
    assert spread([worker("d0", D, line=flat), worker("d1", D, line=flat)], decodes("d0", 8)) == []


def test_what_is_nearly_done_stays() -> None:
    workers = [worker("d0", D, line=LINE), worker("d1", D, line=LINE)]
    gain = 0.025 - 0.006
    cost = STILL_SECONDS + 2 * 1_000_000 / 1e9
    enough = int(PAYS * cost / gain) + 1
    assert spread(workers, decodes("d0", 20, num_left=enough - 1)) == []
    assert spread(workers, decodes("d0", 20, num_left=enough)) != []


def test_a_slow_link_must_pay_as_well() -> None:
    slow = worker("d0", D, line=LINE, links={"d1": 1e6})
    assert spread([slow, worker("d1", D, line=LINE)], decodes("d0", 20)) == []


def test_moves_wait_for_the_bytes_of_those_before_them() -> None:
    """Over 1 GB/s the KV of 20 blocks takes 20 ms: the tenth waits for 180 ms of others."""
    workers = [worker("d0", D, line=LINE), worker("d1", D, line=LINE, total=9999)]
    large = decodes("d0", 200, num_left=60, blocks=20)
    num_moves = len(spread(workers, large))

    def pays(number: int) -> bool:
        gain = 0.001 * (200 - (number - 1)) - 0.001 * number
        return gain * 60 >= PAYS * (STILL_SECONDS + 0.02 * number)

    assert pays(num_moves)
    assert not pays(num_moves + 1)
    assert num_moves < len(spread(workers, decodes("d0", 200, num_left=60)))


def test_moves_wait_for_the_bytes_of_those_under_way() -> None:
    workers = [worker("d0", D, line=LINE), worker("d1", D, line=LINE, total=9999)]
    running = decodes("d0", 200, num_left=60)
    slow = {key("d0"): [1000] * 4}  # 4 GB at 1 GB/s
    assert plan_spread(workers, running, batches(running), slow) == []
    other = {key("d2"): [1000] * 4}
    assert plan_spread(workers, running, batches(running), other) != []
    host, able = worker("p", P, line=LINE), worker("d", D, line=LINE)
    guests = decodes("p", 5)
    assert plan_returns([host, able], guests, batches(guests), {key("p"): [1000] * 4}) == []


def test_one_that_gains_nothing_holds_no_other_back() -> None:
    """A decode of a long context makes steps long wherever it is; those beside it can flee it."""
    cost = (0.006, 0.00003, 1.2e-7)
    workers = [worker("d0", D, line=cost), worker("d1", D, line=cost)]
    short = [replace(each, num_tokens=2_000, num_left=3_000) for each in decodes("d0", 15)]
    there = [replace(each, num_tokens=2_000) for each in decodes("d1", 15)]
    long = DecodeView(RequestId("long"), key("d0"), 2, num_tokens=100_000, num_left=4_000)
    moves = spread(workers, [*short, *there, long])
    assert len(moves) >= 10
    assert "long" not in [name for name, _, _ in moves]


def test_one_that_finds_no_room_holds_no_other_back() -> None:
    workers = [worker("d0", D, line=LINE), worker("d1", D, line=LINE, used=700)]
    large = DecodeView(RequestId("large"), key("d0"), 200, num_tokens=200, num_left=900)
    moves = spread(workers, [*decodes("d0", 19), large])
    assert len(moves) == 9
    assert "large" not in [name for name, _, _ in moves]


def test_a_link_that_was_only_measured_the_other_way_is_as_fast() -> None:
    source, target = worker("d0", D, line=LINE), worker("d1", D, line=LINE)
    large = decodes("d0", 20, blocks=20)
    source = replace(source, block_bytes=200_000_000)
    assert spread([source, target], large) == [], "at the default rate"
    target = replace(target, link_rates={source.key: 400e9})
    assert spread([source, target], large) != []


def test_every_other_one_goes_by_what_it_is_to_draw_and_of_equal_ones_the_smaller() -> None:
    running = [
        DecodeView(RequestId("long"), key("d0"), 9, num_left=500),
        DecodeView(RequestId("long, small"), key("d0"), 2, num_left=500),
        *decodes("d0", 10, num_left=100),
    ]
    moves = spread([worker("d0", D, line=LINE), worker("d1", D, line=LINE)], running)
    assert [name for name, _, _ in moves][:3] == ["long, small", "d0-000", "d0-002"]
    assert "long" not in [name for name, _, _ in moves], "one of the long ones stays"


def test_who_moved_lately_or_cannot_move_stays() -> None:
    workers = [worker("d0", D, line=LINE), worker("d1", D, line=LINE)]
    running = [
        DecodeView(RequestId(f"r{n}"), key("d0"), 2, n % 2 == 0, num_left=200, has_moved=n % 2 == 0)
        for n in range(20)
    ]
    assert spread(workers, running) == []


def test_only_so_many_are_under_way_at_once() -> None:
    workers = [worker("d0", D, line=LINE), worker("d1", D, line=LINE)]
    running = decodes("d0", 200)
    assert len(spread(workers, running)) == MAX_SPREADING
    assert len(spread(workers, running, num_moving=MAX_SPREADING - 3)) == 3
    assert spread(workers, running, num_moving=MAX_SPREADING) == []


def test_who_cannot_take_them_gets_none() -> None:
    source = worker("d0", D, line=LINE, pairings={"broken": BROKEN}, devices=("GPU-1", "GPU-2"))
    others = [
        worker("idle", P),
        worker("busy", D, uncomputed=5),
        worker("leaving", D, is_draining=True),
        worker("silent", D, has_heartbeat=False),
        worker("broken", D),
        worker("full", D, used=int(1000 * MAX_TARGET_SHARE) - 1),
        worker("combined", C),
        worker("same", D, devices=("GPU-2",)),
    ]
    assert spread([source, *others], decodes("d0", 20)) == []
    helper = worker("helper", P, may_decode=True, devices=("GPU-3",))
    assert len(spread([source, *others, helper], decodes("d0", 20))) == 9


def test_a_worker_gets_no_more_than_its_steps_hold() -> None:
    small = replace(worker("d1", D, line=LINE), max_num_seqs=3)
    assert len(spread([worker("d0", D, line=LINE), small], decodes("d0", 20))) == 3


def test_a_worker_that_drains_is_left_to_the_drain() -> None:
    workers = [worker("d0", D, line=LINE, is_draining=True), worker("d1", D, line=LINE)]
    assert spread(workers, decodes("d0", 20)) == []


def test_an_idle_worker_is_of_use_where_batches_are_long() -> None:
    idle = worker("p", P)
    assert would_gain(worker("d", D, line=LINE, decoding=20), idle)
    assert not would_gain(worker("d", D, line=LINE, decoding=1), idle)
    assert not would_gain(worker("d", D, decoding=20), idle)
    assert not would_gain(worker("d", D, line=(0.02, 0.0), decoding=20), worker("p", P, line=LINE))
    assert not would_gain(idle, idle)
    shared = ("GPU-1",)
    one = worker("d", D, line=LINE, decoding=20, devices=shared)
    assert not would_gain(one, worker("p", P, devices=shared))


def returns(
    workers: list[WorkerView], running: list[DecodeView], num_moving: int = 0
) -> list[tuple[str, str]]:
    under_way = {key("elsewhere"): [1] * num_moving}
    moves = plan_returns(workers, running, batches(running), under_way)
    return [(move.source[0], move.target[0]) for move in moves]


def test_prefill_workers_give_decodes_back_to_those_with_the_shortest_steps() -> None:
    host = worker("p", P, line=LINE)
    decoders = [worker("d0", D, line=LINE), worker("d1", D, line=(0.006, 0.001))]
    running = [*decodes("p", 7), *decodes("d0", 4)]
    assert Counter(returns([host, *decoders], running)) == {("p", "d0"): 2, ("p", "d1"): 5}
    assert returns([worker("p", P, line=LINE, may_decode=True), *decoders], running) == []
    assert returns([worker("p", P, line=LINE, is_draining=True), *decoders], running) == []


def test_what_is_nearly_done_or_has_no_place_stays_at_the_prefill_worker() -> None:
    host = worker("p", P, line=LINE, pairings={"broken": BROKEN}, links={"slow": 1e6})
    able = worker("d", D, line=LINE)
    assert returns([host, able], decodes("p", 5, num_left=3)) == []
    others = [
        worker("busy", D, uncomputed=5),
        worker("broken", D),
        worker("full", D, used=int(1000 * MAX_TARGET_SHARE) - 1),
        worker("slow", D),
        worker("idle", P),
    ]
    assert returns([host, *others], decodes("p", 5)) == []
    small = replace(able, max_num_seqs=3)
    assert returns([host, *others, small], decodes("p", 5)) == [("p", "d")] * 3
    fixed = [replace(each, is_movable=False) for each in decodes("p", 5)]
    assert returns([host, able], fixed) == []
    assert len(returns([host, able], decodes("p", 40), MAX_SPREADING - 2)) == 2


@given(
    lines=st.lists(
        st.tuples(st.floats(0.001, 0.02), st.floats(0.0001, 0.002), st.floats(0.0, 1e-5)),
        min_size=2,
        max_size=12,
    ),
    numbers=st.lists(st.integers(0, 40), min_size=12, max_size=12),
)
def test_no_move_makes_the_longest_step_longer(
    lines: list[tuple[float, float, float]], numbers: list[int]
) -> None:
    workers = [worker(f"d{n}", D, line=line) for n, line in enumerate(lines)]
    running = [
        replace(each, num_tokens=100 * (n + 1))
        for w, number in zip(workers, numbers, strict=False)
        for n, each in enumerate(decodes(w.worker_id, number))
    ]
    held = {w.key: Batch() for w in workers} | batches(running)
    tokens = {each.request_id: each.num_tokens for each in running}

    def longest() -> float:
        return max(step_there(w, w, held[w.key]) for w in workers)

    moves = plan_spread(workers, running, held)
    assert can_spread(workers, batches(running)) or not moves
    for move in moves:
        before = longest()
        num_tokens = tokens[move.request_id]
        held[move.source] = held[move.source].without_one(num_tokens)
        held[move.target] = held[move.target].with_one(num_tokens)
        assert longest() <= before
        assert min(batch.num_sequences for batch in held.values()) >= 0
