"""Numbers of a replay, when it is ended, and its tokens beside those of another run."""

import pytest

from common.errors import ConfigError
from services.cli.bench_agents_outputs import (
    Difference,
    compare,
    outputs_of,
    outputs_text,
    read_outputs,
)
from services.cli.bench_agents_report import (
    JUDGE_SECONDS,
    AgentRun,
    LoadedKv,
    StopRule,
    StopWatch,
    Verdict,
    summarize_agents,
)
from services.cli.bench_serve_client import RequestRecord, ToldPhase
from services.cli.bench_serve_report import Slo


def record(sent_at: float, ttft: float, step: float, tokens: int = 5, **fields) -> RequestRecord:
    times = [sent_at + ttft + step * place for place in range(tokens)]
    return RequestRecord(
        0,
        sent_at=sent_at,
        token_at=times,
        ended_at=times[-1],
        num_prompt_tokens=100,
        num_cached_tokens=64,
        num_tokens=tokens,
        token_ids=list(range(tokens)),
        **fields,
    )


def run_of(index: int, *records: RequestRecord, rounds: int | None = None, **fields) -> AgentRun:
    return AgentRun(
        index,
        f"a{index}",
        len(records) if rounds is None else rounds,
        started_at=records[0].sent_at,
        ended_at=records[-1].ended_at,
        records=list(records),
        **fields,
    )


def phase(name: str, worker: str, num_tokens: int) -> ToldPhase:
    return ToldPhase(name, worker, 0.1, num_tokens, 1000 * num_tokens)


def test_jct_is_from_the_first_start_to_the_last_end_and_latencies_are_of_complete_rounds():
    runs = [
        run_of(0, record(10.0, 0.1, 0.01), record(11.0, 0.3, 0.02)),
        run_of(1, record(10.5, 5.0, 0.1, tokens=1)),
    ]
    summary = summarize_agents(runs, Slo(ttft_ms=4000, tpot_ms=15))
    assert summary.is_whole
    assert summary.jct_seconds == pytest.approx(5.5)
    assert (summary.num_finished, summary.num_rounds, summary.num_complete) == (2, 3, 3)
    assert summary.latencies_ms["TTFT"]["p50"] == pytest.approx(300)
    assert summary.latencies_ms["TTST"]["count"] == 2
    assert summary.latencies_ms["TTST"]["mean"] == pytest.approx(215)
    assert summary.latencies_ms["TPOT"]["mean"] == pytest.approx(15)
    assert summary.slo_shares == pytest.approx({"TTFT": 2 / 3, "TPOT": 2 / 3, "both": 1 / 3})
    assert (summary.num_prompt_tokens, summary.num_cached_tokens) == (300, 192)
    assert summary.document()["agents_per_second"] == pytest.approx(2 / 5.5)


def test_an_agent_that_failed_is_named_and_leaves_no_jct():
    lost = record(11.0, 0.3, 0.02, failure="http_429", detail="queue full")
    runs = [run_of(0, record(10.0, 0.1, 0.01)), run_of(7, record(10.0, 0.1, 0.01), lost, rounds=9)]
    summary = summarize_agents(runs, Slo())
    assert not summary.is_whole
    assert summary.jct_seconds is None
    assert summary.failures == {"http_429": 1}
    assert summary.failure_examples == ("agent 7 (a7), round 2 of 9: http_429: queue full",)
    assert (summary.num_finished, summary.num_complete, summary.num_rounds) == (1, 2, 10)
    assert summary.slo_shares == {}


def test_an_agent_that_the_rule_stopped_is_no_failure():
    runs = [run_of(0, record(10.0, 0.1, 0.01), rounds=4, is_stopped=True)]
    summary = summarize_agents(runs, Slo())
    assert summary.is_whole
    assert (summary.num_stopped, summary.jct_seconds) == (1, None)


def test_loaded_kv_is_summed_by_the_worker_that_read_it():
    first = (phase("load", "prefill-0", 64), phase("prefill", "prefill-0", 500))
    second = (phase("load", "decode-0", 128), phase("load", "prefill-0", 64))
    runs = [run_of(0, record(1.0, 1, 1, phases=first), record(9.0, 1, 1, phases=second))]
    assert summarize_agents(runs, Slo()).loaded == {
        "decode-0": LoadedKv(128, 128_000),
        "prefill-0": LoadedKv(128, 128_000),
    }


RULE = StopRule(max_ttft_seconds=4.0, window_seconds=10.0, lookback_seconds=100.0, max_change=0.05)


def verdicts(ttft_at, until: float) -> list[tuple[float, Verdict]]:
    watch = StopWatch(RULE, 0.0)
    times = [float(second) for second in range(1, int(until / JUDGE_SECONDS))]
    judged = [(now, watch.take(now, ttft_at(now))) for now in times]
    return [(now, verdict) for now, verdict in judged if verdict is not None]


def test_a_run_is_overloaded_once_a_window_is_late_on_average():
    found = verdicts(lambda now: 0.1 * now, 80)
    now, verdict = found[0]
    assert verdict is Verdict.OVERLOADED
    assert now == pytest.approx(45, abs=1), "the mean of the last 10 s passes 4 s at 44.5"
    assert verdicts(lambda now: 100.0 if now == 20 else 1.0, 21) == [(20.0, Verdict.OVERLOADED)]


def test_a_run_is_steady_when_two_windows_far_apart_are_alike():
    assert verdicts(lambda _: 1.0, 300)[0] == (110.0, Verdict.STEADY)
    assert verdicts(lambda now: 0.01 * now, 300) == [], "growing, and below the bound"
    assert verdicts(lambda now: 1.0 if now < 60 else 1.5, 300)[0][0] > 160


def test_a_few_requests_decide_nothing():
    watch = StopWatch(RULE, 0.0)
    assert [watch.take(float(now), 99.0) for now in range(2, 9)] == [None] * 7


def test_outputs_are_read_back_as_written(tmp_path):
    runs = [
        run_of(1, record(1, 1, 1), record(2, 1, 1, tokens=2), record(3, 1, 1, failure="cut")),
        run_of(0, record(1, 1, 1, tokens=3)),
    ]
    outputs = outputs_of(runs)
    assert outputs == {1: [[0, 1, 2, 3, 4], [0, 1]], 0: [[0, 1, 2]]}
    path = tmp_path / "outputs.jsonl"
    path.write_text(outputs_text(outputs))
    assert read_outputs(path) == outputs


def test_the_first_difference_of_each_agent_is_named():
    reference = {0: [[1, 2], [3, 4], [5]], 1: [[1]], 2: [[9]], 3: [[7, 7]]}
    found = compare({0: [[1, 2], [3, 5], [6]], 1: [[1], [8]], 3: [[7]]}, reference)
    assert found.differences == (Difference(0, 1, 1), Difference(3, 0, 1))
    assert found.num_rounds == 4
    assert not found.is_equal
    assert found.differences[0].told() == "agent 0 differs from round 2, token 2"
    assert compare({1: [[1]]}, reference).is_equal
    assert not compare({8: [[1]]}, reference).is_equal, "nothing was compared"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "1: no JSON"),
        ('{"outputs": []}', "1: agent is no whole number"),
        ('{"agent": 0, "outputs": [3]}', r"1: outputs\[0\] is no list"),
        ('{"agent": 0, "outputs": [[-1]]}', r"1: outputs\[0\] is not from 0"),
    ],
)
def test_a_file_that_holds_no_outputs_is_refused_by_line_and_field(tmp_path, line, reason):
    path = tmp_path / "outputs.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=reason):
        read_outputs(path)
