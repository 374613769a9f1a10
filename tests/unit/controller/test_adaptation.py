"""Thresholds of the policy dualpath that follow how used links and workers are."""

import pytest

from common.messages.fields import Role, WorkerTotals
from services.controller.adaptation import PERIOD_SECONDS
from services.controller.effects import Effect, Note
from services.controller.limits import ControllerLimits
from services.controller.policy.dualpath.thresholds import LESS, MORE
from tests.unit.controller.cluster import Cluster, heartbeat, notes, pair_cluster, rates

RATES = rates(prefill=1000, read=10_000)
ADAPTED = "thresholds_adapted"


def adapting_cluster(preset: str = "adaptive", *, has_store: bool = True) -> Cluster:
    limits = ControllerLimits(policy="dualpath", dualpath_preset=preset)  # type: ignore[arg-type]  # a name of a preset
    return pair_cluster(limits=limits, has_store=has_store)


def period(cluster: Cluster, number: int, computing: float, reading: float) -> list[Effect]:
    """Let a period pass in which p0 computed, and both read, such shares of the time."""
    effects: list[Effect] = []
    for second in range(1, int(PERIOD_SECONDS) + 1):
        at = number * PERIOD_SECONDS + second
        cluster.now += 1.0
        cluster.gateway_beat()
        for name, share in (("p0", computing), ("d0", 1.0)):
            totals = WorkerTotals(
                at_seconds=100 + at, step_seconds=share * at, read_seconds=reading * at
            )
            cluster.beat(name, heartbeat(measured=RATES, totals=totals))
        effects += cluster.tick()
    return effects


def factors(effects: list[Effect]) -> dict[str, object]:
    (note,) = [e for e in effects if isinstance(e, Note) and e.event == ADAPTED]
    return dict(note.facts)


@pytest.mark.parametrize(
    ("computing", "reading", "alpha", "beta"),
    [(0.9, 0.6, 1.0, LESS), (0.6, 0.9, LESS, 1.0), (0.1, 0.1, MORE, MORE), (0.6, 0.6, 1.0, 1.0)],
)
def test_use_of_a_period_moves_the_thresholds(
    computing: float, reading: float, alpha: float, beta: float
) -> None:
    cluster = adapting_cluster()
    assert ADAPTED not in notes(period(cluster, 1, computing, reading)), "there is no period yet"
    told = factors(period(cluster, 2, computing, reading))
    assert (told["alpha_factor"], told["beta_factor"]) == (alpha, beta)
    assert (told["compute_use"], told["link_use"]) == (computing, reading)


def test_a_busy_worker_gets_less_ahead() -> None:
    cluster = adapting_cluster()
    for number in range(1, 5):
        period(cluster, number, 1.0, 0.6)
    factor = LESS**3
    for tokens, is_placed in ((5000 * factor - 1, True), (5000 * factor + 1, False)):
        cluster.beat("p0", heartbeat(measured=RATES, uncomputed_tokens=int(tokens)))
        name = f"r{int(tokens)}"
        cluster.submit(name, 64)
        assert (cluster.phase(name) == "placed") is is_placed


def test_within_a_period_nothing_moves() -> None:
    cluster = adapting_cluster()
    period(cluster, 1, 1.0, 1.0)
    period(cluster, 2, 1.0, 1.0)
    for _ in range(4):
        cluster.now += 1.0
        cluster.beat("p0")
        assert ADAPTED not in notes(cluster.tick())


def test_other_presets_stay_as_they_are() -> None:
    cluster = adapting_cluster("medium")
    for number in range(1, 4):
        assert ADAPTED not in notes(period(cluster, number, 1.0, 1.0))


def test_a_worker_that_has_just_joined_is_left_out() -> None:
    cluster = adapting_cluster(has_store=False)
    period(cluster, 1, 0.9, 0.0)
    cluster.join("p1", Role.PREFILL, pid=101)
    cluster.beat("p1", heartbeat(totals=WorkerTotals(at_seconds=1, step_seconds=0)))
    told = factors(period(cluster, 2, 0.9, 0.0))
    assert (told["compute_use"], told["beta_factor"]) == (0.9, LESS)
