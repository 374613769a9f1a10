from dataclasses import replace
from time import monotonic

import pytest

from common.scheduler.steps import StepPlan
from common.storage.codec_stage import CodecStats
from common.storage.interface import StoreStats
from common.telemetry.metrics import WorkerMetrics
from common.traffic.shared_link import LinkStats
from common.worker.measures import StepClock, take_totals
from common.worker.stepping import FinishedStep
from common.worker.store_buffer import BufferStats
from common.worker.store_measures import StoreMeter

BEFORE = StoreStats(num_hits=7, read_bytes=70, num_written=3, written_bytes=30)
LINK_BEFORE = LinkStats(kv_bytes=70, kv_wait_seconds=1.0, busy_seconds=2.0)

CODEC_NOW = CodecStats(
    ratio=1.9,
    encoded_bytes=30,
    decoded_bytes=20,
    encode_seconds=3.0,
    decode_seconds=4.0,
    rms_error=0.02,
    worst_rms_error=0.03,
    worst_error=0.04,
)


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_metrics_move_by_what_was_counted_since_the_meter_began() -> None:
    metrics = WorkerMetrics()
    meter = StoreMeter(
        metrics.store, BEFORE, LINK_BEFORE, BufferStats(1, 2, 3, 0.5), CodecStats(decoded_bytes=5)
    )
    now = replace(BEFORE, num_hits=9, read_bytes=90, num_written=4, written_bytes=40)
    now = replace(now, num_dropped_full=5, stored_bytes=400, queued_bytes=20, tier_bytes=50)
    now = replace(now, num_prefetched=8, num_prefetch_used=6, num_prefetch_wasted=1)
    for _ in range(2):  # the second time nothing has happened
        link = LinkStats(kv_bytes=90, kv_wait_seconds=1.5, busy_seconds=4.0)
        meter.take(now, link, BufferStats(11, 22, 33, 2.0), CODEC_NOW)
    assert value(metrics, "flowpath_store_blocks_total", event="hit") == 2
    assert value(metrics, "flowpath_store_blocks_total", event="written") == 1
    assert value(metrics, "flowpath_store_blocks_total", event="dropped_full") == 5
    assert value(metrics, "flowpath_store_blocks_total", event="damaged") == 0
    assert value(metrics, "flowpath_store_read_bytes_total") == 20
    assert value(metrics, "flowpath_store_written_bytes_total") == 10
    assert value(metrics, "flowpath_store_read_seconds_total") == 2.0
    assert value(metrics, "flowpath_store_link_wait_seconds_total") == 0.5
    assert value(metrics, "flowpath_store_stored_bytes") == 400
    assert value(metrics, "flowpath_store_queued_bytes") == 20
    assert value(metrics, "flowpath_store_tier_bytes") == 50
    assert value(metrics, "flowpath_prefetched_blocks_total") == 8
    assert value(metrics, "flowpath_prefetch_used_blocks_total") == 6
    assert value(metrics, "flowpath_prefetch_wasted_blocks_total") == 1
    assert value(metrics, "flowpath_prefetch_accuracy_ratio") == 0.75
    ways = ("loaded", "uploaded", "downloaded")
    passed = [value(metrics, "flowpath_store_buffer_bytes_total", way=way) for way in ways]
    assert passed == [10, 20, 30]
    assert value(metrics, "flowpath_store_buffer_wait_seconds_total") == 1.5
    both = ("encoded", "decoded")
    assert [value(metrics, "flowpath_store_codec_bytes_total", way=way) for way in both] == [30, 15]
    assert [value(metrics, "flowpath_store_codec_seconds_total", way=way) for way in both] == [3, 4]
    assert value(metrics, "flowpath_store_codec_ratio") == 1.9
    kinds = ("rms", "worst_rms", "worst")
    errors = [value(metrics, "flowpath_store_codec_error", kind=kind) for kind in kinds]
    assert errors == [0.02, 0.03, 0.04]


def test_every_count_of_blocks_has_its_event() -> None:
    metrics = WorkerMetrics()
    counts = {name: 1 for name in StoreStats.__dataclass_fields__ if name.startswith("num_")}
    meter = StoreMeter(metrics.store, StoreStats(), LinkStats(), BufferStats(), CodecStats())
    meter.take(StoreStats(**counts), LinkStats(), BufferStats(), CodecStats())
    events = [
        sample
        for family in metrics.store.blocks.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    ]
    # num_blocks is a state, and the three of prefetches have metrics of their own.
    assert [sample.value for sample in events] == [1] * (len(counts) - 1 - 3)


def test_a_step_that_is_under_way_counts_until_now() -> None:
    metrics = WorkerMetrics()
    clock = StepClock(metrics)
    assert clock.seconds_under_way(monotonic()) == 0.0
    clock.hand_over(StepPlan(1, ()))
    first, second = take_totals(metrics, clock), take_totals(metrics, clock)
    passed = second.at_seconds - first.at_seconds
    assert second.step_seconds - first.step_seconds == pytest.approx(passed)


def test_a_step_is_as_long_as_its_device_says_where_that_can_tell() -> None:
    clock = StepClock(WorkerMetrics())
    plan = StepPlan(1, ())
    clock.hand_over(plan)
    clock.hand_over(plan)
    seen, told = clock.take_over([FinishedStep(plan, (), 0.0), FinishedStep(plan, (), 0.0, 30.0)])
    assert 0 <= seen.seconds < 30
    assert told.seconds == 30.0


def test_totals_are_what_the_metrics_have_come_to() -> None:
    metrics = WorkerMetrics()
    metrics.step_seconds.observe(0.5)
    metrics.step_seconds.observe(0.25)
    metrics.prefix_queries.inc(100)
    metrics.prefix_hits.inc(60)
    metrics.store.read_seconds.inc(1.5)
    totals = take_totals(metrics, StepClock(metrics))
    assert (totals.step_seconds, totals.read_seconds) == (0.75, 1.5)
    assert (totals.prefix_query_tokens, totals.prefix_hit_tokens) == (100, 60)
