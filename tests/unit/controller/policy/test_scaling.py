from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import WorkerId
from common.messages.fields import Role
from services.controller.policy.scaling import (
    GROW_COOL_DOWN_SECONDS,
    LOW_SECONDS,
    OVERLOADED_SECONDS,
    SHRINK_COOL_DOWN_SECONDS,
    START_SECONDS,
    Fleet,
    Grow,
    ScalingPlanner,
    Shrink,
)
from services.controller.policy.scenario import Pressure, Scenario
from services.controller.policy.views import Incarnation, WorkerView
from tests.unit.controller.policy.builders import D, P, key, worker

ROUND = 0.2
BUSY = Pressure(2.0, 1.5)
IDLE = Pressure(0.1, 0.1)


class Host:
    """A planner and a scaler that does what it says, ``start_seconds`` later."""

    def __init__(self, *workers: WorkerView, budget: int, start_seconds: float = 2.0) -> None:
        self.planner = ScalingPlanner()
        self.workers = {view.key: view for view in workers}
        self.budget = budget
        self.start_seconds = start_seconds
        self.added: set[WorkerId] = set()
        self.starting: list[tuple[float, Role]] = []
        self.now = 0.0

    def round(self, scenario: Scenario, pressure: Pressure | None) -> Grow | Shrink | None:
        self.now += ROUND
        for start in [start for start in self.starting if start[0] <= self.now]:
            self.starting.remove(start)
            self.join(start[1])
        added = frozenset(key[0] for key in self.workers if key[0] in self.added)
        fleet = Fleet(self.budget, len(self.workers), added)
        views = list(self.workers.values())
        action = self.planner.plan(scenario, pressure, views, fleet, self.now)
        match action:
            case Grow(role=role):
                self.starting.append((self.now + self.start_seconds, role))
            case Shrink(worker=drained):
                self.workers[drained] = replace(self.workers[drained], is_draining=True)
            case None:
                pass
        return action

    def join(self, role: Role) -> None:
        view = worker(f"added-{len(self.added)}", role)
        self.added.add(view.worker_id)
        self.workers[view.key] = view

    def stop_drained(self) -> None:
        for view in [view for view in self.workers.values() if view.is_draining]:
            del self.workers[view.key]

    def run(self, seconds: float, scenario: Scenario, pressure: Pressure) -> list[Grow | Shrink]:
        actions = [self.round(scenario, pressure) for _ in range(round(seconds / ROUND))]
        return [action for action in actions if action is not None]


def pair(budget: int = 4) -> Host:
    return Host(worker("p", P), worker("d", D), budget=budget)


@pytest.mark.parametrize(("pressure", "role"), [(BUSY, P), (Pressure(1.2, 1.9), D)])
def test_extreme_load_asks_for_a_worker_of_the_role_with_more_to_do(
    pressure: Pressure, role: Role
) -> None:
    action = pair().round(Scenario.EXTREME, pressure)
    assert isinstance(action, Grow)
    assert action.role is role
    assert "extreme" in action.reason


def test_the_next_worker_is_asked_for_when_the_last_one_came_and_a_cool_down_passed() -> None:
    host = pair()
    times = [host.now for _ in range(150) if host.round(Scenario.EXTREME, BUSY)]
    assert len(times) == 2, "the budget is four"
    assert times[1] - times[0] >= GROW_COOL_DOWN_SECONDS
    slow = Host(worker("p", P), worker("d", D), budget=9, start_seconds=60.0)
    assert len(slow.run(59, Scenario.EXTREME, BUSY)) == 1


def test_a_worker_that_does_not_come_is_given_up() -> None:
    host = Host(worker("p", P), worker("d", D), budget=3, start_seconds=1e9)
    assert len(host.run(START_SECONDS - 1, Scenario.EXTREME, BUSY)) == 1
    assert len(host.run(3, Scenario.EXTREME, BUSY)) == 1


def test_a_worker_that_was_started_and_is_no_member_yet_is_waited_for() -> None:
    planner, views = ScalingPlanner(), [worker("p", P), worker("d", D)]
    fleet = Fleet(9, 2, frozenset())
    assert planner.plan(Scenario.EXTREME, BUSY, views, fleet, 0.0) is not None
    fleet = Fleet(9, 3, frozenset({WorkerId("added-0")}))
    assert planner.plan(Scenario.EXTREME, BUSY, views, fleet, START_SECONDS - 1) is None
    assert planner.plan(Scenario.EXTREME, BUSY, views, fleet, START_SECONDS) is not None


