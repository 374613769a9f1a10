from common.messages.fields import Role
from common.telemetry.metrics import ControllerMetrics
from services.controller.snapshot import Snapshots
from services.controller.status import status_report
from tests.unit.controller.cluster import Cluster, heartbeat, kv, pair_cluster


def samples(metrics: ControllerMetrics) -> dict[tuple[str, ...], float]:
    """Return every sample by its name, without what all names begin with, and its labels."""
    return {
        (sample.name.removeprefix("flowpath_cluster_"), *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def taken(snapshots: Snapshots, cluster: Cluster) -> None:
    report = status_report(cluster.core, cluster.now)
    snapshots.take(report, cluster.core.book.count_phases())


def test_the_gauges_tell_what_the_controller_sees() -> None:
    metrics, cluster = ControllerMetrics(), pair_cluster(num_decode=2)
    snapshots = Snapshots(metrics)
    cluster.submit("r0")
    cluster.submit("r1")
    cluster.started("d0", "r0")
    cluster.beat("d0", heartbeat(kv(referenced=20, in_transfer=5, cached=30)))
    cluster.beat("d1", heartbeat(is_draining=True))
    cluster.now += 0.5
    taken(snapshots, cluster)
    told = samples(metrics)
    assert told["num_requests",] == 2
    assert told["num_requests_queued",] == 1
    assert told["num_requests_running",] == 1
    assert told["num_requests_in_phase", "placed"] == 1
    assert told["num_requests_in_phase", "decoding"] == 1
    assert told["num_requests_in_phase", "queued"] == 0
    assert (told["scenario", "normal"], told["scenario", "extreme"]) == (1, 0)
    assert told["num_gateways",] == 1
    assert told["num_workers", "prefill", "ready"] == 1
    assert told["num_workers", "decode", "ready"] == 1
    assert told["num_workers", "decode", "draining"] == 1
    assert told["kv_usage_ratio", "d0"] == 0.25
    assert told["kv_blocks", "d0", "cached"] == 30
    assert told["heartbeat_age_seconds", "d1"] == 0.5
    assert ("kv_usage_ratio", "p0") not in told, "it has not told yet"


def test_a_worker_that_left_is_in_no_gauge_and_one_that_stays_is_never_missing() -> None:
    metrics, cluster = ControllerMetrics(), pair_cluster()
    snapshots = Snapshots(metrics)
    cluster.beat("d0")
    taken(snapshots, cluster)
    gauges = [metrics.workers.labels("prefill", "ready"), metrics.heartbeat_age.labels("p0")]
    cluster.tick(200)
    taken(snapshots, cluster)
    assert not any({"d0", "decode"} & set(key) for key in samples(metrics))
    after = [metrics.workers.labels("prefill", "ready"), metrics.heartbeat_age.labels("p0")]
    assert all(one is other for one, other in zip(gauges, after, strict=True))
    cluster.join("d0", Role.DECODE, epoch=2)
    taken(snapshots, cluster)
    assert samples(metrics)["num_workers", "decode", "ready"] == 1
