"""Metrics of workers and of the controller, in Prometheus form; the gateway has its own.

``docs/metrics.md`` is made from the registries. Counters and histograms are moved where the thing
happens, gauges are set with each heartbeat (worker) or tick (controller).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample

from common.telemetry.compute_metrics import ComputeMetrics
from common.telemetry.store_metrics import StoreMetrics

_SHORT_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_QUEUE_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(20.0, 40.0, 80.0, 160.0),
)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CALL_BUCKETS = (1, 2, 3, 4, 5, 8, 12, 16, 32, 64, 128, 256, 512, 1024)


class WorkerMetrics:
    """One worker incarnation's metrics, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.running = Gauge(
            "flowpath_num_requests_running",
            "Requests that prefill or decode here.",
            registry=registry,
        )
        self.waiting = Gauge(
            "flowpath_num_requests_waiting",
            "Requests that wait here for their prefill to start.",
            registry=registry,
        )
        self.transferring = Gauge(
            "flowpath_num_requests_transferring",
            "Handoffs that are open, by direction (sending, receiving).",
            ("direction",),
            registry=registry,
        )
        self.kv_blocks = Gauge(
            "flowpath_kv_blocks",
            "KV blocks by owner (free, referenced, cached, in_transfer); they sum to the pool.",
            ("owner",),
            registry=registry,
        )
        self.kv_usage = Gauge(
            "flowpath_kv_usage_ratio",
            "Share of the pool that requests and transfers hold; cached blocks count as free.",
            registry=registry,
        )
        self.kv_fragmentation = Gauge(
            "flowpath_kv_fragmentation_ratio",
            "1 - longest run of adjacent free blocks / free blocks.",
            registry=registry,
        )
        self.relocated = Counter(
            "flowpath_kv_blocks_relocated",
            "Cached blocks that were moved, while idle, so that free ones lie together.",
            registry=registry,
        )
        self.prefix_queries = Counter(
            "flowpath_prefix_cache_queries_tokens",
            "Prompt tokens that the prefix cache was asked for.",
            registry=registry,
        )
        self.prefix_hits = Counter(
            "flowpath_prefix_cache_hits_tokens",
            "Prompt tokens whose KV the prefix cache held.",
            registry=registry,
        )
        self.transfers = Counter(
            "flowpath_transfers", "Handoffs whose KV was accepted by the peer.", registry=registry
        )
        self.transfer_bytes = Counter(
            "flowpath_transfer_bytes",
            "KV bytes written into peers' pools, also of handoffs that failed.",
            registry=registry,
        )
        self.transfer_calls = Histogram(
            "flowpath_transfer_calls",
            "Contiguous copies of one handoff.",
            buckets=_CALL_BUCKETS,
            registry=registry,
        )
        self.transfer_seconds = Histogram(
            "flowpath_transfer_seconds",
            "Time in writes of one handoff.",
            buckets=_SHORT_BUCKETS,
            registry=registry,
        )
        self.transfer_failures = Counter(
            "flowpath_transfer_failures",
            "Handoffs that this prefill side began and that were not accepted, by reason.",
            ("reason",),
            registry=registry,
        )
        self.handoff_seconds = Histogram(
            "flowpath_handoff_seconds",
            "From the end of a prefill until this decode side may start.",
            buckets=_SHORT_BUCKETS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "flowpath_request_queue_time_seconds",
            "From a request's arrival here until its prefill starts.",
            buckets=_QUEUE_BUCKETS,
            registry=registry,
        )
        self.step_seconds = Histogram(
            "flowpath_engine_step_seconds",
            "Time of one engine step, as its worker waited for it.",
            buckets=_SHORT_BUCKETS,
            registry=registry,
        )
        self.step_host_seconds = Histogram(
            "flowpath_engine_step_host_seconds",
            "Processor time of one engine step: planning it, handing it to the device, and sending "
            "what it drew. With two steps in flight a device does not wait for it.",
            buckets=_SHORT_BUCKETS,
            registry=registry,
        )
        self.step_tokens = Histogram(
            "flowpath_engine_step_tokens",
            "Tokens that one engine step computes, prompts and outputs together.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self.quota_error = Gauge(
            "flowpath_compute_quota_error_ratio",
            "How far predicted times of steps with prompts alone were off, of late, as a share of "
            "the times; 0 without a compute_quota.",
            registry=registry,
        )
        self.preemptions = Counter(
            "flowpath_preemptions",
            "Sequences that gave their blocks up and are computed again.",
            registry=registry,
        )
        self.refusals = Counter(
            "flowpath_requests_refused",
            "Requests that were not taken in here, by reason.",
            ("reason",),
            registry=registry,
        )
        self.failures = Counter(
            "flowpath_requests_failed",
            "Requests that ended with an error here, by reason.",
            ("reason",),
            registry=registry,
        )
        self.compute = ComputeMetrics(registry)
        self.store = StoreMetrics(registry)

    def set_load(
        self, *, num_running: int, num_waiting: int, num_sending: int, num_receiving: int
    ) -> None:
        """Take a heartbeat's counts of requests."""
        self.running.set(num_running)
        self.waiting.set(num_waiting)
        self.transferring.labels("sending").set(num_sending)
        self.transferring.labels("receiving").set(num_receiving)

    def set_kv(self, owners: Mapping[str, int], largest_free_run: int) -> None:
        """Take a heartbeat's counts of blocks: ``owners`` sum to the pool and name ``free``."""
        for owner, count in owners.items():
            self.kv_blocks.labels(owner).set(count)
        total, free = sum(owners.values()), owners["free"]
        held = total - free - owners.get("cached", 0)
        self.kv_usage.set(held / total if total else 0.0)
        self.kv_fragmentation.set(1 - largest_free_run / free if free else 0.0)

    def note_transfer(
        self, failure: str | None, *, num_bytes: int, num_calls: int, seconds: float
    ) -> None:
        """Count one handoff of this prefill side at its end; ``failure`` is why it failed."""
        self.transfer_bytes.inc(num_bytes)
        if failure is not None:
            self.transfer_failures.labels(failure).inc()
            return
        self.transfers.inc()
        self.transfer_calls.observe(num_calls)
        self.transfer_seconds.observe(seconds)


