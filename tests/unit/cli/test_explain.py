"""What ``flowpath explain`` makes of log lines."""

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.telemetry.story import LogEntry, parse_lines
from services.cli.explain import BAR_CELLS, bar, explain, explanation_parts
from services.cli.explanation import Explanation, Span, explain_request


def line(at: float, process: str, event: str, **facts: object) -> str:
    ts = f"2026-01-01T00:00:{at:09.6f}+00:00"
    return json.dumps({"ts": ts, "process": process, "event": event, **facts})


def entries(*lines: str) -> list[LogEntry]:
    return list(parse_lines(lines))


def explained(*lines: str) -> Explanation:
    found = entries(*lines)
    return explain_request([e for e in found if e.fact("request_id") is not None], found)


def spans(found: Explanation) -> list[tuple[str, str, float, float | None]]:
    return [(span.name, span.worker, span.start, span.end) for span in found.spans]


PLACED = (
    line(1, "gateway-0", "request_received", request_id="r", num_prompts=1),
    line(1.5, "controller", "request_queued", request_id="r", reason="all are busy", num_ahead=2),
    line(3, "controller", "request_placed", request_id="r", prefill="p0", reason="it is idle"),
    line(3.25, "p0", "request_received", request_id="r", decode_worker="d0"),
    line(4, "p0", "prefill_started", request_id="r"),
    line(4, "p0", "handoff_begun", request_id="r", transfer_id="t"),
    line(6, "p0", "prefill_finished", request_id="r"),
    line(6.5, "p0", "handoff_ended", request_id="r", transfer_id="t"),
    line(7, "d0", "handoff_accepted", request_id="r", transfer_id="t", is_prefix=False),
)
TRANSFER = {
    "name": "transfer",
    "worker": "p0",
    "seconds": 0.25,
    "num_tokens": 0,
    "num_bytes": 5_000_000,
    "num_calls": 2,
    "gigabytes_per_second": 0.02,
}
FINISHED = line(
    9, "gateway-0", "request_finished", request_id="r", finish_reasons=["stop"], phases=[TRANSFER]
)


def test_phases_are_laid_out_by_the_lines_that_begin_and_end_them() -> None:
    found = explained(*PLACED, line(8.5, "d0", "request_ended", request_id="r"), FINISHED)
    assert spans(found) == [
        ("place", "gateway-0", 0.0, 0.5),
        ("queue", "p0", 0.5, 3.0),
        ("prefill", "p0", 3.0, 5.0),
        ("transfer", "p0", 3.0, 5.5),
        ("decode_wait", "d0", 5.0, 6.0),
        ("decode", "d0", 6.0, 7.5),
    ]
    assert (found.outcome, found.seconds) == ("finished: stop", 8.0)
    assert [(row.name, row.num_bytes, row.num_calls) for row in found.phases] == [
        ("transfer", 5_000_000, 2)
    ]


def test_a_request_without_a_ledger_has_the_phases_that_its_lines_tell() -> None:
    found = explained(*PLACED)
    assert (found.outcome, found.seconds) == ("running, or cut off", None)
    assert [row.name for row in found.phases] == [
        "place",
        "queue",
        "prefill",
        "transfer",
        "decode_wait",
    ]
    assert spans(found)[-1] == ("decode", "d0", 6.0, None)


def test_a_decode_on_the_worker_of_the_prefill_is_cut_off_it() -> None:
    decode = {**TRANSFER, "name": "decode", "seconds": 3.0, "num_bytes": 0}
    found = explained(
        *PLACED[:5],
        line(8, "p0", "request_ended", request_id="r"),
        line(9, "gateway-0", "request_finished", request_id="r", phases=[decode]),
    )
    assert spans(found)[-2:] == [("prefill", "p0", 3.0, 4.0), ("decode", "p0", 4.0, 7.0)]


def test_a_lost_worker_and_the_resume_after_it_are_told() -> None:
    found = explained(
        *PLACED,
        line(8, "gateway-0", "stream_failed", request_id="r", code="worker_died", reason="d0 died"),
        line(
            8,
            "gateway-0",
            "request_resumed",
            request_id="r",
            resumed_request_id="r~1",
            reason="d0 died",
        ),
        line(9, "p0", "prefill_started", request_id="r~1"),
        line(11, "p0", "prefill_finished", request_id="r~1"),
    )
    assert ("decode", "d0", 6.0, 7.0) in spans(found)
    assert ("resume", "gateway-0", 7.0, 10.0) in spans(found)
    assert ("prefill", "p0", 8.0, 10.0) in spans(found)
    told = [(decision.kind, decision.event, decision.reason) for decision in found.decisions]
    assert told == [
        ("place", "request_queued", "all are busy"),
        ("place", "request_placed", "it is idle"),
        ("end", "stream_failed", "d0 died"),
        ("resume", "request_resumed", "d0 died"),
    ]


