"""Which half leads: every cell of the table, hysteresis, dwell, and the controller's directive."""

import pytest

from common.messages.fields import Mode
from common.scheduler.modes import NEXT_MODE, ModeMachine, Pressure, Signal, Triggers

BALANCED, PREFILL_LED, DECODE_LED = Mode.BALANCED, Mode.PREFILL_LED, Mode.DECODE_LED
CALM = Pressure(0, 0.0, 0.0)
QUEUED = Pressure(9, 0.0, 0.0)
LATE = Pressure(0, 0.051, 0.0)


def machine(mode: Mode = BALANCED, **triggers: float) -> ModeMachine:
    """A machine that came to ``mode`` by its own triggers and has been there long enough."""
    modes = ModeMachine(Triggers(**triggers))  # type: ignore[arg-type]  # by name
    pressure = {BALANCED: CALM, PREFILL_LED: QUEUED, DECODE_LED: LATE}
    modes.observe(pressure[mode])
    dwell(modes)
    assert modes.mode is mode
    return modes


def dwell(modes: ModeMachine, num_steps: int = 8) -> None:
    for _ in range(num_steps):
        modes.note_planned(has_both=True)


def test_every_cell_of_the_table_is_decided() -> None:
    assert NEXT_MODE.keys() == {(mode, signal) for mode in Mode for signal in Signal}


PRESSURE_OF = {
    Signal.QUEUE: QUEUED,
    Signal.LATENCY: LATE,
    Signal.LINGERING: Pressure(8, 0.05, 0.6),
    Signal.CALM: CALM,
}


@pytest.mark.parametrize(("mode", "signal"), list(NEXT_MODE))
def test_a_machine_goes_where_its_table_says(mode: Mode, signal: Signal) -> None:
    modes = machine(mode)
    if (mode, signal) != (BALANCED, Signal.LINGERING):
        assert modes.signal(PRESSURE_OF[signal]) is signal
    modes.observe(PRESSURE_OF[signal])
    assert modes.mode is NEXT_MODE[mode, signal]


def test_nothing_lingers_in_a_balanced_worker() -> None:
    assert machine().signal(PRESSURE_OF[Signal.LINGERING]) is Signal.CALM


@pytest.mark.parametrize(
    ("num_waiting", "token_seconds", "signal"),
    [
        (8, 0.050, Signal.CALM),  # both at their thresholds, neither above
        (9, 0.050, Signal.QUEUE),
        (8, 0.051, Signal.LATENCY),
        (16, 0.100, Signal.QUEUE),  # equally bad: the queue is served
        (16, 0.101, Signal.LATENCY),
        (17, 0.100, Signal.QUEUE),
    ],
)
def test_the_worse_of_two_evils_leads(
    num_waiting: int, token_seconds: float, signal: Signal
) -> None:
    assert machine().signal(Pressure(num_waiting, token_seconds, 1.0)) is signal


@pytest.mark.parametrize(
    ("mode", "pressure", "after"),
    [
        (PREFILL_LED, Pressure(6, 0.0, 0.6), PREFILL_LED),
        (PREFILL_LED, Pressure(5, 0.0, 0.6), BALANCED),
        (PREFILL_LED, Pressure(8, 0.0, 0.59), BALANCED),
        (PREFILL_LED, Pressure(0, 0.05, 0.9), BALANCED),
        (DECODE_LED, Pressure(0, 0.0376, 0.6), DECODE_LED),
        (DECODE_LED, Pressure(0, 0.0374, 0.6), BALANCED),
        (DECODE_LED, Pressure(0, 0.049, 0.59), BALANCED),
        (DECODE_LED, Pressure(8, 0.0, 0.9), BALANCED),
    ],
)
def test_a_mode_is_left_below_three_quarters_or_when_there_is_little_load(
    mode: Mode, pressure: Pressure, after: Mode
) -> None:
    modes = machine(mode)
    modes.observe(pressure)
    assert modes.mode is after


def test_a_mode_lasts_eight_steps_at_least() -> None:
    modes = machine()
    modes.observe(QUEUED)
    dwell(modes, 7)
    modes.observe(CALM)
    modes.observe(LATE)
    assert modes.mode is PREFILL_LED
    dwell(modes, 1)
    modes.observe(CALM)
    assert modes.mode is BALANCED


def test_a_directive_wins_over_the_triggers_for_its_steps_with_both_kinds_of_work() -> None:
    modes = machine()
    modes.direct(DECODE_LED, 2)
    modes.observe(QUEUED)
    assert modes.mode is DECODE_LED
    modes.note_planned(has_both=True)
    for _ in range(5):
        modes.note_planned(has_both=False)
    assert modes.mode is DECODE_LED
    modes.note_planned(has_both=True)
    assert modes.mode is PREFILL_LED, "the triggers went on meanwhile"


@pytest.mark.parametrize(("mode", "num_steps"), [(None, 5), (PREFILL_LED, 0)])
def test_an_empty_directive_ends_the_one_before(mode: Mode | None, num_steps: int) -> None:
    modes = machine()
    modes.direct(DECODE_LED, 100)
    modes.direct(mode, num_steps)
    assert modes.mode is BALANCED


def test_the_newest_directive_counts() -> None:
    modes = machine()
    modes.direct(DECODE_LED, 1)
    modes.direct(PREFILL_LED, 3)
    dwell(modes, 2)
    assert modes.mode is PREFILL_LED
    dwell(modes, 1)
    assert modes.mode is BALANCED


@pytest.mark.parametrize(
    ("mode", "has_prompts", "num_tokens"),
    [
        (BALANCED, True, 100),
        (DECODE_LED, True, 100),
        (PREFILL_LED, True, 20),
        (PREFILL_LED, False, 100),
    ],
)
def test_decodes_may_take_a_fifth_beside_prompts_that_lead_and_all_else(
    mode: Mode, has_prompts: bool, num_tokens: int
) -> None:
    assert machine(mode).num_decode_tokens(100, has_prompts=has_prompts) == num_tokens


def test_one_decode_goes_on_however_small_its_share() -> None:
    modes = machine(PREFILL_LED, prefill_share=1.0)
    assert modes.num_decode_tokens(16, has_prompts=True) == 1
