"""What is to run, and how long to wait before it is started again; pure."""

from dataclasses import dataclass
from enum import IntEnum

from common.config.settings import Settings


class Stage(IntEnum):
    """Programs end stage by stage: nobody loses what it still needs."""

    GATEWAY = 0
    WORKER = 1
    CONTROLLER = 2


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One program to keep running: ``python -m <module> --id <name>``."""

    name: str
    module: str
    stage: Stage
    role: str


def plan_processes(settings: Settings) -> tuple[ProcessSpec, ...]:
    """Return every process of the cluster in the order of their start."""
    if settings.combined:
        workers = [
            ProcessSpec(f"combined-{number}", "services.prefill", Stage.WORKER, "combined")
            for number in range(settings.combined_workers)
        ]
    else:
        workers = [
            ProcessSpec(f"{role}-{number}", f"services.{role}", Stage.WORKER, role)
            for role, count in (("prefill", settings.prefill), ("decode", settings.decode))
            for number in range(count)
        ]
    return (
        ProcessSpec("controller", "services.controller", Stage.CONTROLLER, "controller"),
        *workers,
        *(
            ProcessSpec(f"gateway-{number}", "services.gateway", Stage.GATEWAY, "gateway")
            for number in range(settings.gateways)
        ),
    )


FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 10.0
STEADY_SECONDS = 30.0
MAX_FAILED_STARTS = 5
"""Ends before the cluster was ever ready after which it is given up."""


@dataclass(slots=True)
class Backoff:
    """How long to wait before a process is started again: doubling, until it lived a while."""

    num_ends: int = 0
    _next_seconds: float = FIRST_WAIT_SECONDS

    def after(self, lived_seconds: float) -> float:
        """Return the wait after a life of this length."""
        self.num_ends += 1
        if lived_seconds >= STEADY_SECONDS:
            self._next_seconds = FIRST_WAIT_SECONDS
        wait = self._next_seconds
        self._next_seconds = min(2 * wait, LONGEST_WAIT_SECONDS)
        return wait
