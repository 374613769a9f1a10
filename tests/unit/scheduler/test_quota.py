"""A step's share of the waiting prompts."""

import math

import pytest

from common.scheduler.attention_cost import AttentionCost, Chunk
from common.scheduler.quota import QUOTA_SECONDS, pack, remainder

PER_TOKEN = AttentionCost(0.0, 0.0, 1.0)


def test_prompts_are_taken_whole_while_they_fit_and_the_next_in_part() -> None:
    prompts = [Chunk(0, 30), Chunk(64, 50), Chunk(0, 40), Chunk(0, 1)]
    assert pack(prompts, PER_TOKEN, 100.0) == [Chunk(0, 30), Chunk(64, 50), Chunk(0, 20)]
    assert remainder(prompts[2], 20) == Chunk(20, 20)


def test_nobody_overtakes_the_prompt_that_does_not_fit() -> None:
    costly = AttentionCost(10.0, 0.0, 1.0)
    assert pack([Chunk(0, 80), Chunk(0, 40), Chunk(0, 1)], costly, 100.0) == [Chunk(0, 80)]


def test_one_token_is_computed_whatever_it_costs() -> None:
    assert pack([Chunk(9, 5), Chunk(0, 1)], PER_TOKEN, 0.5) == [Chunk(9, 1)]
    assert pack([], PER_TOKEN, 0.5) == []


def test_a_partial_chunk_ends_on_a_block_border_where_it_reaches_one() -> None:
    assert pack([Chunk(10, 500)], PER_TOKEN, 100.0, block_size=64) == [Chunk(10, 54)]
    assert pack([Chunk(10, 500)], PER_TOKEN, 50.0, block_size=64) == [Chunk(10, 50)]
    assert pack([Chunk(10, 60)], PER_TOKEN, 100.0, block_size=64) == [Chunk(10, 60)]


def test_long_contexts_get_smaller_chunks_for_the_same_time() -> None:
    cost = AttentionCost(0.0, 1e-9, 1e-6)
    sizes = [pack([Chunk(n, 10**6)], cost, QUOTA_SECONDS)[0].num_tokens for n in (0, 30_000)]
    assert sizes == [23_515, 8_509]


@pytest.mark.parametrize("quota", [0.0, -1.0, math.inf, math.nan])
def test_a_quota_is_a_time(quota: float) -> None:
    with pytest.raises(ValueError, match="no quota"):
        pack([Chunk(0, 1)], PER_TOKEN, quota)
    with pytest.raises(ValueError, match="no quota"):
        pack([Chunk(0, 1)], PER_TOKEN, 1.0, block_size=0)
