import io
import json
from dataclasses import replace

from rich.console import Console

from common.ids import Epoch, GatewayId, WorkerId
from common.messages.admin import GatewayStatus, RoleControl, StatusReport, WorkerStatus
from common.messages.fields import (
    KVCounts,
    Mode,
    PairStatus,
    Role,
    WorkerLoad,
    WorkerRates,
    WorkerState,
)
from services.cli.status import status_json, status_tables

NO = "it does not let our key in [no markup]"

REPORT = StatusReport(
    is_ready=False,
    reason="no decode worker is ready",
    model_name="toy",
    model_fingerprint="0123456789abcdef",
    uptime_seconds=12.4,
    num_requests=2,
    policy="flowkv",
    role_control=RoleControl.AUTO,
    scenario="normal",
    workers=(
        WorkerStatus(
            id=WorkerId("prefill-0"),
            pid=11,
            host="a/12345678/pid:[1]",
            epoch=Epoch(5),
            role=Role.PREFILL,
            state=WorkerState.READY,
            heartbeat_age_seconds=0.1,
            kv=KVCounts(
                total=10, free=4, referenced=3, cached=2, in_transfer=1, largest_free_run=4
            ),
            load=WorkerLoad(
                num_waiting=7,
                num_prefilling=1,
                num_sending=2,
                num_receiving=3,
                num_decoding=8,
                num_swapped=4,
                uncomputed_tokens=900,
                num_steps=9,
            ),
            pairs=(
                PairStatus(worker_id=WorkerId("decode-0"), epoch=Epoch(6), transport="", reason=NO),
                PairStatus(worker_id=WorkerId("gone"), epoch=Epoch(1), transport="tcp", reason=""),
            ),
            mode=Mode.PREFILL_LED,
            rates=WorkerRates(
                prefill_tokens_per_second=1234.4,
                decode_step_seconds=0.0205,
                decode_tokens_per_second=0.0,
            ),
        ),
        WorkerStatus(
            id=WorkerId("decode-0"),
            pid=12,
            host="b/87654321/pid:[1]",
            epoch=Epoch(6),
            role=Role.DECODE,
            state=WorkerState.DRAINING,
            heartbeat_age_seconds=0.1,
            kv=None,
            load=None,
            pairs=(),
            mode=Mode.BALANCED,
            rates=None,
        ),
    ),
    gateways=(
        GatewayStatus(
            id=GatewayId("gateway-0"),
            pid=13,
            host="a/12345678/pid:[1]",
            url="http://127.0.0.1:1",
            num_streams=2,
            is_draining=False,
        ),
    ),
)


def test_the_json_has_the_fields_that_scripts_rely_on() -> None:
    found = json.loads(status_json(REPORT))
    worker = found["workers"][0]
    assert {name: worker[name] for name in ("id", "pid", "role", "state")} == {
        "id": "prefill-0",
        "pid": 11,
        "role": "prefill",
        "state": "ready",
    }
    kv = worker["kv"]
    assert kv["total"] == kv["free"] + kv["referenced"] + kv["cached"] + kv["in_transfer"] == 10
    assert found["workers"][1]["kv"] is None


def printed(report: StatusReport, width: int = 200) -> list[str]:
    sink = io.StringIO()
    console = Console(file=sink, width=width, highlight=False)
    for table in status_tables(report):
        console.print(table)
    return [" ".join(line.split()) for line in sink.getvalue().splitlines()]


def test_people_get_tables_of_workers_their_load_and_gateways() -> None:
    lines = printed(REPORT)
    assert lines[0] == "not ready: no decode worker is ready model toy 2 requests up 12 s"
    assert lines[1] == "policy flowkv roles auto load normal"
    unpaired = f"unpaired: {NO}"
    assert lines[3] == f"prefill-0 a 11 prefill ready 10 4 3 2 1 decode-0 {unpaired}"
    assert lines[4] == f"decode-0 b 12 decode draining - - - - - prefill-0 {unpaired}"
    assert lines[6] == "prefill-0 prefill-led 7 1 2 3 8 4 900 1234 - 20.5"
    assert lines[7] == "decode-0 balanced - - - - - - - - - -"
    assert lines[9] == "gateway-0 a 13 ready http://127.0.0.1:1 2"


def test_names_stay_whole_and_nothing_is_cut_in_a_narrow_terminal() -> None:
    lines = printed(REPORT, width=80)
    assert [line.split()[0] for line in lines if line.startswith(("prefill-0", "decode-0"))] == [
        *("prefill-0", "decode-0"),
        *("prefill-0", "decode-0"),
    ]
    assert "…" not in "".join(lines)


def test_a_pair_that_works_is_told_with_its_transport() -> None:
    pair = PairStatus(worker_id=WorkerId("decode-0"), epoch=Epoch(6), transport="tcp", reason="")
    prefill = replace(REPORT.workers[0], pairs=(pair, pair))
    lines = printed(replace(REPORT, workers=(prefill, REPORT.workers[1])))
    assert lines[3].endswith("2 1 decode-0 tcp")
    assert lines[4].endswith("- - prefill-0 tcp")


def test_a_worker_that_was_told_another_role_is_shown_as_switching() -> None:
    switching = replace(REPORT.workers[1], is_switching=True)
    lines = printed(replace(REPORT, workers=(REPORT.workers[0], switching)))
    assert lines[4].startswith("decode-0 b 12 decode (switching) draining")


def test_a_cluster_whose_gateways_drain_is_draining() -> None:
    draining = replace(REPORT.gateways[0], is_draining=True)
    lines = printed(replace(REPORT, is_ready=True, reason="", gateways=(draining,)))
    assert lines[0].startswith("draining model toy")
    assert lines[9] == "gateway-0 a 13 draining http://127.0.0.1:1 2"
