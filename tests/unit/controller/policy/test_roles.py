from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.fields import Mode, Role
from services.controller.policy.roles import (
    COOL_DOWN_SECONDS,
    HELP_ROUNDS,
    HELP_STEPS,
    PERSIST_SECONDS,
    Help,
    RolePlanner,
    Switch,
    Unhelp,
)
from services.controller.policy.scenario import Pressure, Scenario, ScenarioMachine
from services.controller.policy.views import Incarnation, WorkerView
from tests.unit.controller.policy.builders import C, D, P, key, worker

ROUND = 0.2
Action = Help | Unhelp | Switch
SHORT_OF_PREFILL = Pressure(3.0, 0.1)
SHORT_OF_DECODE = Pressure(0.1, 3.0)
EVEN = Pressure(0.5, 0.5)


class Cluster:
    """A planner, and workers that do what it says."""

    def __init__(self, *workers: WorkerView) -> None:
        self.planner = RolePlanner()
        self.workers = {view.key: view for view in workers}
        self.now = 0.0

    def round(
        self, scenario: Scenario, pressure: Pressure | None, *, is_quiet: bool = False
    ) -> list[Action]:
        self.now += ROUND
        workers = list(self.workers.values())
        actions = self.planner.plan(scenario, pressure, workers, self.now, is_quiet=is_quiet)
        for action in actions:
            if action.worker not in self.workers:
                assert isinstance(action, Unhelp), action
                continue
            view = self.workers[action.worker]
            match action:
                case Help(role=role):
                    helps = {"may_prefill": role is P, "may_decode": role is D}
                case Unhelp():
                    helps = {"may_prefill": False, "may_decode": False}
                case Switch(role=role):
                    view, helps = replace(view, role=role), {}
            self.workers[action.worker] = replace(view, **helps)
        return actions

    def run(self, seconds: float, scenario: Scenario, pressure: Pressure | None) -> list[Action]:
        actions = []
        for _ in range(round(seconds / ROUND)):
            actions += self.round(scenario, pressure)
        return actions

    def helpers(self) -> set[str]:
        return {v.worker_id for v in self.workers.values() if v.may_prefill or v.may_decode}

    def count(self, role: Role) -> int:
        return sum(view.role is role for view in self.workers.values())


def switches(actions: Sequence[Action]) -> list[tuple[str, Role]]:
    return [(a.worker[0], a.role) for a in actions if isinstance(a, Switch)]


def test_idle_decode_workers_help_when_prompts_wait() -> None:
    cluster = Cluster(worker("p", P), worker("d0", D), worker("d1", D, decoding=60, step=0.3))
    actions = cluster.round(Scenario.IMBALANCED, SHORT_OF_PREFILL)
    assert actions == [
        Help(key("d0"), P, Mode.DECODE_LED, HELP_STEPS, "prefill has more to do than this worker")
    ], "a decode worker with more to do itself does not help"


def test_idle_prefill_workers_help_when_decodes_are_slow() -> None:
    cluster = Cluster(worker("p", P), worker("d", D, decoding=60), worker("c", C))
    actions = cluster.round(Scenario.IMBALANCED, SHORT_OF_DECODE)
    assert actions == [
        Help(key("p"), D, Mode.DECODE_LED, HELP_STEPS, "decode has more to do than this worker")
    ]


@pytest.mark.parametrize("scenario", [Scenario.NORMAL, Scenario.LOW])
def test_nobody_helps_in_a_balanced_cluster(scenario: Scenario) -> None:
    cluster = Cluster(worker("p", P), worker("d", D))
    assert cluster.run(20, scenario, SHORT_OF_PREFILL) == []


def test_help_lasts_eight_rounds_and_is_renewed_while_it_is_needed() -> None:
    cluster = Cluster(worker("p", P), worker("d", D))
    assert len(cluster.round(Scenario.IMBALANCED, SHORT_OF_PREFILL)) == 1
    for _ in range(HELP_ROUNDS - 1):
        assert cluster.round(Scenario.IMBALANCED, SHORT_OF_PREFILL) == []
    assert isinstance(cluster.round(Scenario.IMBALANCED, SHORT_OF_PREFILL)[0], Help)
    for _ in range(HELP_ROUNDS - 1):
        assert cluster.round(Scenario.NORMAL, EVEN) == []
    assert cluster.round(Scenario.NORMAL, EVEN) == [Unhelp(key("d"), "no help is needed")]
    assert cluster.helpers() == set()


