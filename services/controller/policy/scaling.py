"""When the cluster gets a worker more or one less (papers 1.6.4, EXTREME and LOW).

A worker is asked for under extreme load, and where one half alone is overloaded for long and the
other has no worker to give. One is let go after a long low. One thing at a time: the next decision
waits for the last one's worker to come or go, and for a cool-down.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import WorkerId
from common.messages.fields import Role
from services.controller.policy.estimates import Objectives, decode_score, prefill_score
from services.controller.policy.scenario import EXTREME_ABOVE, Pressure, Scenario
from services.controller.policy.views import Incarnation, WorkerView

GROW_COOL_DOWN_SECONDS = 10.0
SHRINK_COOL_DOWN_SECONDS = 30.0
OVERLOADED_SECONDS = 10.0
LOW_SECONDS = 10.0
START_SECONDS = 120.0
"""How long a worker that was asked for may take before it is given up."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the scalers have: ``budget`` workers at most, ``num_running`` now.

    Those in ``added``, which run too, were asked for by the controller and may be let go. Those of
    them in ``drained`` do nothing, as the operator wants: nobody waits for them, and they go first.
    """

    budget: int
    num_running: int
    added: frozenset[WorkerId]
    drained: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Grow:
    """Ask for one more worker of this role."""

    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class Shrink:
    """Drain this worker, and stop it when it is empty."""

    worker: Incarnation
    reason: str


class ScalingPlanner:
    """Plans the number of workers, once a round."""

    def __init__(self, objectives: Objectives | None = None) -> None:
        self._objectives = objectives or Objectives()
        self._changed_at: float | None = None
        self._expected: tuple[int, float] | None = None
        self._overloaded_since: float | None = None
        self._low_since: float | None = None

    def plan(
        self,
        scenario: Scenario,
        pressure: Pressure | None,
        workers: Sequence[WorkerView],
        fleet: Fleet,
        now: float,
    ) -> Grow | Shrink | None:
        """Return the one change to make now. ``workers`` are all live ones, draining ones too."""
        self._note_times(scenario, pressure, now)
        if pressure is None or self._is_under_way(workers, fleet, now):
            return None
        if self._wants_more(scenario, pressure, workers, now):
            if fleet.num_running >= fleet.budget or self._is_cooling(GROW_COOL_DOWN_SECONDS, now):
                return None
            self._changed_at = now
            self._expected = (fleet.num_running + 1, now)
            return Grow(pressure.role, f"{scenario}: {pressure.role} score {pressure.highest:.2f}")
        is_low = self._low_since is not None and now - self._low_since >= LOW_SECONDS
        if not is_low or self._is_cooling(SHRINK_COOL_DOWN_SECONDS, now):
            return None
        spare = self._spare(workers, fleet)
        if spare is None:
            return None
        self._changed_at = now
        return Shrink(spare.key, f"{scenario}: highest score {pressure.highest:.2f}")

    def _note_times(self, scenario: Scenario, pressure: Pressure | None, now: float) -> None:
        is_overloaded = pressure is not None and pressure.highest > EXTREME_ABOVE
        if not (is_overloaded and scenario is Scenario.IMBALANCED):
            self._overloaded_since = None
        elif self._overloaded_since is None:
            self._overloaded_since = now
        if scenario is not Scenario.LOW:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now

    def _is_under_way(self, workers: Sequence[WorkerView], fleet: Fleet, now: float) -> bool:
        """Whether a worker is still to come, to tell its load, or to go."""
        if self._expected is not None:
            number, since = self._expected
            if fleet.num_running < number and now - since < START_SECONDS:
                return True
            self._expected = None
        at_work = fleet.added - fleet.drained
        added = [worker for worker in workers if worker.worker_id in at_work]
        is_missing = len(added) < len(at_work) and self._is_cooling(START_SECONDS, now)
        return is_missing or any(w.is_draining or not w.has_heartbeat for w in added)

    def _is_cooling(self, seconds: float, now: float) -> bool:
        return self._changed_at is not None and now - self._changed_at < seconds

    def _wants_more(
        self, scenario: Scenario, pressure: Pressure, workers: Sequence[WorkerView], now: float
    ) -> bool:
        if scenario is Scenario.EXTREME:
            return True
        since = self._overloaded_since
        if since is None or now - since < OVERLOADED_SECONDS:
            return False
        giving = Role.DECODE if pressure.role is Role.PREFILL else Role.PREFILL
        return sum(w.role is giving and not w.is_draining for w in workers) < 2

    def _spare(self, workers: Sequence[WorkerView], fleet: Fleet) -> WorkerView | None:
        """Return the least loaded added worker of the larger half; its role keeps one at least.

        One that the operator has drained serves nobody: it goes before all others.
        """
        idle = [worker for worker in workers if worker.worker_id in fleet.drained]
        if idle:
            return min(idle, key=lambda worker: worker.worker_id)
        ready = [worker for worker in workers if not worker.is_draining]
        counts = {role: sum(worker.role is role for worker in ready) for role in Role}
        spare = [w for w in ready if w.worker_id in fleet.added and counts[w.role] > 1]
        return min(
            spare, key=lambda w: (-counts[w.role], self._score(w), w.worker_id), default=None
        )

    def _score(self, worker: WorkerView) -> float:
        prefill = prefill_score(worker, 0, self._objectives)
        return max(prefill, decode_score(worker, self._objectives))
