"""What the operator is told of a worker's own counts."""

from dataclasses import replace

from common.messages.fields import Role, WorkerTotals
from services.controller.status import status_report
from tests.unit.controller.cluster import Cluster, heartbeat


def test_a_workers_totals_are_those_of_its_last_heartbeat_and_none_before_the_first() -> None:
    cluster = Cluster()
    cluster.join("p0", Role.PREFILL)
    assert status_report(cluster.core, cluster.now).workers[0].totals is None
    for step_seconds in (0.5, 0.75):
        totals = WorkerTotals(at_seconds=9.0, step_seconds=step_seconds, read_seconds=0.25)
        cluster.beat("p0", replace(heartbeat(), totals=totals))
        assert status_report(cluster.core, cluster.now).workers[0].totals == totals
