"""From what the store and its link count to a worker's metrics."""

from collections.abc import Iterator

from common.storage.interface import StoreStats
from common.telemetry.store_metrics import StoreMetrics
from common.traffic.shared_link import LinkStats
from common.worker.store_buffer import BufferStats


class StoreMeter:
    """Moves the metrics by what was counted since it was made, or since it was last told."""

    def __init__(
        self, metrics: StoreMetrics, stats: StoreStats, link: LinkStats, buffer: BufferStats
    ) -> None:
        self._metrics = metrics
        self._stats = stats
        self._link = link
        self._buffer = buffer

    def take(self, stats: StoreStats, link: LinkStats, buffer: BufferStats) -> None:
        """Take the counts of now."""
        metrics, before = self._metrics, self._stats
        metrics.stored_bytes.set(stats.stored_bytes)
        metrics.queued_bytes.set(stats.queued_bytes)
        metrics.tier_bytes.set(stats.tier_bytes)
        metrics.read_bytes.inc(stats.read_bytes - before.read_bytes)
        metrics.written_bytes.inc(stats.written_bytes - before.written_bytes)
        metrics.read_seconds.inc(link.busy_seconds - self._link.busy_seconds)
        metrics.link_wait_seconds.inc(link.kv_wait_seconds - self._link.kv_wait_seconds)
        for (event, count), (_, earlier) in zip(_events(stats), _events(before), strict=True):
            metrics.blocks.labels(event).inc(count - earlier)
        for (way, count), (_, earlier) in zip(_ways(buffer), _ways(self._buffer), strict=True):
            metrics.buffer_bytes.labels(way).inc(count - earlier)
        metrics.buffer_wait_seconds.inc(buffer.wait_seconds - self._buffer.wait_seconds)
        self._stats, self._link, self._buffer = stats, link, buffer


def _events(stats: StoreStats) -> Iterator[tuple[str, int]]:
    yield "hit", stats.num_hits
    yield "miss", stats.num_misses
    yield "damaged", stats.num_damaged
    yield "read_error", stats.num_read_errors
    yield "written", stats.num_written
    yield "known", stats.num_known
    yield "dropped_full", stats.num_dropped_full
    yield "dropped_orphan", stats.num_dropped_orphans
    yield "write_error", stats.num_write_errors
    yield "evicted", stats.num_evicted
    yield "tier_hit", stats.num_tier_hits
    yield "tier_evicted", stats.num_tier_evicted
    yield "tier_refused", stats.num_tier_refused


def _ways(buffer: BufferStats) -> Iterator[tuple[str, int]]:
    yield "loaded", buffer.loaded_bytes
    yield "uploaded", buffer.uploaded_bytes
    yield "downloaded", buffer.downloaded_bytes