def test_a_migration_moves_the_decode() -> None:
    found = explained(
        *PLACED,
        line(8, "controller", "migration_started", request_id="r", source="d0", target="d1"),
        line(8.5, "d1", "handoff_accepted", request_id="r", transfer_id="u", is_migration=True),
    )
    assert spans(found)[-3:] == [
        ("decode", "d0", 6.0, 7.5),
        ("migration", "d1", 7.0, 7.5),
        ("decode", "d1", 7.5, None),
    ]


def test_a_decode_that_moves_from_where_it_was_prefilled_is_cut_off_it() -> None:
    decode = {**TRANSFER, "name": "decode", "seconds": 3.0, "num_bytes": 0}
    found = explained(
        *PLACED[:5],
        line(8, "controller", "migration_started", request_id="r", source="p0", target="d1"),
        line(8.5, "d1", "handoff_accepted", request_id="r", transfer_id="u", is_migration=True),
        line(9, "d1", "request_ended", request_id="r"),
        line(9, "gateway-0", "request_finished", request_id="r", phases=[decode]),
    )
    assert ("prefill", "p0", 3.0, 4.5) in spans(found)
    assert ("decode", "p0", 4.5, 7.5) in spans(found)
    assert ("decode", "d1", 7.5, 8.0) in spans(found)


def test_a_placement_is_told_with_the_scenario_and_the_roles_of_its_time() -> None:
    found = explained(
        line(0, "controller", "scenario_changed", scenario="imbalanced"),
        line(0, "controller", "role_switched", worker="d1", role="prefill"),
        line(0, "controller", "help_granted", worker="d0", helps="prefill"),
        line(0.5, "controller", "help_ended", worker="d0"),
        *PLACED,
        line(9, "controller", "scenario_changed", scenario="extreme"),
    )
    placed = next(d for d in found.decisions if d.event == "request_placed")
    assert dict(placed.inputs) == {
        "prefill": "p0",
        "scenario": "imbalanced",
        "role of d1": "prefill",
    }


def test_a_refusal_is_the_outcome() -> None:
    found = explained(
        PLACED[0], line(2, "controller", "request_refused", request_id="r", reason="queue is full")
    )
    assert found.outcome == "refused: queue is full"


def part(number: str, *lines: tuple[float, str, str, dict[str, object]]) -> Explanation:
    """Explain one prompt of a request, or what went on for it: no line of a gateway names it."""
    return explained(*(line(at, who, event, request_id=number, **f) for at, who, event, f in lines))


QUEUED = (1.0, "controller", "request_queued", {})
REFUSED = (1.5, "controller", "request_refused", {"reason": "queue is full"})
BEGUN = (2.0, "p0", "prefill_started", {})
ENDED = (3.0, "d0", "request_ended", {"was_cancelled": False})
CANCELLED = (3.0, "d0", "request_ended", {"was_cancelled": True})
FAILED = (2.5, "controller", "request_failed", {"code": "worker_died"})
GONE = (4.0, "controller", "request_ended", {"by": "DecodeSideFinished", "phase": "decoding"})
UNQUEUED = (4.0, "controller", "request_ended", {"by": "CancelReceived", "phase": "queued"})
STOPPED = (4.0, "controller", "request_ended", {"phase": "cancelling_decode"})


@pytest.mark.parametrize(
    ("lines", "outcome", "seconds"),
    [
        ((QUEUED, BEGUN), "running, or cut off", None),
        ((QUEUED, BEGUN, ENDED), "finished", 2.0),
        ((QUEUED, BEGUN, ENDED, GONE), "finished", 3.0),
        ((QUEUED, BEGUN, GONE), "finished", 3.0),
        ((QUEUED, BEGUN, CANCELLED, GONE), "cancelled", 3.0),
        ((QUEUED, UNQUEUED), "cancelled", 3.0),
        ((QUEUED, BEGUN, STOPPED), "cancelled", 3.0),
        ((QUEUED, BEGUN, FAILED, GONE), "failed: worker_died", 1.5),
        ((QUEUED, REFUSED), "refused: queue is full", 0.5),
        ((QUEUED, REFUSED, BEGUN), "running, or cut off", None),
        ((QUEUED, REFUSED, BEGUN, ENDED), "finished", 2.0),
    ],
)
def test_a_part_of_a_request_ends_as_the_controller_and_the_worker_say(
    lines: tuple[tuple[float, str, str, dict[str, object]], ...],
    outcome: str,
    seconds: float | None,
) -> None:
    for number in ("r.0", "r~3"):
        found = part(number, *lines)
        assert (found.request_id, found.outcome, found.seconds) == (number, outcome, seconds)


