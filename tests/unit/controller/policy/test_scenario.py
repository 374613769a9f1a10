from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.handoff.machine import Ignored, Legal
from services.controller.policy.scenario import (
    DWELL_ROUNDS,
    HOLD_ROUNDS,
    SCENARIO_TABLE,
    STEEP_ABOVE,
    UNBALANCED,
    Reading,
    Scenario,
    ScenarioMachine,
)
from tests.unit.controller.policy.builders import D, P

NORMAL, IMBALANCED = Scenario.NORMAL, Scenario.IMBALANCED
EXTREME, LOW = Scenario.EXTREME, Scenario.LOW


def rounds(machine: ScenarioMachine, prefill: float, decode: float, count: int) -> list[Scenario]:
    return [machine.observe([prefill], [decode]) for _ in range(count)]


@pytest.mark.parametrize("scenario", Scenario)
@pytest.mark.parametrize("reading", Reading)
def test_every_cell_is_decided(scenario: Scenario, reading: Reading) -> None:
    verdict = SCENARIO_TABLE[scenario, reading.value]
    if reading is Reading.UNKNOWN or reading.name == scenario.name:
        assert isinstance(verdict, Ignored)
        assert verdict.reason
    else:
        assert verdict == Legal((Scenario[reading.name],))


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (0.5, 0.5, NORMAL),
        (0.24, 0.24, LOW),
        (0.26, 0.1, NORMAL),
        (1.1, 1.1, EXTREME),
        (5.0, 1.1, EXTREME),
        (1.1, 0.9, NORMAL),
        (0.9, 0.4, IMBALANCED),
        (0.2, 2.0, IMBALANCED),
        (0.75, 0.1, NORMAL),
    ],
)
def test_scores_that_hold_make_the_scenario(
    prefill: float, decode: float, expected: Scenario
) -> None:
    machine = ScenarioMachine()
    assert rounds(machine, prefill, decode, HOLD_ROUNDS)[-1] is expected
    assert machine.scenario is expected


def test_a_reading_counts_only_after_three_rounds_on_end() -> None:
    machine = ScenarioMachine()
    assert rounds(machine, 1.4, 0.1, 2) == [NORMAL, NORMAL]
    assert rounds(machine, 0.5, 0.5, 1) == [NORMAL]
    assert rounds(machine, 1.4, 0.1, 3) == [NORMAL, NORMAL, IMBALANCED]


@pytest.mark.parametrize(("other", "expected"), [(0.1, IMBALANCED), (1.1, EXTREME)])
def test_a_burst_counts_at_once_and_ends_as_all_else(other: float, expected: Scenario) -> None:
    machine = ScenarioMachine()
    rounds(machine, 0.1, 0.1, HOLD_ROUNDS)
    assert machine.scenario is LOW
    assert rounds(machine, STEEP_ABOVE, other, 1) == [expected]
    later = rounds(machine, 0.1, 0.1, DWELL_ROUNDS)
    assert later == [expected] * (DWELL_ROUNDS - 1) + [LOW]


def test_one_late_step_of_decodes_is_no_burst() -> None:
    machine = ScenarioMachine()
    assert rounds(machine, 0.1, 5.0, HOLD_ROUNDS) == [NORMAL, NORMAL, IMBALANCED]


def test_one_burst_does_not_end_another() -> None:
    machine = ScenarioMachine()
    assert rounds(machine, 2.0, 0.1, 1) == [IMBALANCED]
    assert rounds(machine, 2.0, 1.1, DWELL_ROUNDS - 1) == [IMBALANCED] * (DWELL_ROUNDS - 1)
    assert rounds(machine, 2.0, 1.1, 1) == [EXTREME]


def test_a_scenario_lasts_eight_rounds_at_least() -> None:
    machine = ScenarioMachine()
    assert rounds(machine, 1.4, 0.1, HOLD_ROUNDS)[-1] is IMBALANCED
    later = rounds(machine, 0.1, 0.1, DWELL_ROUNDS)
    assert later == [IMBALANCED] * (DWELL_ROUNDS - 1) + [LOW]


def test_scores_about_a_threshold_change_nothing() -> None:
    machine = ScenarioMachine()
    rounds(machine, 0.9, 0.4, HOLD_ROUNDS)
    assert machine.scenario is IMBALANCED
    assert set(rounds(machine, 0.7, 0.4, 50)) == {IMBALANCED}
    assert rounds(machine, 0.55, 0.4, HOLD_ROUNDS)[-1] is NORMAL
    assert set(rounds(machine, 0.7, 0.4, 50)) == {NORMAL}


def test_the_pressed_half_is_the_one_with_more_to_do() -> None:
    machine = ScenarioMachine()
    assert machine.pressure is None
    machine.observe([1.0, 2.0], [0.1, 0.3])
    assert machine.pressure is not None
    assert (machine.pressure.prefill, machine.pressure.decode) == (1.5, 0.2)
    assert (machine.pressure.role, machine.pressure.is_uneven) == (P, True)
    machine.observe([0.1], [0.2])
    assert machine.pressure is not None
    assert (machine.pressure.role, machine.pressure.is_uneven) == (D, False)


def test_nothing_is_concluded_while_a_half_has_not_measured_itself() -> None:
    machine = ScenarioMachine()
    for _ in range(20):
        assert machine.observe([9.0], []) is NORMAL
        assert machine.pressure is None
    rounds(machine, 9.0, 9.0, HOLD_ROUNDS)
    assert machine.scenario is EXTREME
    for _ in range(20):
        assert machine.observe([], []) is EXTREME


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), max_size=120))
def test_scenarios_change_at_most_once_in_eight_rounds_and_after_three_equal_readings(
    scores: list[tuple[float, float]],
) -> None:
    """But for bursts, before which the scenario may have been another one for a moment."""
    machine = ScenarioMachine()
    seen = [machine.observe([p], [d]) for p, d in scores]
    steep = [n for n in range(len(seen)) if scores[n][0] >= STEEP_ABOVE and seen[n] in UNBALANCED]
    changes = [n for n in range(1, len(seen)) if seen[n] is not seen[n - 1]]
    for earlier, later in pairwise(changes):
        assert later - earlier >= DWELL_ROUNDS or later in steep
    if not steep:
        assert seen[: HOLD_ROUNDS - 1] == [NORMAL] * min(len(seen), HOLD_ROUNDS - 1)
