"""One engine of several processes computes what one process does."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from common.engine.failure import EngineBroken, RowsFailed
from common.engine.parallel import group
from common.engine.parallel.cpu import build_on_cpu
from common.engine.parallel.meeting import layout_of
from common.engine.parallel.messages import EngineSettings
from common.errors import ConfigError
from common.kv.pool import KVPool
from tests.support.engine_runs import PooledEngine, row
from tests.support.parallel_runs import HEADS, PooledRanks, count_ties
from tests.support.tiny_models import save_tiny_model

NOISE = 1e-4
NEVER = 1000.0
"""Seconds that no test lasts."""
CASES = [
    *(("llama", 2), ("llama-tied", 2), ("llama-biased", 2), ("mistral", 2), ("mistral-window", 2)),
    *(("qwen2", 2), ("qwen2-window", 2), ("qwen3", 2), ("qwen3", 4)),
]


@dataclass(frozen=True)
class Pair:
    ranks: PooledRanks
    alone: PooledEngine


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, PooledRanks]]:
    name, num_ranks = request.param
    folder = tmp_path_factory.mktemp(name)
    save_tiny_model(name, folder, **HEADS)
    ranks = PooledRanks(folder, num_ranks, num_blocks=128)
    yield folder, ranks
    ranks.close()


@pytest.fixture
def pair(built: tuple[Path, PooledRanks]) -> Pair:
    return Pair(built[1], PooledEngine(built[0]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model("llama", tmp_path, **HEADS)
    return tmp_path


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


def test_mixed_steps_have_the_logits_of_one_process(pair: Pair) -> None:
    """Fresh prompts, chunks, decodes, sampled and not, a step without any draw."""
    steps = []
    for engine in (pair.ranks, pair.alone):
        decoding, chunked, short = (engine.blocks_for(count) for count in (80, 60, 8))
        engine.execute(
            row(tokens(70, 2), 0, decoding, params=None),
            row(tokens(37, 7), 0, chunked, params=None),
            row(tokens(3, 3), 0, short, params=None),
        )
        results = engine.execute(
            row([11], 70, decoding),
            row(tokens(33, 4), 0, engine.blocks_for(33)),
            row([12], 3, short),
            row(tokens(23, 8), 37, chunked),
            row(tokens(9, 9), 0, engine.blocks_for(9), params=None),
        )
        assert results.pop() == ()
        steps.append([token for (token,) in results])
    count_ties(*steps, NOISE)


def test_greedy_decodes_are_those_of_one_process(pair: Pair) -> None:
    """Teacher-forced with the tokens of the one process."""
    prompts = [tokens(count, count) for count in (5, 64, 131)]
    contexts = [list(prompt) for prompt in prompts]
    engines = (pair.ranks, pair.alone)
    tables = [[engine.blocks_for(len(prompt) + 24) for prompt in prompts] for engine in engines]
    starts = [0] * len(prompts)
    num_ties = 0
    for _ in range(24):
        found, expected = (
            [
                token
                for (token,) in engine.execute(*map(row, _rest(contexts, starts), starts, blocks))
            ]
            for engine, blocks in zip(engines, tables, strict=True)
        )
        num_ties += count_ties(found, expected, NOISE)
        starts = [len(context) for context in contexts]
        for context, token in zip(contexts, expected, strict=True):
            context.append(token.token_id)
    print(f"{num_ties} ties in {24 * len(prompts)} tokens")
    assert num_ties <= 2


def _rest(contexts: list[list[int]], starts: list[int]) -> list[list[int]]:
    return [context[start:] for context, start in zip(contexts, starts, strict=True)]


def test_each_rank_holds_its_heads_alone(pair: Pair) -> None:
    """Side by side, what the ranks' pools hold of a prompt is what the one pool holds."""
    prompt = tokens(32, 5)
    ours, whole = pair.ranks.blocks_for(32), pair.alone.blocks_for(32)
    pair.ranks.execute(row(prompt, 0, ours))
    pair.alone.execute(row(prompt, 0, whole))
    layout, own = pair.alone.layout, pair.ranks.layout
    payload = layout.payload_bytes // 4
    blocks = pair.alone.pool.view(torch.float32).view(-1, layout.block_bytes // 4)[whole, :payload]
    shape = (2, layout.num_layers, 2, 16, -1, layout.head_dim)
    parts = []
    for pool in pair.ranks.pools:
        memory = torch.frombuffer(pool.buffer, dtype=torch.float32)
        part = memory.view(-1, own.block_bytes // 4)[ours, : own.payload_bytes // 4]
        parts.append(part.reshape(shape))
    joined = torch.cat(parts, dim=4)
    torch.testing.assert_close(joined, blocks.reshape(shape), rtol=1e-4, atol=1e-5)


def test_a_malformed_row_costs_nothing(pair: Pair) -> None:
    blocks = pair.ranks.blocks_for(16)
    for bad in (row([97], 0, blocks), row([3], 16, blocks), row([], 0, blocks), row([3], 0, [999])):
        with pytest.raises(ValueError, match=r"row|slot|block"):
            pair.ranks.execute(bad)
    (token,) = pair.ranks.execute(row([5, 6, 7], 0, blocks))[0]
    (expected,) = pair.alone.execute(row([5, 6, 7], 0, pair.alone.blocks_for(3)))[0]
    count_ties([token], [expected], NOISE)


def test_bfloat16_ranks_agree_but_for_rounding(folder: Path) -> None:
    ranks, alone = PooledRanks(folder, 2, dtype="bfloat16"), PooledEngine(folder)
    try:
        prompt = tokens(40, 1)
        (token,) = ranks.execute(row(prompt, 0, ranks.blocks_for(40)))[0]
        (expected,) = alone.execute(row(prompt, 0, alone.blocks_for(40)))[0]
        wanted = dict(expected.top_logprobs)
        near = [abs(wanted[it] - logprob) for it, logprob in token.top_logprobs[:5] if it in wanted]
        assert len(near) >= 3
        assert max(near) < 0.5
    finally:
        ranks.close()


def test_random_weights_are_the_same_for_any_number_of_ranks(folder: Path) -> None:
    results = []
    for num_ranks in (1, 2):
        ranks = PooledRanks(folder, num_ranks, has_weights=False)
        try:
            results.append(ranks.execute(row(tokens(20, 1), 0, ranks.blocks_for(20)))[0])
        finally:
            ranks.close()
    count_ties(*results, NOISE)


def test_a_row_without_numbers_fails_alone(folder: Path) -> None:
    ranks = PooledRanks(folder, 2)
    try:
        good, bad = ranks.blocks_for(16), ranks.blocks_for(16)
        # Rank 1's K and V of a position that only the second row reads.
        torch.frombuffer(ranks.pools[1].buffer, dtype=torch.uint8).fill_(255)
        ranks.execute(row([5], 0, good, params=None))
        with pytest.raises(RowsFailed, match=r"1 of 2 rows failed: \[1\]"):
            ranks.execute(row([6], 1, good), row([7], 1, bad))
        assert ranks.execute(row([8], 2, good))[0]
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("is_started", "num_ranks"), [(False, 2), (True, 4)], ids=["between steps", "in a step"]
)
def test_a_killed_rank_breaks_the_engine_by_name(
    folder: Path, is_started: bool, num_ranks: int
) -> None:
    ranks = PooledRanks(folder, num_ranks)
    try:
        blocks = ranks.blocks_for(40)
        ranks.execute(row(tokens(30, 1), 0, blocks))
        step = ranks.engine.launch([row([5], 30, blocks)]) if is_started else None
        processes = [psutil.Process(pid) for pid in ranks.engine.pids]
        rank = num_ranks // 2  # neither the first nor the last one of four
        victim = processes[rank - 1].pid
        os.kill(victim, signal.SIGKILL)
        message = rf"broken: rank {rank} \(process {victim}\) was killed by SIGKILL"
        with pytest.raises(EngineBroken, match=message):
            ranks.engine.collect(step or ranks.engine.launch([row([5], 30, blocks)]))
        with pytest.raises(EngineBroken, match=message):
            ranks.engine.launch([row([5], 30, blocks)])
        assert ranks.engine.broken is not None
        assert psutil.wait_procs(processes, timeout=30)[1] == []
    finally:
        ranks.close()


def test_a_rank_that_stands_still_ends_the_step_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = PooledRanks(folder, 2)
    try:
        blocks = ranks.blocks_for(20)
        ranks.execute(row(tokens(10, 1), 0, blocks))
        monkeypatch.setattr(group, "STOPPED_SECONDS", NEVER)
        monkeypatch.setattr(group, "STEP_SECONDS", 1.0)
        os.kill(ranks.engine.pids[0], signal.SIGSTOP)
        with pytest.raises(EngineBroken, match="a rank does not come to the end of a step"):
            ranks.execute(row([5], 10, blocks))
        with pytest.raises(EngineBroken, match="a rank does not come to the end of a step"):
            ranks.engine.launch([row([5], 10, blocks)])
    finally:
        ranks.close()


def test_a_stopped_rank_is_noticed_long_before_a_step_has_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "STOPPED_SECONDS", 0.1)
    ranks = PooledRanks(folder, 2)
    try:
        blocks = ranks.blocks_for(20)
        ranks.execute(row(tokens(10, 1), 0, blocks))
        (process,) = [psutil.Process(pid) for pid in ranks.engine.pids]
        process.suspend()
        with pytest.raises(EngineBroken, match=rf"rank 1 \(process {process.pid}\) is stopped"):
            ranks.execute(row([5], 10, blocks))
        assert psutil.wait_procs([process], timeout=30)[1] == []
    finally:
        ranks.close()


