"""From what the store and its link count to a worker's metrics."""

from collections.abc import Iterator

from common.storage.codec_stage import CodecStats
from common.storage.interface import StoreStats
from common.telemetry.store_metrics import StoreMetrics
from common.traffic.shared_link import LinkStats
from common.worker.store_buffer import BufferStats


class StoreMeter:
    """Moves the metrics by what was counted since it was made, or since it was last told."""

    def __init__(
        self,
        metrics: StoreMetrics,
        stats: StoreStats,
        link: LinkStats,
        buffer: BufferStats,
        codec: CodecStats,
    ) -> None:
        self._metrics = metrics
        self._stats = stats
        self._link = link
        self._buffer = buffer
        self._codec = codec

    def take(
        self, stats: StoreStats, link: LinkStats, buffer: BufferStats, codec: CodecStats
    ) -> None:
        """Take the counts of now."""
        metrics, before = self._metrics, self._stats
        metrics.stored_bytes.set(stats.stored_bytes)
        metrics.queued_bytes.set(stats.queued_bytes)
        metrics.tier_bytes.set(stats.tier_bytes)
        metrics.read_bytes.inc(stats.read_bytes - before.read_bytes)
        metrics.written_bytes.inc(stats.written_bytes - before.written_bytes)
        metrics.read_seconds.inc(link.busy_seconds - self._link.busy_seconds)
        metrics.link_wait_seconds.inc(link.kv_wait_seconds - self._link.kv_wait_seconds)
        metrics.prefetched.inc(stats.num_prefetched - before.num_prefetched)
        metrics.prefetch_used.inc(stats.num_prefetch_used - before.num_prefetch_used)
        metrics.prefetch_wasted.inc(stats.num_prefetch_wasted - before.num_prefetch_wasted)
        if stats.num_prefetched:
            metrics.prefetch_accuracy.set(stats.num_prefetch_used / stats.num_prefetched)
        for (event, count), (_, earlier) in zip(_events(stats), _events(before), strict=True):
            metrics.blocks.labels(event).inc(count - earlier)
        for (way, count), (_, earlier) in zip(_ways(buffer), _ways(self._buffer), strict=True):
            metrics.buffer_bytes.labels(way).inc(count - earlier)
        metrics.buffer_wait_seconds.inc(buffer.wait_seconds - self._buffer.wait_seconds)
        self._take_codec(codec)
        self._stats, self._link, self._buffer = stats, link, buffer

    def _take_codec(self, codec: CodecStats) -> None:
        metrics, before = self._metrics, self._codec
        moved, seconds = metrics.codec_bytes, metrics.codec_seconds
        moved.labels("encoded").inc(codec.encoded_bytes - before.encoded_bytes)
        moved.labels("decoded").inc(codec.decoded_bytes - before.decoded_bytes)
        seconds.labels("encoded").inc(codec.encode_seconds - before.encode_seconds)
        seconds.labels("decoded").inc(codec.decode_seconds - before.decode_seconds)
        metrics.codec_ratio.set(codec.ratio)
        metrics.codec_error.labels("rms").set(codec.rms_error)
        metrics.codec_error.labels("worst_rms").set(codec.worst_rms_error)
        metrics.codec_error.labels("worst").set(codec.worst_error)
        self._codec = codec


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
    yield "unencodable", stats.num_unencodable
    yield "evicted", stats.num_evicted
    yield "tier_hit", stats.num_tier_hits
    yield "tier_evicted", stats.num_tier_evicted
    yield "tier_refused", stats.num_tier_refused


def _ways(buffer: BufferStats) -> Iterator[tuple[str, int]]:
    yield "loaded", buffer.loaded_bytes
    yield "uploaded", buffer.uploaded_bytes
    yield "downloaded", buffer.downloaded_bytes