class ControllerMetrics:
    """The controller's metrics, in a registry of their own; the cluster in one scrape."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Gauge(
            "flowpath_cluster_num_requests",
            "Requests that the controller knows and that have not ended.",
            registry=registry,
        )
        self.queued = Gauge(
            "flowpath_cluster_num_requests_queued",
            "Requests whose decode has not started, placed or not; max_queue bounds them.",
            registry=registry,
        )
        self.running = Gauge(
            "flowpath_cluster_num_requests_running",
            "Requests that decode, and cancelled ones whose worker has not reported their end.",
            registry=registry,
        )
        self.phases = Gauge(
            "flowpath_cluster_num_requests_in_phase",
            "Requests that the controller knows, by phase; queued ones wait there for a worker.",
            ("phase",),
            registry=registry,
        )
        self.scenario = Gauge(
            "flowpath_cluster_scenario",
            "1 for the scenario that the cluster's load is taken for, else 0.",
            ("scenario",),
            registry=registry,
        )
        self.is_ready = Gauge(
            "flowpath_cluster_ready",
            "1 while requests can be served, else 0.",
            registry=registry,
        )
        self.gateways = Gauge(
            "flowpath_cluster_num_gateways", "Registered gateways.", registry=registry
        )
        self.workers = Gauge(
            "flowpath_cluster_num_workers",
            "Registered workers, by role and state.",
            ("role", "state"),
            registry=registry,
        )
        self.worker_kv_blocks = Gauge(
            "flowpath_cluster_kv_blocks",
            "KV blocks of each worker as its last heartbeat told them, by owner.",
            ("worker", "owner"),
            registry=registry,
        )
        self.worker_kv_usage = Gauge(
            "flowpath_cluster_kv_usage_ratio",
            "Share of each worker's pool that requests and transfers hold; cached blocks count as "
            "free.",
            ("worker",),
            registry=registry,
        )
        self.heartbeat_age = Gauge(
            "flowpath_cluster_heartbeat_age_seconds",
            "Time since each worker was last heard from.",
            ("worker",),
            registry=registry,
        )
        self.worker_requests = Gauge(
            "flowpath_cluster_worker_requests",
            "Requests of each worker as its last heartbeat told them, by state.",
            ("worker", "state"),
            registry=registry,
        )
        self.role_switches = Counter(
            "flowpath_cluster_role_switches",
            "Role switches that workers confirmed.",
            registry=registry,
        )
        self.migrations = Counter(
            "flowpath_cluster_migrations",
            "Running decodes that were told to move to another worker (started), and those of them "
            "that went on where they were (failed).",
            ("event",),
            registry=registry,
        )
        self.replicas = Counter(
            "flowpath_cluster_replicas",
            "Copies of prefixes in much use to other workers, ahead of need: ordered, held there "
            "since, or failed.",
            ("event",),
            registry=registry,
        )
        self.scale_events = Counter(
            "flowpath_cluster_scale_events",
            "Workers asked for under load (asked_for), and such workers stopped again (stopped).",
            ("event",),
            registry=registry,
        )
        self.placements = Counter(
            "flowpath_cluster_placements",
            "Requests placed, again too.",
            registry=registry,
        )
        self.refusals = Counter(
            "flowpath_cluster_requests_refused",
            "Requests that the controller refused, by reason.",
            ("reason",),
            registry=registry,
        )
        self.failures = Counter(
            "flowpath_cluster_requests_failed",
            "Requests whose gateway was told that they failed, by reason.",
            ("reason",),
            registry=registry,
        )


def value_of(counter: Counter) -> float:
    """Return what a counter without labels has come to."""
    return next(s.value for s in _samples(counter) if s.name.endswith("_total"))


def sum_of(histogram: Histogram) -> float:
    """Return the sum of what a histogram without labels has observed."""
    return next(s.value for s in _samples(histogram) if s.name.endswith("_sum"))


def _samples(metric: MetricWrapperBase) -> list[Sample]:
    return [sample for family in metric.collect() for sample in family.samples]


@dataclass(frozen=True, slots=True)
class RegisteredMetric:
    """One metric as a scrape names it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def registered_metrics(registry: CollectorRegistry) -> list[RegisteredMetric]:
    """Return the metrics of a registry in the order of their registration."""
    found = []
    for collector in registry._collector_to_names:  # noqa: SLF001 - it has no public listing
        assert isinstance(collector, MetricWrapperBase), "every metric is made by this client"
        for family in collector.describe():
            suffix = "_total" if family.type == "counter" else ""
            labels = tuple(collector._labelnames)  # noqa: SLF001 - nor have its labels
            name = f"{family.name}{suffix}"
            found.append(RegisteredMetric(name, family.type, labels, family.documentation))
    return found