def test_a_helper_that_its_help_made_slow_helps_on_while_the_other_half_has_more_to_do() -> None:
    cluster = Cluster(worker("p", P), worker("d", D))
    cluster.round(Scenario.IMBALANCED, SHORT_OF_PREFILL)
    slow = replace(cluster.workers[key("d")], decode_step_seconds=0.25, num_decoding=4)
    cluster.workers[key("d")] = slow
    actions = cluster.run(HELP_ROUNDS * ROUND, Scenario.EXTREME, Pressure(3.0, 2.6))
    assert [type(action) for action in actions] == [Help]
    actions = cluster.run(HELP_ROUNDS * ROUND, Scenario.EXTREME, Pressure(2.4, 2.3))
    assert [type(action) for action in actions] == [Unhelp]


def test_a_helper_that_drains_or_dies_or_has_another_role_helps_no_more() -> None:
    cluster = Cluster(worker("p", P), worker("d0", D), worker("d1", D), worker("d2", D))
    cluster.round(Scenario.IMBALANCED, SHORT_OF_PREFILL)
    away = cluster.workers.pop(key("d0"))
    cluster.workers[key("d1")] = replace(cluster.workers[key("d1")], role=P)
    del cluster.workers[key("d2")]
    actions = cluster.round(Scenario.IMBALANCED, SHORT_OF_PREFILL)
    assert {(type(a), a.worker[0]) for a in actions} == {(Unhelp, f"d{n}") for n in range(3)}
    cluster.workers[key("d0")] = replace(away, may_prefill=False)
    assert cluster.round(Scenario.NORMAL, None) == [], "it was told"
    del cluster.workers[key("d0")]
    assert cluster.run(3, Scenario.IMBALANCED, SHORT_OF_PREFILL) == []


def test_when_no_prompts_come_prefill_workers_decode_where_that_is_faster() -> None:
    long_batch = worker("d", D, decoding=20, line=(0.005, 0.001))
    cluster = Cluster(worker("p", P), long_batch)
    assert cluster.run(3, Scenario.NORMAL, EVEN) == []
    (granted,) = cluster.round(Scenario.NORMAL, EVEN, is_quiet=True)
    assert isinstance(granted, Help)
    assert (granted.worker[0], granted.role, granted.mode) == ("p", D, Mode.DECODE_LED)
    renewed = [
        each for _ in range(16) for each in cluster.round(Scenario.NORMAL, EVEN, is_quiet=True)
    ]
    assert [type(each) for each in renewed] == [Help, Help]
    ended = cluster.round(Scenario.NORMAL, EVEN)
    assert [type(each) for each in ended] == [Unhelp], "prompts come again"


def test_when_no_prompts_come_and_decodes_are_fast_nobody_helps() -> None:
    cluster = Cluster(worker("p", P), worker("d", D, decoding=4, line=(0.0046, 0.00005)))
    assert cluster.round(Scenario.NORMAL, EVEN, is_quiet=True) == []
    cluster = Cluster(
        worker("p", P, is_draining=True), worker("d", D, decoding=20, line=(0.005, 0.001))
    )
    assert cluster.round(Scenario.NORMAL, EVEN, is_quiet=True) == []


def test_the_operator_takes_all_help_back() -> None:
    cluster = Cluster(worker("p", P), worker("d0", D), worker("d1", D))
    cluster.round(Scenario.IMBALANCED, SHORT_OF_PREFILL)
    assert {action.worker[0] for action in cluster.planner.withdraw()} == {"d0", "d1"}
    assert cluster.planner.withdraw() == []


def test_a_shortage_of_ten_seconds_switches_the_least_loaded_worker() -> None:
    cluster = Cluster(worker("p", P), worker("d0", D, used=300), worker("d1", D))
    early = cluster.run(PERSIST_SECONDS, Scenario.IMBALANCED, SHORT_OF_PREFILL)
    assert switches(early) == []
    assert cluster.helpers() == {"d0", "d1"}
    late = cluster.run(2 * ROUND, Scenario.IMBALANCED, SHORT_OF_PREFILL)
    assert switches(late) == [("d1", P)]
    assert [a.worker[0] for a in late if isinstance(a, Unhelp)] == ["d1"]
    assert cluster.helpers() == {"d0"}


def test_a_shortage_that_pauses_begins_anew() -> None:
    cluster = Cluster(worker("p", P), worker("d0", D), worker("d1", D))
    for _ in range(5):
        actions = cluster.run(PERSIST_SECONDS - 1, Scenario.IMBALANCED, SHORT_OF_PREFILL)
        actions += cluster.run(1, Scenario.NORMAL, EVEN)
        assert switches(actions) == []


