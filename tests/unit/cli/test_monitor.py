"""What ``flowpath monitor`` prints of reports that a scripted controller gives."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from common.errors import ConfigError
from common.ids import Epoch, WorkerId
from common.messages.admin import RoleControl, StatusReport, WorkerStatus
from common.messages.fields import KVCounts, Mode, Role, WorkerLoad, WorkerState, WorkerTotals
from services.cli import monitor as monitor_module
from services.cli.main import app, monitor_main
from services.cli.monitor import MonitorOptions, monitor, parse_duration
from services.cli.monitored import METRICS, Meter, Reading, find_metric

KV = KVCounts(total=20, free=10, referenced=4, cached=5, in_transfer=1, largest_free_run=8)
LOAD = WorkerLoad(
    num_waiting=0,
    num_prefilling=0,
    num_sending=0,
    num_receiving=0,
    num_decoding=0,
    uncomputed_tokens=0,
    num_steps=1,
    read_queue_tokens=1280,
)
FIRST = WorkerTotals(
    at_seconds=100.0,
    step_seconds=10.0,
    prefix_query_tokens=1000,
    prefix_hit_tokens=500,
    read_seconds=3.0,
    attention_seconds=1.0,
    model_flops=1e12,
    prefetch_used_blocks=10,
)
SECOND = WorkerTotals(
    at_seconds=102.0,
    step_seconds=11.0,
    prefix_query_tokens=1400,
    prefix_hit_tokens=800,
    read_seconds=3.5,
    attention_seconds=1.6,
    model_flops=5e12,
    prefetch_used_blocks=16,
    prefetch_wasted_blocks=2,
)


def worker(totals: WorkerTotals | None, name: str = "prefill-0", epoch: int = 1) -> WorkerStatus:
    return WorkerStatus(
        id=WorkerId(name),
        pid=1,
        host="here",
        epoch=Epoch(epoch),
        role=Role.PREFILL,
        state=WorkerState.READY,
        heartbeat_age_seconds=0.0,
        kv=KV if totals else None,
        load=LOAD if totals else None,
        pairs=(),
        mode=Mode.BALANCED,
        rates=None,
        totals=totals,
    )


def report(*workers: WorkerStatus) -> StatusReport:
    return StatusReport(
        is_ready=True,
        reason="",
        model_name="toy",
        model_fingerprint="0123456789abcdef",
        uptime_seconds=1.0,
        num_requests=0,
        policy="flowkv",
        role_control=RoleControl.AUTO,
        scenario="normal",
        workers=workers,
        gateways=(),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("snic_utilization", 0.25),
        ("read_queue_length", 1280.0),
        ("cache_hit_ratio", 0.75),
        ("gpu_utilization", 0.5),
        ("flops_achieved", 2e12),
        ("flops_achieved_busy", 4e12),
        ("hbm_usage", 0.25),
        ("fragmentation_score", 0.2),
        ("prefetch_accuracy", 0.75),
    ],
)
def test_a_metric_is_what_two_heartbeats_tell(name: str, value: float) -> None:
    meter = Meter(METRICS[name])
    meter.take(report(worker(FIRST)))
    (reading,) = meter.take(report(worker(SECOND)))
    assert reading.value == pytest.approx(value)
    assert (reading.worker_id, reading.role) == ("prefill-0", "prefill")


def test_every_metric_is_tested_and_is_of_one_kind() -> None:
    assert len(METRICS) == 10
    kinds = [(m.state, m.span, m.across) for m in METRICS.values()]
    assert all(sum(kind is not None for kind in of) == 1 for of in kinds)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, worker(SECOND)),
        (worker(None), worker(SECOND)),
        (worker(FIRST), worker(None)),
        (worker(FIRST), worker(FIRST)),
        (worker(FIRST, epoch=1), worker(SECOND, epoch=2)),
    ],
    ids=["new", "silent before", "silent now", "no heartbeat since", "another incarnation"],
)
def test_a_span_without_a_beginning_has_no_value(
    before: WorkerStatus | None, now: WorkerStatus
) -> None:
    meter = Meter(METRICS["gpu_utilization"])
    meter.take(report(*([before] if before else [])))
    (reading,) = meter.take(report(now))
    assert reading.value is None


def test_a_span_without_prompts_has_no_hit_ratio() -> None:
    meter = Meter(METRICS["cache_hit_ratio"])
    meter.take(report(worker(FIRST)))
    idle = replace(FIRST, at_seconds=103.0)
    assert meter.take(report(worker(idle)))[0].value is None


def test_a_span_without_prefetches_has_no_accuracy() -> None:
    meter = Meter(METRICS["prefetch_accuracy"])
    meter.take(report(worker(FIRST)))
    idle = replace(FIRST, at_seconds=103.0)
    assert meter.take(report(worker(idle)))[0].value is None


def test_a_worker_that_told_nothing_has_no_value() -> None:
    assert Meter(METRICS["hbm_usage"]).take(report(worker(None)))[0].value is None


def test_a_span_without_steps_has_no_operations_by_busy_time() -> None:
    meter = Meter(METRICS["flops_achieved_busy"])
    meter.take(report(worker(FIRST)))
    idle = replace(FIRST, at_seconds=103.0)
    assert meter.take(report(worker(idle)))[0].value is None


def attended(seconds: float, until: float = 102.0) -> WorkerTotals:
    """Totals of a worker that attended so long since ``FIRST``."""
    return replace(FIRST, at_seconds=until, attention_seconds=1.0 + seconds)


def bubbles(*now: WorkerStatus, before: Sequence[WorkerStatus]) -> list[Reading]:
    meter = Meter(METRICS["attention_bubble_time"])
    meter.take(report(*before))
    return meter.take(report(*now))


def test_the_bubble_is_the_longest_less_the_mean_of_a_roles_workers() -> None:
    names = ("p0", "p1", "p2", "d0")
    before = [worker(FIRST, name) for name in names]
    now = [
        worker(attended(seconds), name)
        for name, seconds in zip(names, (0.9, 0.3, 0.0, 0.0), strict=True)
    ]
    before[3], now[3] = (replace(one, role=Role.DECODE) for one in (before[3], now[3]))
    assert bubbles(*now, before=before) == [
        Reading(None, "prefill", pytest.approx(0.5)),
        Reading(None, "decode", None),
    ]


def test_heartbeats_that_are_not_of_the_same_moment_make_no_bubble() -> None:
    before = [worker(FIRST, "p0"), worker(FIRST, "p1")]
    now = [worker(attended(0.4, until=102.0), "p0"), worker(attended(0.8, until=104.0), "p1")]
    assert [one.value for one in bubbles(*now, before=before)] == [pytest.approx(0.0)]


def test_workers_that_have_told_nothing_have_no_part_in_a_bubble() -> None:
    before = [worker(FIRST, "p0"), worker(FIRST, "p1"), worker(None, "p2")]
    now = [worker(attended(0.6), "p0"), worker(FIRST, "p1"), worker(SECOND, "p2")]
    assert [one.value for one in bubbles(*now, before=before)] == [pytest.approx(0.0)]


@pytest.mark.parametrize("name", ["hbm", ""])
def test_an_unknown_metric_is_refused_with_those_that_exist(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_metric(name, by_layer=False)
    assert str(refused.value) == (
        f"--metric {name}: there is none such; there are snic_utilization, read_queue_length, "
        "cache_hit_ratio, attention_bubble_time, flops_achieved, flops_achieved_busy, "
        "gpu_utilization, hbm_usage, prefetch_accuracy, fragmentation_score"
    )


def test_layers_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="--by-layer is for cache_hit_ratio: hbm_usage is of"):
        find_metric("hbm_usage", by_layer=True)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1s", 1.0), ("500ms", 0.5), ("2m", 120.0), ("0.25", 0.25)]
)
def test_an_interval_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1h", "1 s", "50ms", "0"])
def test_an_interval_that_is_none_or_too_short_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--interval"):
        parse_duration(text)


async def streamed(options: MonitorOptions, reports: Sequence[StatusReport]) -> list[str]:
    asked, lines = iter(reports), []

    async def ask() -> StatusReport:
        return next(asked)

    metric = find_metric(options.metric, by_layer=options.by_layer)
    await monitor(ask, metric, options, 0.001, lines.append)
    assert next(asked, None) is None, "nothing was asked for in vain"
    return [re.sub(r"^\d\d:\d\d:\d\d", "12:00:00", line) for line in lines]


async def test_a_line_a_worker_comes_with_every_interval() -> None:
    reports = [report(worker(FIRST), worker(None, "decode-0"))] * 2
    lines = await streamed(MonitorOptions("fragmentation_score", count=2), reports)
    told = ["12:00:00  prefill-0     prefill   0.200", "12:00:00  decode-0      prefill   -"]
    assert lines == ["# fragmentation_score: 1 - longest free run / free blocks", *told, *told]


async def test_a_span_is_told_after_the_first_interval() -> None:
    lines = await streamed(
        MonitorOptions("snic_utilization", count=1), [report(worker(FIRST)), report(worker(SECOND))]
    )
    assert lines[1:] == ["12:00:00  prefill-0     prefill   0.250"]


async def test_a_roles_line_names_no_worker_and_large_numbers_are_short() -> None:
    reports = [report(worker(FIRST)), report(worker(SECOND))]
    lines = await streamed(MonitorOptions("attention_bubble_time", count=1), reports)
    assert lines[1:] == ["12:00:00  all           prefill   0.000"]
    (line,) = await streamed(
        MonitorOptions("attention_bubble_time", count=1, as_json=True), reports
    )
    assert json.loads(line)["worker"] is None
    lines = await streamed(MonitorOptions("flops_achieved", count=1), reports)
    assert lines[1:] == ["12:00:00  prefill-0     prefill   2.000e+12 FLOP/s"]


async def test_layers_of_whole_blocks_are_told_to_be_alike() -> None:
    lines = await streamed(
        MonitorOptions("cache_hit_ratio", count=1, by_layer=True),
        [report(worker(FIRST)), report(worker(SECOND))],
    )
    assert lines[1:] == [
        "# by layer: a block holds all layers: a hit is a hit of every layer, a miss of none",
        "12:00:00  prefill-0     prefill   all layers  0.750",
    ]


async def test_json_has_one_object_a_line_and_nothing_else() -> None:
    options = MonitorOptions("read_queue_length", count=1, as_json=True)
    (line,) = await streamed(options, [report(worker(FIRST))])
    told = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", told.pop("at"))
    assert told == {
        "worker": "prefill-0",
        "role": "prefill",
        "metric": "read_queue_length",
        "value": 1280.0,
    }


def test_what_is_refused_ends_the_command_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "need_status", None)  # asked for nothing
    result = CliRunner().invoke(app, ["monitor", "--metric", "flops"])
    assert result.exit_code == 2
    assert "--metric flops: there is none such" in result.stderr


def test_the_command_has_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dualpath-monitor", "--metric", "hbm_frag", "--by-layer"])
    with pytest.raises(SystemExit) as ended:
        monitor_main()
    assert ended.value.code == 2
    assert (
        "--by-layer is for cache_hit_ratio: hbm_frag is of whole workers" in capsys.readouterr().err
    )


def test_the_sources_short_names_are_understood() -> None:
    assert find_metric("cache_hit", by_layer=True) is METRICS["cache_hit_ratio"]
    assert find_metric("hbm_frag", by_layer=False) is METRICS["fragmentation_score"]
