"""Runs of adjacent blocks, and how contiguous a block table is (FlowKV 1.3)."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

Run = tuple[int, int]
"""``(start, length)`` in blocks."""


def to_runs(block_ids: Iterable[int]) -> list[Run]:
    """Join neighbours in the given order: ``[5, 6, 2]`` becomes ``[(5, 2), (2, 1)]``."""
    runs: list[Run] = []
    start, end = -1, -1
    for block in block_ids:
        if block == end:
            end += 1
            continue
        if end > start:
            runs.append((start, end - start))
        start, end = block, block + 1
    if end > start:
        runs.append((start, end - start))
    return runs


def to_blocks(runs: Iterable[Run]) -> list[int]:
    """List the blocks of runs in order; undoes ``to_runs``."""
    return [block for start, length in runs for block in range(start, start + length)]


def contiguous_ratio(block_ids: Sequence[int]) -> float:
    """Return the share of consecutive pairs of a block table that are neighbours in the pool.

    1.0 for a table of fewer than two blocks.
    """
    if len(block_ids) < 2:
        return 1.0
    num_adjacent = sum(after == before + 1 for before, after in pairwise(block_ids))
    return num_adjacent / (len(block_ids) - 1)
