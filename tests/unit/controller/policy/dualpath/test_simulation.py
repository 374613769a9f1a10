"""DualPath against choices that do not look, on a simulated cluster with a busy store."""

from statistics import fmean

import pytest

from benchmarks.dualpath_simulation import (
    Plant,
    Result,
    choosers,
    draw_agents,
    measured_thresholds,
    simulate,
)

PLANT = Plant()


def run(seed: int, num_agents: int) -> dict[str, Result]:
    agents = draw_agents(num_agents, 12, seed)
    made = choosers(PLANT, measured_thresholds(PLANT, agents), seed)
    return {name: simulate(PLANT, agents, make, num_seconds=30) for name, make in made.items()}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_links_to_the_store_are_used_more_evenly_than_in_turn_or_by_dice(seed: int) -> None:
    results = run(seed, num_agents=130)
    traffic = {name: result.max_over_mean() for name, result in results.items()}
    queues = {name: result.queue_max_over_mean for name, result in results.items()}
    waits = {name: fmean(result.ttft_seconds) for name, result in results.items()}
    assert traffic["dualpath"] < traffic["round_robin"] < traffic["random"]
    assert queues["dualpath"] < queues["round_robin"] < queues["random"]
    assert waits["dualpath"] < waits["round_robin"] < waits["random"]


def test_both_sides_read_as_fast_as_all_their_links_and_one_side_as_its_own() -> None:
    results = run(1, num_agents=200)
    assert results["dualpath"].utilisation(PLANT.link_rate) > 0.99
    alone = results["prefill_only"].utilisation(PLANT.link_rate)
    assert alone == pytest.approx(PLANT.num_prefill_nodes / PLANT.num_nodes, rel=0.01)
    gain = len(results["dualpath"].ttft_seconds) / len(results["prefill_only"].ttft_seconds)
    assert 2.5 < gain < 3.1
