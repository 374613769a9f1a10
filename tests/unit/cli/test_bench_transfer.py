import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import structlog

from common.errors import ConfigError
from common.kv.pool import PeerPool
from common.transfer.bench import _limits
from common.transfer.bench_peer import bench_peer, filled_pool
from services.cli import bench_transfer
from services.cli.bench_transfer import TransferBench
from services.cli.terminal import out

TINY = TransferBench("smollm2-135m", "64", "fresh,churned", "shm,tcp", 1)


@pytest.fixture
def own_logs() -> Iterator[None]:
    """Let what runs here in a measuring process's place say where its logs go, for a while."""
    yield
    structlog.reset_defaults()


def test_only_what_was_wished_for_is_passed_on() -> None:
    assert TransferBench().arguments() == []
    assert TransferBench(tokens="64", turns=3).arguments() == ["--tokens", "64", "--turns", "3"]
    assert TransferBench(devices="0,1").arguments() == ["--devices", "0,1"]


def test_pools_on_gpus_are_measured_by_a_module_of_their_own() -> None:
    assert TransferBench().module == "common.transfer.bench"
    assert TransferBench(devices="0,0").module == "common.transfer.bench_cuda"


def test_every_combination_is_measured_shown_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "rows.json"
    bench_transfer.run(TINY, as_json=True, output=kept)
    printed = capsys.readouterr()
    rows = json.loads(printed.out)["rows"]
    assert json.loads(kept.read_text())["rows"] == rows
    assert [(row["pool"], row["transport"]) for row in rows] == [
        ("fresh", "shm"),
        ("fresh", "tcp"),
        ("churned", "shm"),
        ("churned", "tcp"),
    ]
    limits = {"shm": {"memcpy", "streamed copy"}, "tcp": {"plain stream"}}
    assert all(row["limit"] in limits[row["transport"]] for row in rows)
    for row in rows:
        assert (row["shape"], row["num_blocks"], row["num_bytes"]) == ("smollm2-135m", 1, 1474560)
        assert row["gigabytes_per_second"] > 0
        assert row["share_of_limit"] > 0
    assert printed.err == "[1/1] smollm2-135m, 64 tokens\n"


def test_the_table_names_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    row: bench_transfer.Row = {
        "shape": "llama-8b",
        "tokens": 1024,
        "pool": "fresh",
        "transport": "tcp",
        "num_blocks": 16,
        "num_bytes": 16 * 8 * 2**20,
        "num_calls": 2,
        "milliseconds": 50.25,
        "gigabytes_per_second": 2.671,
        "limit": "plain stream",
        "limit_gigabytes_per_second": 3.1,
        "share_of_limit": 0.8616,
    }
    out().print(bench_transfer._table([row]))
    title, line = capsys.readouterr().out.splitlines()
    assert "GB/s" in title
    assert line.split() == (
        [
            "llama-8b",
            "1024",
            "fresh",
            "tcp",
            "128.0",
            "2",
            "50.25",
            "2.67",
            "3.10",
            "0.86",
            "plain",
            "stream",
        ]
    )


@pytest.mark.parametrize(
    ("bench", "message"),
    [
        (TransferBench(shapes="gpt"), "unknown: gpt; there are smollm2-135m"),
        (TransferBench(transports="pigeon"), "unknown: pigeon; there are shm, tcp"),
        (TransferBench(tokens="12,x"), "12,x is no list"),
        (TransferBench(devices="0"), "0 are not two GPUs: say for example 0,1"),
        (TransferBench(devices="0,99"), "GPUs 0,99: this process sees"),
        (TransferBench(devices="0,0", transports="shm"), "unknown: shm; there are cuda_ipc"),
    ],
)
def test_a_wish_that_cannot_be_measured_is_refused_by_name(
    own_logs: None, bench: TransferBench, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measuring = import_module(bench.module)
    assert measuring.main(bench.arguments()) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]


def test_the_measuring_process_s_refusal_is_told() -> None:
    with pytest.raises(ConfigError, match="unknown: pigeon; there are shm, tcp"):
        bench_transfer.run(TransferBench(transports="pigeon"), as_json=False, output=None)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*nosuch"):
        bench_transfer.run(TINY, as_json=False, output=tmp_path / "nosuch" / "rows.json")
    assert capsys.readouterr().err == ""


def test_the_limit_is_the_fastest_way_to_copy_as_many_bytes() -> None:
    with bench_peer(4, 65536) as peer:
        source = filled_pool(4, 65536)
        ways = _limits(peer, source.buffer[:131072])
        assert {transport: set(found) for transport, found in ways.items()} == {
            "shm": {"memcpy", "streamed copy"},
            "tcp": {"plain stream"},
            "rdma": {"memcpy", "streamed copy"},
        }
        mapped = PeerPool.open(peer.memory)
        for copy in ways["shm"].values():
            mapped.buffer[:131072] = bytes(131072)
            copy()
            assert mapped.buffer[:131072] == source.buffer[:131072]
        mapped.close()
        del ways, copy
        source.close()
