"""Who does the other role's work for a while, and who changes its role (papers 1.6.4).

Theory of operation
-------------------
*Help* is the quick answer to an imbalance: workers of the half with less to do may do the other
half's work too, in steps that decodes lead. It is granted for ``HELP_ROUNDS`` rounds and looked at
again then. A worker helps on while it has less to do than the half that it helps: being slow
because of its help is no reason to end it.

Where no prompts came for a while and none waits, a prefill worker helps to decode as well if that
makes tokens come sooner (``spread``): the tail of a burst would leave it idle. The next prompt ends
that help at once.

A *switch* is the slow one: when the same half was short for ``PERSIST_SECONDS``, one worker of the
other half changes its role. At least ``COOL_DOWN_SECONDS`` lie between two switches of the cluster,
a role keeps a worker at least, and nobody switches where the shortage would only change sides: the
means that are to be expected afterwards must still point the same way. Hence a load that swings
with a period of two cool-downs causes at most two switches a swing.

Nothing is decided from workers that work at a rate not measured yet, or sent no heartbeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from common.messages.fields import Mode, Role
from services.controller.policy.estimates import Objectives, decode_score, prefill_score
from services.controller.policy.scenario import IMBALANCE_OVER, UNBALANCED, Pressure, Scenario
from services.controller.policy.spread import would_gain
from services.controller.policy.views import Incarnation, WorkerView

HELP_ROUNDS = 8
HELP_STEPS = 1024
"""Steps for which a directive holds: more than the fastest GPU takes until it is renewed. When the
help ends, it does."""
HELP_MODE = Mode.DECODE_LED
"""How a helper, of either role, shares a step that has both: what decodes is not to wait for long
chunks, and where nothing decodes prompts get the whole step all the same."""
PERSIST_SECONDS = 10.0
COOL_DOWN_SECONDS = 30.0

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class Help:
    """Let a worker do ``role``'s work beside its own, led by ``mode`` for ``num_steps`` steps.

    A repeat for a worker that helps already renews the directive alone.
    """

    worker: Incarnation
    role: Role
    mode: Mode
    num_steps: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unhelp:
    """Let a worker do its own role's work alone again."""

    worker: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class Switch:
    """Give a worker another role for good."""

    worker: Incarnation
    role: Role
    reason: str


@dataclass(slots=True)
class _Grant:
    """A worker's help to a role, for how many rounds more, and whether only while it is quiet."""

    role: Role
    num_rounds: int
    is_for_quiet: bool


@dataclass(frozen=True, slots=True)
class _Round:
    """What is to be seen this round."""

    short: Role | None
    pressure: Pressure | None
    workers: Sequence[WorkerView]
    is_quiet: bool


