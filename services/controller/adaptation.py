"""How used links and engines are, for a policy whose thresholds follow that."""

from statistics import fmean

from common.messages.fields import Role, WorkerTotals
from services.controller.effects import Effect, Note, PeerKey
from services.controller.members import Members
from services.controller.policy.dualpath.policy import DualPath

PERIOD_SECONDS = 5.0
"""Between two looks; a threshold moves by a tenth at most in that time."""


class Adaptation:
    """Tells ``policy`` every while how much of it prefill workers computed and links were read.

    Both are means over the ready workers that told of themselves at both ends of the period.
    """

    def __init__(self, members: Members, policy: DualPath, now: float) -> None:
        self._members = members
        self._policy = policy
        self._looked_at = now
        self._before: dict[PeerKey, WorkerTotals] = {}

    def take_round(self, cause: str, now: float) -> list[Effect]:
        """Look, if it is time, and move the thresholds."""
        if now - self._looked_at < PERIOD_SECONDS:
            return []
        self._looked_at = now
        before, self._before = self._before, {}
        computing: list[float] = []
        reading: list[float] = []
        for worker in self._members.ready_workers():
            if (totals := worker.totals) is None:
                continue
            self._before[worker.key] = totals
            past = before.get(worker.key)
            if past is None or totals.at_seconds <= past.at_seconds:
                continue
            seconds = totals.at_seconds - past.at_seconds
            if worker.role is not Role.DECODE:
                computing.append(min(1.0, (totals.step_seconds - past.step_seconds) / seconds))
            if worker.hello.has_store:
                reading.append(min(1.0, (totals.read_seconds - past.read_seconds) / seconds))
        if not computing:
            return []
        link_use = fmean(reading) if reading else 0.0
        compute_use = fmean(computing)
        factors = self._policy.adapt(link_use, compute_use)
        facts = (
            ("link_use", round(link_use, 4)),
            ("compute_use", round(compute_use, 4)),
            ("alpha_factor", round(factors.read_factor, 4)),
            ("beta_factor", round(factors.compute_factor, 4)),
        )
        return [Note("thresholds_adapted", cause, facts=facts, level="debug")]
