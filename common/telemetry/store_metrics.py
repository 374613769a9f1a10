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
            "known, dropped_full, dropped_orphan, write_error, unencodable) or evicted from it, "
            "and those of the host tier (tier_hit, tier_evicted, tier_refused), by what became of "
            "them.",
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
        self.tier_bytes = Gauge(
            "flowpath_store_tier_bytes",
            "Bytes of blocks in the tier of host memory before the store.",
            registry=registry,
        )
        self.prefetched = Counter(
            "flowpath_prefetched_blocks",
            "Blocks brought into the host tier for requests that wait for room in the pool.",
            registry=registry,
        )
        self.prefetch_used = Counter(
            "flowpath_prefetch_used_blocks",
            "Prefetched blocks that a read found in the tier.",
            registry=registry,
        )
        self.prefetch_wasted = Counter(
            "flowpath_prefetch_wasted_blocks",
            "Prefetched blocks that were evicted, or that nobody waited for any more, before a "
            "read.",
            registry=registry,
        )
        self.prefetch_accuracy = Gauge(
            "flowpath_prefetch_accuracy_ratio",
            "Used by prefetched blocks since the store was opened; 0 while none was prefetched.",
            registry=registry,
        )
        self.buffer_bytes = Counter(
            "flowpath_store_buffer_bytes",
            "Bytes that went from the store into the buffer (loaded), from host memory on into the "
            "pool (uploaded), and from the pool into the buffer (downloaded).",
            ("way",),
            registry=registry,
        )
        self.buffer_wait_seconds = Counter(
            "flowpath_store_buffer_wait_seconds",
            "Time for which reads and writes of the store waited for room in the buffer.",
            registry=registry,
        )
        self.codec_bytes = Counter(
            "flowpath_store_codec_bytes",
            "KV bytes, as the pool has them, that were encoded for the store (encoded) or came "
            "from it and were decoded (decoded).",
            ("way",),
            registry=registry,
        )
        self.codec_seconds = Counter(
            "flowpath_store_codec_seconds",
            "Time in which blocks were encoded or decoded.",
            ("way",),
            registry=registry,
        )
        self.codec_ratio = Gauge(
            "flowpath_store_codec_ratio",
            "Bytes of a block in the pool by its bytes in the store, scales and padding included.",
            registry=registry,
        )
        self.codec_error = Gauge(
            "flowpath_store_codec_error",
            "How far encoded blocks were from what was encoded, of every eighth: root mean square "
            "of the differences by that of the numbers, of a block in the mean (rms) and of the "
            "worst (worst_rms); greatest difference by the greatest number of a block (worst).",
            ("kind",),
            registry=registry,
        )
