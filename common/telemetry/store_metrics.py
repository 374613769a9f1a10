"""A worker's metrics of the store of KV blocks; all stay at zero without one."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class StoreMetrics:
    """What one worker had to do with the store, in the worker's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.read_queue = Gauge(
            "flowpath_store_read_queue_tokens",
            "Tokens whose KV is being read from the store, or waits to be.",
            registry=registry,
        )
        self.read_seconds = Counter(
            "flowpath_store_read_seconds",
            "Time in which a read from the store was under way, waiting for its link included.",
            registry=registry,
        )
        self.link_wait_seconds = Counter(
            "flowpath_store_link_wait_seconds",
            "Time for which emulated_store_bandwidth held reads up.",
            registry=registry,
        )
        self.read_bytes = Counter(
            "flowpath_store_read_bytes",
            "KV bytes read from the store.",
            registry=registry,
        )
        self.written_bytes = Counter(
            "flowpath_store_written_bytes",
            "KV bytes written to the store.",
            registry=registry,
        )
        self.blocks = Counter(
            "flowpath_store_blocks",
            "Blocks asked of the store (hit, miss, damaged, read_error), offered to it (written, "
            "known, dropped_full, dropped_orphan, write_error) or evicted from it, by what became "
            "of them.",
            ("event",),
            registry=registry,
        )
        self.stored_bytes = Gauge(
            "flowpath_store_stored_bytes",
            "Bytes that the store holds, as far as this worker knows.",
            registry=registry,
        )
        self.queued_bytes = Gauge(
            "flowpath_store_queued_bytes",
            "Bytes that wait here to be written to the store.",
            registry=registry,
        )
