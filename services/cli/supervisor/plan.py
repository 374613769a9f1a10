"""What is to run, and how long to wait before it is started again; pure."""

from dataclasses import dataclass
from enum import IntEnum

from common.config.settings import Settings
from common.messages.fields import Role


class Stage(IntEnum):
    """Programs end stage by stage: nobody loses what it still needs."""

    GATEWAY = 0
    WORKER = 1
    CONTROLLER = 2


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One program to keep running: ``python -m <module> --id <name>``.

    One that ``is_elastic`` came with the load: where it cannot start, the others go on without it.
    """

    name: str
    module: str
    stage: Stage
    role: str
    is_elastic: bool = False


def plan_processes(settings: Settings) -> tuple[ProcessSpec, ...]:
    """Return every process of the cluster in the order of their start."""
    if settings.combined:
        counts = {Role.COMBINED: settings.combined_workers}
    else:
        counts = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode}
    return (
        ProcessSpec("controller", "services.controller", Stage.CONTROLLER, "controller"),
        *(
            plan_worker(f"{role}-{number}", role)
            for role, count in counts.items()
            for number in range(count)
        ),
        *(
            ProcessSpec(f"gateway-{number}", "services.gateway", Stage.GATEWAY, "gateway")
            for number in range(settings.gateways)
        ),
    )


def plan_worker(name: str, role: Role, *, is_elastic: bool = False) -> ProcessSpec:
    """Return one worker that starts in a role."""
    program = "decode" if role is Role.DECODE else "prefill"  # which does both where combined
    return ProcessSpec(name, f"services.{program}", Stage.WORKER, role, is_elastic)


FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 10.0
STEADY_SECONDS = 30.0
MAX_FAILED_STARTS = 5
"""Ends before the cluster was ever ready after which it is given up; of a worker that load brought,
quick ends in a row."""


@dataclass(slots=True)
class Backoff:
    """How long to wait before a process is started again: doubling, until it lived a while."""

    num_ends: int = 0
    num_quick_ends: int = 0
    """In a row: a steady life is a new start."""
    _next_seconds: float = FIRST_WAIT_SECONDS

    def after(self, lived_seconds: float) -> float:
        """Return the wait after a life of this length."""
        self.num_ends += 1
        self.num_quick_ends += 1
        if lived_seconds >= STEADY_SECONDS:
            self.num_quick_ends = 0
            self._next_seconds = FIRST_WAIT_SECONDS
        wait = self._next_seconds
        self._next_seconds = min(2 * wait, LONGEST_WAIT_SECONDS)
        return wait
