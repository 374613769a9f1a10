"""How the cluster as a whole stands: normal, imbalanced, extreme or low (papers 1.6.4).

Theory of operation
-------------------
Once a round (a heartbeat's time) the controller gives the load scores of both halves of the
cluster. Their means make a ``Reading``: what the cluster looks like at this moment.

    LOW         both means < 0.25
    EXTREME     both means > 1
    IMBALANCED  the means differ by more than 0.35, and the higher one is > 0.8
    NORMAL      otherwise
    UNKNOWN     of one half no worker's load is known yet: nothing is concluded

A reading becomes the scenario when it held for ``HOLD_ROUNDS`` rounds on end, and the present
scenario for ``DWELL_ROUNDS``. The thresholds of the present scenario are wider by a quarter, so
that a score which hovers about a threshold changes nothing. A burst of prompts does not hover:
where prefill has ``STEEP_ABOVE`` or more, which is seconds of work, an imbalance or an overload
begins at once. It ends as any other. Decode's score is no such sign: one late step makes it high.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from common.handoff.machine import Ignored, Legal, Table, Verdict
from common.messages.fields import Role

HOLD_ROUNDS = 3
DWELL_ROUNDS = 8

LOW_BELOW = 0.25
EXTREME_ABOVE = 1.0
IMBALANCE_OVER = 0.35
IMBALANCED_ABOVE = 0.8
STEEP_ABOVE = 1.5
"""Half as much again as is full: by then waiting to be sure costs more than help would."""
SLACK = 0.25
"""How much further a threshold lies that would end the present scenario."""


class Scenario(StrEnum):
    """What the controller takes the cluster's load for."""

    NORMAL = "normal"
    IMBALANCED = "imbalanced"
    EXTREME = "extreme"
    LOW = "low"


class Reading(StrEnum):
    """What the scores of a few rounds on end say."""

    NORMAL = "ReadNormal"
    IMBALANCED = "ReadImbalanced"
    EXTREME = "ReadExtreme"
    LOW = "ReadLow"
    UNKNOWN = "ReadUnknown"


_MEANT = {
    Reading.NORMAL: Scenario.NORMAL,
    Reading.IMBALANCED: Scenario.IMBALANCED,
    Reading.EXTREME: Scenario.EXTREME,
    Reading.LOW: Scenario.LOW,
}


UNBALANCED = (Scenario.IMBALANCED, Scenario.EXTREME)
"""Those in which something is to be done."""


def _cell(scenario: Scenario, reading: Reading) -> Verdict:
    if reading is Reading.UNKNOWN:
        return Ignored("of a half of the cluster no load is known yet")
    if _MEANT[reading] is scenario:
        return Ignored("it is so already")
    return Legal((_MEANT[reading],))


SCENARIO_TABLE: Table = {
    (scenario, reading.value): _cell(scenario, reading)
    for scenario in Scenario
    for reading in Reading
}
"""(scenario, reading that held) → verdict."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """The means of the scores, and which half has more to do."""

    prefill: float
    decode: float

    @property
    def role(self) -> Role:
        """The half that needs help most."""
        return Role.PREFILL if self.prefill >= self.decode else Role.DECODE

    @property
    def is_uneven(self) -> bool:
        """Whether the other half could help."""
        return abs(self.prefill - self.decode) > IMBALANCE_OVER

    @property
    def highest(self) -> float:
        """Score of the half that has more to do."""
        return max(self.prefill, self.decode)


class ScenarioMachine:
    """Follows the scenario from round to round."""

    def __init__(self) -> None:
        self._scenario = Scenario.NORMAL
        self._reading = Reading.NORMAL
        self._num_held = 0
        self._num_dwelt = DWELL_ROUNDS
        self._pressure: Pressure | None = None

    @property
    def scenario(self) -> Scenario:
        """The scenario that holds."""
        return self._scenario

    @property
    def pressure(self) -> Pressure | None:
        """The last round's means; None where a half told nothing."""
        return self._pressure

    def observe(self, prefill_scores: Sequence[float], decode_scores: Sequence[float]) -> Scenario:
        """Take one round's scores of the workers whose load is known."""
        self._pressure = None
        if prefill_scores and decode_scores:
            self._pressure = Pressure(fmean(prefill_scores), fmean(decode_scores))
        reading = read(self._pressure, self._scenario)
        self._num_held = self._num_held + 1 if reading is self._reading else 1
        self._num_dwelt += 1
        self._reading = reading
        verdict = SCENARIO_TABLE[self._scenario, reading.value]
        is_due = self._num_held >= HOLD_ROUNDS and self._num_dwelt > DWELL_ROUNDS
        is_due |= self._scenario not in UNBALANCED and self._is_steep
        if isinstance(verdict, Legal) and is_due:
            self._scenario = Scenario(verdict.to[0])
            self._num_dwelt = 1
        return self._scenario

    @property
    def _is_steep(self) -> bool:
        return self._pressure is not None and self._pressure.prefill >= STEEP_ABOVE


def read(pressure: Pressure | None, present: Scenario) -> Reading:
    """Return what one round's means say, with the present scenario's thresholds wider."""
    if pressure is None:
        return Reading.UNKNOWN
    highest = pressure.highest
    lowest = min(pressure.prefill, pressure.decode)
    if highest < LOW_BELOW * _wider(present is Scenario.LOW, 1):
        return Reading.LOW
    if lowest > EXTREME_ABOVE * _wider(present is Scenario.EXTREME, -1):
        return Reading.EXTREME
    slack = _wider(present is Scenario.IMBALANCED, -1)
    if highest - lowest > IMBALANCE_OVER * slack and highest > IMBALANCED_ABOVE * slack:
        return Reading.IMBALANCED
    return Reading.NORMAL


def _wider(is_present: bool, sign: int) -> float:  # noqa: FBT001 - it is what it says
    return 1.0 + sign * SLACK if is_present else 1.0