@pytest.mark.parametrize("pressure", [SHORT_OF_PREFILL, SHORT_OF_DECODE])
def test_each_role_keeps_a_worker(pressure: Pressure) -> None:
    cluster = Cluster(worker("p", P), worker("d", D), worker("c", C))
    assert switches(cluster.run(120, Scenario.IMBALANCED, pressure)) == []


def test_thirty_seconds_lie_between_two_switches() -> None:
    cluster = Cluster(worker("p", P), *(worker(f"d{n}", D) for n in range(5)))
    times = [
        cluster.now
        for _ in range(round(100 / ROUND))
        if switches(cluster.round(Scenario.IMBALANCED, SHORT_OF_PREFILL))
    ]
    assert len(times) >= 3
    assert min(b - a for a, b in pairwise(times)) >= COOL_DOWN_SECONDS


def test_nobody_switches_where_the_shortage_would_only_change_sides() -> None:
    cluster = Cluster(worker("p", P), worker("d0", D), worker("d1", D))
    assert switches(cluster.run(60, Scenario.IMBALANCED, Pressure(1.2, 0.7))) == []
    assert switches(cluster.run(60, Scenario.IMBALANCED, Pressure(1.2, 0.25))) == [("d0", P)]


def test_nothing_is_decided_from_workers_that_have_not_measured_themselves() -> None:
    started = worker("d0", D, step=0.0, decoding=1)
    cold = Cluster(worker("p", P), started, worker("d1", D, has_heartbeat=False))
    assert cold.run(60, Scenario.IMBALANCED, SHORT_OF_PREFILL) == []
    assert cold.run(60, Scenario.IMBALANCED, None) == []


def test_the_compute_rich_become_prefill_workers_and_the_bandwidth_rich_decode_workers() -> None:
    l20 = {"prefill_rate": 12_000.0, "decode_rate": 900.0}
    h20 = {"prefill_rate": 8_000.0, "decode_rate": 2600.0}
    decodes = [worker("h20", D, **h20), worker("l20", D, used=200, **l20)]
    cluster = Cluster(worker("p", P), *decodes)
    assert switches(cluster.run(20, Scenario.IMBALANCED, SHORT_OF_PREFILL)) == [("l20", P)]
    prefills = [worker("l20", P, **l20), worker("h20", P, used=200, **h20)]
    cluster = Cluster(*prefills, worker("d", D))
    assert switches(cluster.run(20, Scenario.IMBALANCED, SHORT_OF_DECODE)) == [("h20", D)]


def test_a_square_wave_of_a_minute_causes_at_most_two_switches_a_wave() -> None:
    cluster = Cluster(
        *(worker(f"p{n}", P) for n in range(2)), *(worker(f"d{n}", D) for n in range(2))
    )
    machine = ScenarioMachine()
    times = []
    for _ in range(round(600 / ROUND)):
        is_first_half = cluster.now % 60 < 30
        prefill, decode = (6.0, 0.4) if is_first_half else (0.2, 3.0)
        scenario = machine.observe([prefill / cluster.count(P)], [decode / cluster.count(D)])
        if switches(cluster.round(scenario, machine.pressure)):
            times.append(cluster.now)
        assert cluster.count(P) >= 1
        assert cluster.count(D) >= 1
    waves = [sum(60 * n <= time < 60 * (n + 1) for time in times) for n in range(10)]
    assert max(waves) <= 2
    assert sum(waves) >= 10, "it does follow the wave"


SCORES = st.floats(0, 4)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.sampled_from(Scenario), st.tuples(SCORES, SCORES), st.integers(1, 80)),
        max_size=25,
    ),
)
def test_roles_keep_a_worker_and_switches_their_distance_whatever_the_load(
    num_prefill: int, num_decode: int, phases: list[tuple[Scenario, tuple[float, float], int]]
) -> None:
    prefills = [worker(f"p{n}", P) for n in range(num_prefill)]
    cluster = Cluster(*prefills, *(worker(f"d{n}", D) for n in range(num_decode)))
    helping: set[Incarnation] = set()
    times = []
    for scenario, means, count in phases:
        for _ in range(count):
            for action in cluster.round(scenario, Pressure(*means)):
                match action:
                    case Help():
                        assert cluster.workers[action.worker].role is not action.role
                        helping.add(action.worker)
                    case Unhelp():
                        helping.remove(action.worker)
                    case Switch():
                        assert action.worker not in helping
                        times.append(cluster.now)
            assert cluster.count(P) >= 1
            assert cluster.count(D) >= 1
    assert all(b - a >= COOL_DOWN_SECONDS for a, b in pairwise(times))
