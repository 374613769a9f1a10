import io
import json

from rich.console import Console

from common.ids import Epoch, GatewayId, WorkerId
from common.messages.admin import GatewayStatus, StatusReport, WorkerStatus
from common.messages.fields import KVCounts, Role, WorkerLoad, WorkerState
from services.cli.status import status_json, status_tables

REPORT = StatusReport(
    is_ready=False,
    reason="no decode worker is ready",
    model_name="toy",
    model_fingerprint="0123456789abcdef",
    uptime_seconds=12.4,
    num_requests=2,
    workers=(
        WorkerStatus(
            id=WorkerId("prefill-0"),
            pid=11,
            epoch=Epoch(5),
            role=Role.PREFILL,
            state=WorkerState.READY,
            heartbeat_age_seconds=0.1,
            kv=KVCounts(
                total=10, free=4, referenced=3, cached=2, in_transfer=1, largest_free_run=4
            ),
            load=WorkerLoad(
                num_waiting=7,
                num_prefilling=0,
                num_sending=0,
                num_receiving=0,
                num_decoding=8,
                uncomputed_tokens=0,
                num_steps=9,
            ),
        ),
        WorkerStatus(
            id=WorkerId("decode-0"),
            pid=12,
            epoch=Epoch(6),
            role=Role.DECODE,
            state=WorkerState.DRAINING,
            heartbeat_age_seconds=0.1,
            kv=None,
            load=None,
        ),
    ),
    gateways=(
        GatewayStatus(id=GatewayId("gateway-0"), pid=13, url="http://127.0.0.1:1", num_streams=2),
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


def test_people_get_a_table_of_workers_and_gateways() -> None:
    sink = io.StringIO()
    console = Console(file=sink, width=200, highlight=False)
    for table in status_tables(REPORT):
        console.print(table)
    lines = [line.split() for line in sink.getvalue().splitlines()]
    assert " ".join(lines[0]) == (
        "not ready: no decode worker is ready model toy 2 requests up 12 s"
    )
    assert lines[2] == ["prefill-0", "11", "prefill", "ready", "10", "4", "3", "2", "1", "7", "8"]
    assert lines[3] == ["decode-0", "12", "decode", "draining", "-", "-", "-", "-", "-", "-", "-"]
    assert lines[5] == ["gateway-0", "13", "http://127.0.0.1:1", "2"]