def test_a_part_that_went_on_after_its_worker_died_ends_as_what_went_on() -> None:
    found = explained(
        line(1, "p0", "prefill_started", request_id="r.0"),
        line(2, "gateway-0", "stream_failed", request_id="r.0", code="worker_died"),
        line(2, "gateway-0", "request_resumed", request_id="r.0", resumed_request_id="r.0~1"),
        line(3, "p1", "prefill_started", request_id="r.0~1"),
        line(4, "p1", "request_ended", request_id="r.0~1", was_cancelled=False),
    )
    assert (found.outcome, found.seconds) == ("finished", 3.0)


def test_a_request_has_not_ended_before_the_gateway_says_so() -> None:
    ended = line(8, "d0", "request_ended", request_id="r", was_cancelled=False)
    assert explained(*PLACED, ended).outcome == "running, or cut off"
    refused = line(2, "controller", "request_refused", request_id="r", reason="queue is full")
    assert explained(PLACED[0], refused, *PLACED[1:]).outcome == "running, or cut off"


def test_everything_is_printed(tmp_path: Path) -> None:
    (tmp_path / "gateway-0.jsonl").write_text("\n".join((*PLACED, FINISHED)))
    parts = list(explanation_parts(explain(tmp_path, "cmpl-r")))
    assert "finished: stop" in str(parts[0])
    assert len(parts) == 8


def test_an_unknown_request_is_told_with_what_was_searched(tmp_path: Path) -> None:
    (tmp_path / "gateway-0.jsonl").write_text(FINISHED)
    with pytest.raises(ConfigError, match=r"'q'.*searched: gateway-0\.jsonl"):
        explain(tmp_path, "q")
    with pytest.raises(ConfigError, match="names request ' '"):
        explain(tmp_path, " ")


def test_without_log_files_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no log files in"):
        explain(tmp_path, "r")


@pytest.mark.parametrize(
    ("start", "end", "drawn"),
    [
        (0.0, 1.0, "█" * BAR_CELLS),
        (0.5, 1.0, " " * (BAR_CELLS // 2) + "█" * (BAR_CELLS // 2)),
        (0.0, 0.0, "▏"),
        (1.0, None, " " * (BAR_CELLS - 1) + "█"),
    ],
)
def test_a_bar_lies_where_its_span_does(start: float, end: float | None, drawn: str) -> None:
    assert bar(Span("x", "w", start, end), 1.0) == drawn.ljust(BAR_CELLS)


def test_the_path_of_a_stored_prefix_is_told_with_what_was_found_and_why_it_was_taken() -> None:
    load = {**TRANSFER, "name": "load", "worker": "d0", "num_tokens": 512}
    found = explained(
        PLACED[0],
        line(1.5, "controller", "request_queued", request_id="r", reason="the store is asked"),
        line(
            2,
            "controller",
            "store_looked_up",
            request_id="r",
            worker="p0",
            num_stored_blocks=8,
            reason="it has answered",
        ),
        line(
            3,
            "controller",
            "request_placed",
            request_id="r",
            prefill="p0",
            decode="d0",
            reason="it is idle",
            path="decode_read",
            path_reason="d0 reads: its read queue is shorter",
            prefill_read_queue=640,
            decode_read_queue=64,
        ),
        line(3.75, "d0", "prefix_loaded", request_id="r", num_tokens=512, read_seconds=0.5),
        line(4, "controller", "prefix_not_copied", request_id="r", worker="d0", reason="damaged"),
        line(
            9,
            "gateway-0",
            "request_finished",
            request_id="r",
            finish_reasons=["stop"],
            phases=[load],
        ),
    )
    told = [(decision.kind, decision.event, decision.reason) for decision in found.decisions]
    assert told == [
        ("place", "request_queued", "the store is asked"),
        ("load", "store_looked_up", "it has answered"),
        ("place", "request_placed", "it is idle"),
        ("load", "prefix_not_copied", "damaged"),
    ]
    assert ("num_stored_blocks", 8) in found.decisions[1].inputs
    inputs = dict(found.decisions[2].inputs)
    assert inputs["path_reason"] == "d0 reads: its read queue is shorter"
    assert (inputs["prefill_read_queue"], inputs["decode_read_queue"]) == (640, 64)
    assert [(row.name, row.worker, row.num_tokens) for row in found.phases] == [("load", "d0", 512)]
    assert ("load", "d0", 2.25, 2.75) in spans(found)