def test_a_step_can_be_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "STOPPED_SECONDS", NEVER)
    ranks = PooledRanks(folder, 2)
    try:
        blocks = ranks.blocks_for(20)
        ranks.execute(row(tokens(10, 1), 0, blocks))
        os.kill(ranks.engine.pids[0], signal.SIGSTOP)
        step = ranks.engine.launch([row([5], 10, blocks)])
        with ThreadPoolExecutor(1) as thread:
            thread.submit(ranks.engine.give_up, "nobody waits for it")
            with pytest.raises(EngineBroken, match="nobody waits for it"):
                ranks.engine.collect(step)
    finally:
        ranks.close()


def test_a_rank_that_cannot_do_its_part_is_told_at_the_start(folder: Path) -> None:
    settings = EngineSettings(
        folder=str(folder), num_ranks=2, engine="cpu", dtype="float32", block_size=16
    )
    pool = KVPool(2, layout_of(settings).block_bytes)
    pool.num_blocks = 2**30
    with pytest.raises(ConfigError, match=r"rank 1 failed: the KV pool needs .* GiB"):
        build_on_cpu(settings, pool)


def test_a_model_that_the_ranks_do_not_divide_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel 3: .* 4 KV heads .* 1, 2, 4 would"):
        PooledRanks(folder, 3)


OWNER = """
import sys
from pathlib import Path
from tests.support.parallel_runs import PooledRanks
ranks = PooledRanks(Path(sys.argv[1]), 2)
print(*ranks.engine.pids, flush=True)
sys.stdin.read()
"""


def test_ranks_die_with_their_worker(folder: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    with owner.stdout, owner.stdin:
        others = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(others) == 1
        owner.kill()
        owner.wait()
        assert psutil.wait_procs(others, timeout=30)[1] == []
