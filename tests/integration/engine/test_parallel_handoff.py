"""Requests go on where another number of ranks prefilled them: their KV heads are moved by plan."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import flowpath_native
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.engine.dtype import load_model_layout
from common.transfer.head_copies import block_checksums, write_heads
from common.transfer.heads import plan_heads
from tests.support.engine_runs import PooledEngine, row
from tests.support.parallel_runs import HEADS, PooledRanks, count_ties
from tests.support.tiny_models import save_tiny_model

NUM_NEW = 12
NOISE = 1e-4
Fleet = dict[int, PooledRanks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model("qwen3", path, **HEADS)
    return path


@pytest.fixture(scope="module")
def fleets(folder: Path) -> Iterator[tuple[Fleet, Fleet]]:
    """Prefill and decode workers, by their number of ranks."""
    with ExitStack() as stack:

        def started(num_ranks: int, seed: int) -> PooledRanks:
            ranks = PooledRanks(folder, num_ranks, seed=seed)
            stack.callback(ranks.close)
            return ranks

        yield {n: started(n, 1) for n in (1, 2, 4)}, {n: started(n, 2) for n in (1, 2)}


def move(source: PooledRanks, target: PooledRanks, pairs: tuple[list[int], list[int]]) -> None:
    """Bring blocks into the target's pools, and compare checksums as a receiver does."""
    whole = load_model_layout(source.config, "float32", 16)
    parts: list[list[NDArray[np.uint64]]] = [[] for _ in target.pools]
    for transfer in plan_heads(whole, len(source.pools), len(target.pools)):
        report = write_heads(
            target.pools[transfer.target_rank].buffer,
            source.pools[transfer.source_rank].buffer,
            transfer,
            pairs,
        )
        parts[transfer.target_rank].append(report.partial_sums)
    for pool, sums in zip(target.pools, parts, strict=True):
        found = block_checksums(sums, target.layout.block_bytes)
        there = flowpath_native.checksum_blocks(pool.buffer, pairs[1], pool.block_bytes)
        assert found.tolist() == there.tolist()


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 2), (2, 2), (2, 1), (4, 2), (4, 1)])
def test_decoding_goes_on_with_the_moved_heads(
    folder: Path, fleets: tuple[Fleet, Fleet], num_sources: int, num_targets: int
) -> None:
    source, target = fleets[0][num_sources], fleets[1][num_targets]
    alone = PooledEngine(folder)
    prompt = torch.randint(3, 97, (45,), generator=torch.Generator().manual_seed(7)).tolist()
    total = len(prompt) + NUM_NEW
    expected = alone.blocks_for(total)
    (first,) = alone.execute(row(prompt, 0, expected))[0]
    ours = source.blocks_for(len(prompt))
    theirs = target.blocks_for(total)
    (token,) = source.execute(row(prompt, 0, ours))[0]
    num_ties = count_ties([token], [first], NOISE)
    move(source, target, (ours, theirs[: len(ours)]))
    last = first
    for at in range(len(prompt), total):
        (token,) = target.execute(row([last.token_id], at, theirs))[0]
        (last,) = alone.execute(row([last.token_id], at, expected))[0]
        num_ties += count_ties([token], [last], NOISE)
    print(f"{num_ties} ties in {NUM_NEW + 1} tokens")
    assert num_ties <= 1
