"""Several processes share a folder, and some are killed in the middle of writing."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.support.stored_blocks import (
    FILE_BYTES,
    chain,
    files_of,
    folder_bytes,
    open_file_store,
    read_chain,
    store_chain,
)

ROOT = Path(__file__).parents[3]
WAIT_SECONDS = 60


def start_writer(
    folder: Path, num_blocks: int, name: str, length: int, num_chains: int
) -> subprocess.Popen[str]:
    arguments = [str(folder), str(num_blocks), name, str(length), str(num_chains)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.storage.store_writer", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def chains_of(process: subprocess.Popen[str]) -> list[tuple[int, int, int]]:
    """Return (number, length found, blocks read) of each chain that a writer told of."""
    text, _ = process.communicate(timeout=WAIT_SECONDS)
    lines = [line.split() for line in text.splitlines()]
    return [(int(a), int(b), int(c)) for a, b, c in (line for line in lines if len(line) == 3)]


def check_all(folder: Path, num_blocks: int, names: list[str], length: int) -> None:
    """Open the folder anew: every file is whole, has its parent, and all is within the bound."""
    store = open_file_store(folder, num_blocks)
    assert not list(folder.glob("writers/*/[0-9]*")), "a dead writer's files are left"
    num_found = 0
    for name in names:
        hashes = chain(name, length)
        found = store.longest_prefix(hashes)
        hits = read_chain(store, hashes)
        assert hits == [True] * found + [False] * (length - found), f"{name} has a hole"
        num_found += found
    assert store.stats().num_damaged == 0, "a torn block had a name"
    assert num_found == len(files_of(folder)), "a block cannot be reached"
    assert folder_bytes(folder) <= num_blocks * FILE_BYTES
    store.close()
    ledger = json.loads((folder / "ledger").read_text())
    assert ledger == {"stored_bytes": folder_bytes(folder), "reserved": {}}


def locked_folder_bytes(folder: Path) -> int:
    """Return the folder's bytes at one moment: nothing is named or evicted while they are added."""
    try:
        with (folder / "ledger").open("rb") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            return folder_bytes(folder)
    except FileNotFoundError:  # no writer came yet
        return 0


def test_a_writer_that_is_killed_at_any_time_leaves_whole_blocks(tmp_path: Path) -> None:
    num_blocks, length = 40, 5
    random_numbers = random.Random(7)
    names: list[str] = []
    for turn in range(6):
        process = start_writer(tmp_path, num_blocks, f"turn {turn}", length, 0)
        assert process.stdout is not None
        for _ in range(random_numbers.randrange(1, 8)):
            assert process.stdout.readline(), "the writer ended by itself"
        os.kill(process.pid, signal.SIGKILL)
        told = chains_of(process)
        names += [f"turn {turn} {number}" for number in range(len(told) + 12)]
        check_all(tmp_path, num_blocks, names, length)


def test_two_processes_write_the_same_blocks_and_evict_at_once(tmp_path: Path) -> None:
    num_blocks, length, num_chains = 12, 4, 40
    processes = [start_writer(tmp_path, num_blocks, "same", length, num_chains) for _ in range(2)]
    largest = 0
    while any(process.poll() is None for process in processes):
        largest = max(largest, locked_folder_bytes(tmp_path))
        time.sleep(0.01)  # the lock is the writers' too
    told = [chains_of(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [len(each) for each in told] == [num_chains] * 2
    assert largest <= num_blocks * FILE_BYTES, "the folder outgrew its bound"
    stored = sum(found for each in told for _, found, _ in each)
    assert stored > num_chains, "almost nothing was stored"
    check_all(tmp_path, num_blocks, [f"same {number}" for number in range(num_chains)], length)


def test_a_lock_that_is_not_let_go_holds_nobody_up_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.storage.folder_writer.LOCK_SECONDS", 0.05)
    store = open_file_store(tmp_path)
    with (tmp_path / "ledger").open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        store_chain(store, chain("a", 2))
        with pytest.raises(ConfigError, match="another process holds its lock"):
            open_file_store(tmp_path)
    stats = store.stats()
    assert (stats.num_written, stats.num_write_errors + stats.num_dropped_orphans) == (0, 2)
    store_chain(store, chain("a", 2))
    assert read_chain(store, chain("a", 2)) == [True] * 2
    store.close()