class RolePlanner:
    """Plans help and switches, once a round."""

    def __init__(self, objectives: Objectives | None = None) -> None:
        self._objectives = objectives or Objectives()
        self._grants: dict[Incarnation, _Grant] = {}
        self._short: tuple[Role, float] | None = None
        self._switched_at: float | None = None

    def plan(
        self,
        scenario: Scenario,
        pressure: Pressure | None,
        workers: Sequence[WorkerView],
        now: float,
        *,
        is_quiet: bool = False,
    ) -> list[Help | Unhelp | Switch]:
        """Return what to change this round; ``workers`` are ready, and not draining.

        ``is_quiet`` tells that no prompts came for a while and none is computed.
        """
        short = pressure.role if pressure and scenario in UNBALANCED else None
        if short is None or pressure is None:
            self._short = None
        elif self._short is None or self._short[0] is not short:
            self._short = (short, now)
        switch = self._plan_switch(pressure, workers, now)
        actions = self._plan_help(_Round(short, pressure, workers, is_quiet), switch)
        return [*actions, switch] if switch else actions

    @property
    def helps_in_quiet(self) -> bool:
        """Whether some help is for a quiet time only."""
        return any(grant.is_for_quiet for grant in self._grants.values())

    def end_quiet(self) -> list[Unhelp]:
        """Take back the help that was for a quiet time: prompts come."""
        over = [key for key, grant in self._grants.items() if grant.is_for_quiet]
        for key in over:
            del self._grants[key]
        return [Unhelp(key, "prompts come") for key in over]

    def withdraw(self) -> list[Unhelp]:
        """Take back all help: the operator gives the roles from now on."""
        ended = [Unhelp(key, "roles are the operator's") for key in self._grants]
        self._grants.clear()
        self._short = None
        return ended

    def _plan_help(self, this: _Round, switch: Switch | None) -> list[Help | Unhelp | Switch]:
        actions: list[Help | Unhelp | Switch] = []
        known = {worker.key for worker in this.workers}
        for key in [key for key in self._grants if key not in known]:
            del self._grants[key]
            actions.append(Unhelp(key, "it drains, is silent or gone"))
        for worker in this.workers:
            grant = self._grants.get(worker.key)
            if grant is not None:
                is_other = worker.role is not _OTHER[grant.role]
                if is_other or (switch is not None and switch.worker == worker.key):
                    del self._grants[worker.key]
                    actions.append(Unhelp(worker.key, "it has another role now"))
                    continue
                grant.num_rounds -= 1
                is_over = grant.is_for_quiet and not this.is_quiet
                if grant.num_rounds > 0 and not is_over:
                    continue
            elif switch is not None and switch.worker == worker.key:
                continue
            role, reason = self._helped_role(worker, this, grant)
            if role is not None:
                is_for_quiet = role is not this.short
                self._grants[worker.key] = _Grant(role, HELP_ROUNDS, is_for_quiet)
                actions.append(Help(worker.key, role, HELP_MODE, HELP_STEPS, reason))
            elif grant is not None:
                del self._grants[worker.key]
                actions.append(Unhelp(worker.key, "no help is needed"))
        return actions

    def _helped_role(
        self, worker: WorkerView, this: _Round, grant: _Grant | None
    ) -> tuple[Role | None, str]:
        """Return the role that a worker may help, or help on, and why; or no role."""
        short, pressure = this.short, this.pressure
        if worker.is_draining or not worker.is_measured:
            return None, ""
        if short and pressure and worker.role is _OTHER[short]:
            margin = 0.0 if grant else IMBALANCE_OVER
            is_other = grant is not None and grant.role is not short
            if not is_other and self._score(worker) + margin < pressure.highest:
                return short, f"{short} has more to do than this worker"
        is_idle = this.is_quiet and worker.role is Role.PREFILL
        if is_idle and any(would_gain(other, worker) for other in this.workers):
            return Role.DECODE, "no prompts come, and more workers decode faster"
        return None, ""

    def _plan_switch(
        self, pressure: Pressure | None, workers: Sequence[WorkerView], now: float
    ) -> Switch | None:
        if pressure is None or self._short is None or not pressure.is_uneven:
            return None
        short, since = self._short
        is_cooling = self._switched_at is not None and now - self._switched_at < COOL_DOWN_SECONDS
        if is_cooling or now - since < PERSIST_SECONDS:
            return None
        given = [w for w in workers if w.role is _OTHER[short] and not w.is_draining]
        taking = [w for w in workers if w.role is short and not w.is_draining]
        able = [worker for worker in given if worker.is_measured]
        if len(able) < 2 or not taking:
            return None
        lowest = min(pressure.prefill, pressure.decode)
        after_taking = pressure.highest * len(taking) / (len(taking) + 1)
        after_giving = lowest * len(given) / (len(given) - 1)
        if after_giving >= after_taking:
            return None
        chosen = min(able, key=lambda w: (-_talent(w, short), self._score(w), w.worker_id))
        self._switched_at = now
        self._short = None
        reason = f"{short} was short for {now - since:.1f} s"
        return Switch(chosen.key, short, reason)

    def _score(self, worker: WorkerView) -> float:
        """Load of a worker in its own role."""
        if worker.role is Role.PREFILL:
            return prefill_score(worker, 0, self._objectives)
        return decode_score(worker, self._objectives)


def _talent(worker: WorkerView, role: Role) -> int:
    """How much better a worker is at a role than at the other one, in powers of two.

    Prefill is for the compute-rich, decode for the bandwidth-rich (FlowKV's heterogeneous rule).
    What is not measured counts for nothing, and so does a small difference.
    """
    if not (worker.prefill_rate and worker.decode_rate):
        return 0
    talent = round(log2(worker.prefill_rate / worker.decode_rate))
    return talent if role is Role.PREFILL else -talent