def test_without_a_budget_nothing_grows() -> None:
    assert pair(budget=0).run(60, Scenario.EXTREME, BUSY) == []
    assert pair(budget=2).run(60, Scenario.EXTREME, BUSY) == []


def test_one_overloaded_half_grows_when_the_other_has_nobody_to_give() -> None:
    host, uneven = pair(), Pressure(3.0, 0.2)
    assert host.run(OVERLOADED_SECONDS, Scenario.IMBALANCED, uneven) == []
    assert [type(a) for a in host.run(2 * ROUND, Scenario.IMBALANCED, uneven)] == [Grow]
    rich = Host(worker("p", P), worker("d0", D), worker("d1", D), budget=9)
    assert rich.run(60, Scenario.IMBALANCED, uneven) == [], "it switches a role instead"
    assert pair().run(60, Scenario.IMBALANCED, Pressure(0.9, 0.2)) == []


def test_a_long_low_drains_an_added_worker_and_then_the_next() -> None:
    host = pair()
    host.join(P)
    host.join(D)
    assert host.run(LOW_SECONDS, Scenario.LOW, IDLE) == []
    first = host.run(2 * ROUND, Scenario.LOW, IDLE)
    assert [type(action) for action in first] == [Shrink]
    assert host.run(60, Scenario.LOW, IDLE) == [], "the first is still draining"
    host.stop_drained()
    assert len(host.run(2 * ROUND, Scenario.LOW, IDLE)) == 1
    host.stop_drained()
    assert host.run(200, Scenario.LOW, IDLE) == [], "what was there at the start stays"
    assert set(host.workers) == {key("p"), key("d")}


def test_a_short_low_drains_nobody() -> None:
    host = pair()
    host.join(P)
    for _ in range(5):
        assert host.run(LOW_SECONDS - 1, Scenario.LOW, IDLE) == []
        assert host.run(1, Scenario.NORMAL, Pressure(0.5, 0.5)) == []


def test_the_least_loaded_of_the_larger_half_goes() -> None:
    host = Host(worker("p", P), worker("d", D), budget=9)
    for role in (P, D, D):
        host.join(role)
    host.workers[key("added-1")] = worker("added-1", D, used=10)
    action = host.run(LOW_SECONDS + 2 * ROUND, Scenario.LOW, IDLE)[0]
    assert isinstance(action, Shrink)
    assert action.worker == key("added-2")


def test_the_last_worker_of_a_role_stays_though_it_was_added() -> None:
    host = Host(worker("p", P), budget=9)
    host.join(D)
    assert host.run(60, Scenario.LOW, IDLE) == []


def test_a_decision_waits_for_the_first_heartbeat_of_an_added_worker_and_for_scores() -> None:
    host = pair(budget=9)
    host.join(P)
    host.workers[key("added-0")] = worker("added-0", P, has_heartbeat=False)
    assert host.run(60, Scenario.EXTREME, BUSY) == []
    assert pair().round(Scenario.EXTREME, None) is None


@given(
    st.integers(0, 6),
    st.floats(0, 20),
    st.lists(
        st.tuples(st.sampled_from(Scenario), st.floats(0, 3), st.floats(0, 3), st.integers(1, 200)),
        max_size=20,
    ),
)
def test_the_budget_is_kept_and_each_role_has_a_worker_whatever_the_load(
    budget: int, start_seconds: float, phases: list[tuple[Scenario, float, float, int]]
) -> None:
    host = Host(worker("p", P), worker("d", D), budget=budget, start_seconds=start_seconds)
    shrunk: list[tuple[float, Incarnation]] = []
    for scenario, prefill, decode, count in phases:
        for _ in range(count):
            action = host.round(scenario, Pressure(prefill, decode))
            if isinstance(action, Shrink):
                assert action.worker[0] in host.added
                shrunk.append((host.now, action.worker))
            ready = [view for view in host.workers.values() if not view.is_draining]
            assert {view.role for view in ready} >= {P, D}
            assert len(host.workers) + len(host.starting) <= max(2, budget)
        host.stop_drained()
    times = [time for time, _ in shrunk]
    distances = [b - a for a, b in pairwise(times)]
    assert all(distance >= SHRINK_COOL_DOWN_SECONDS for distance in distances)
