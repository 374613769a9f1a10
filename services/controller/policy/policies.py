"""Named policies: each chooses the workers that prefill and decode a request."""

from typing import Protocol

from services.controller.policy.cluster_view import ClusterView
from services.controller.policy.dualpath.policy import DualPath
from services.controller.policy.dualpath.thresholds import PRESETS
from services.controller.policy.flowkv import FlowKV
from services.controller.policy.simple import (
    LeastLoaded,
    PowerOfTwo,
    PrefixAware,
    RandomChoice,
    RoundRobin,
)
from services.controller.policy.views import Placement, RequestView


class Policy(Protocol):
    """Chooses sides for requests; pure, but for counters and seeded dice of its own."""

    name: str
    uses_prefixes: bool
    """Whether it reads ``RequestView.hits``; else the caller need not look them up."""

    def choose(self, cluster: ClusterView, request: RequestView) -> Placement | None:
        """Return the sides, or None when no worker's role, pool, time or pairing fits now.

        ``ClusterView.can_serve`` tells whether waiting can help.
        """
        ...


def make_policy(name: str, seed: int = 0, preset: str = "medium") -> Policy:
    """Return the policy of a name as settings have it. Raises ValueError for an unknown name.

    ``preset`` says how far ahead ``dualpath`` gives work, "adaptive" that it moves with use;
    KeyError for one that is none.
    """
    match name:
        case "round_robin":
            return RoundRobin()
        case "random":
            return RandomChoice(seed)
        case "least_loaded":
            return LeastLoaded()
        case "power_of_two":
            return PowerOfTwo(seed)
        case "prefix_aware":
            return PrefixAware()
        case "flowkv":
            return FlowKV()
        case "dualpath":
            is_adaptive = preset == "adaptive"
            horizons = PRESETS["medium" if is_adaptive else preset]
            return DualPath(horizons, is_adaptive=is_adaptive)
        case _:
            raise ValueError(f"unknown policy {name!r}")
