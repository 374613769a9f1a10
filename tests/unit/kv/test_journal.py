import json
from pathlib import Path

import pytest

from common.kv.blocks import BlockManager, Hold
from common.kv.journal import AllocOp, JournalError, JournalWriter, Leak, replay


def record(num_blocks: int) -> tuple[BlockManager, list[str]]:
    lines: list[str] = []
    manager = BlockManager(num_blocks, 4, 0, "m", lambda op: lines.append(op.to_json()))
    return manager, lines


def run_some_life(manager: BlockManager) -> None:
    """Every kind of operation, with shared, cached and evicted blocks at the end."""
    prompt = list(range(12))
    manager.acquire("a", prompt, hold=Hold.REQUEST, max_cached_tokens=99)
    manager.publish("a", prompt)
    manager.fork("a", "a-1", 10)
    manager.grow("a", 20)
    manager.release("a")
    manager.acquire("b", [*prompt, 5, 5], hold=Hold.TRANSFER, max_cached_tokens=99)
    manager.release("a-1")
    manager.release("b")
    manager.acquire("c", [7] * 4 * 14, hold=Hold.REQUEST, max_cached_tokens=0)


def test_replay_rebuilds_the_state_from_the_lines_alone() -> None:
    manager, lines = record(16)
    run_some_life(manager)
    manager.validate()
    state = replay(lines)
    counts = manager.counts()
    assert state.num_blocks == counts.total
    assert len(state.free) == counts.free
    assert len(state.cached) == counts.cached == 2
    assert state.owners == {"c": list(manager.block_ids("c"))}
    assert not state.is_truncated


def test_an_owner_that_never_let_go_is_found_by_name() -> None:
    manager, lines = record(64)
    for number in range(8):
        owner = f"req-{number}"
        manager.acquire(owner, [number] * 9, hold=Hold.REQUEST, max_cached_tokens=0)
        if number != 3:
            manager.release(owner)
    manager.fork("req-3", "req-3/1", 8)
    leaks = replay(lines).leaks()
    born_at = 1 + 3 * 2 + 1  # the open line, three whole lives, and its own line
    assert leaks == [Leak("req-3", 3, 1, born_at), Leak("req-3/1", 2, 0, len(lines))]


def test_a_clean_life_leaves_no_leak() -> None:
    manager, lines = record(16)
    run_some_life(manager)
    manager.release("c")
    assert replay(lines).leaks() == []


def test_each_line_tells_pieces_and_fragmentation() -> None:
    manager, lines = record(8)
    for owner in "abcd":
        manager.acquire(owner, [1] * 8, hold=Hold.REQUEST, max_cached_tokens=0)
    manager.release("a")
    manager.release("c")
    manager.acquire("e", [1] * 12, hold=Hold.REQUEST, max_cached_tokens=0)
    released, acquired = (json.loads(line) for line in lines[-2:])
    assert (released["op"], released["owner"], released["n"]) == ("release", "c", 2)
    assert (released["free"], released["free_segments"], released["largest_free"]) == (4, 2, 2)
    assert released["frag"] == pytest.approx(0.5)
    assert (acquired["op"], acquired["n"], acquired["pieces"]) == ("acquire", 3, 2)
    assert acquired["frag"] == 0.0


def op(kind: str, owner: str, runs: str = "[]") -> str:
    return (
        f'{{"op":"{kind}","owner":"{owner}","n":4,"pieces":1,"runs":{runs},"shared":[],'
        '"free":0,"free_segments":0,"largest_free":0,"frag":0.0}'
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["not json"], "line 1: not an operation"),
        ([op("open", ""), op("melt", "a")], "line 2: not an operation"),
        ([op("open", ""), op("acquire", "a", "[[0,5]]")], "line 2: a takes blocks that are not"),
        ([op("open", ""), op("grow", "a", "[[0,1]]")], "line 2: a is unknown"),
        ([op("open", ""), op("release", "a")], "line 2: a holds nothing to release"),
        ([op("open", ""), op("evict", "", "[[0,1]]")], "line 2: block 0 is freed twice"),
        (
            [op("open", ""), op("acquire", "a", "[[0,1]]"), op("acquire", "a", "[[1,1]]")],
            "line 3: a holds blocks already",
        ),
        (
            [op("open", ""), op("acquire", "a", "[[0,1]]"), op("evict", "", "[[0,1]]")],
            "line 3: block 0 is freed twice or while held",
        ),
    ],
)
def test_a_line_that_cannot_be_right_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(JournalError, match=message):
        replay(lines)


def test_the_writer_stops_at_its_bound_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "alloc.jsonl"
    with JournalWriter(path, max_bytes=2000) as writer:
        manager = BlockManager(16, 4, 0, "m", writer.write)
        for number in range(50):
            manager.acquire(f"r{number}", [1], hold=Hold.REQUEST, max_cached_tokens=0)
            manager.release(f"r{number}")
        assert writer.num_dropped > 0
    lines = path.read_text().splitlines()
    assert path.stat().st_size < 2000 + 200
    state = replay(lines)
    assert state.is_truncated
    assert len(lines) - 1 + writer.num_dropped == 1 + 2 * 50


def test_every_line_is_in_the_file_before_the_next_operation(tmp_path: Path) -> None:
    path = tmp_path / "alloc.jsonl"
    with JournalWriter(path, max_bytes=10**6) as writer:
        seen: list[AllocOp] = []

        def write(op: AllocOp) -> None:
            writer.write(op)
            seen.append(op)
            assert path.read_text().splitlines() == [each.to_json() for each in seen]

        run_some_life(BlockManager(16, 4, 0, "m", write))
    assert replay(path.read_text().splitlines()).leaks()[0].owner == "c"
