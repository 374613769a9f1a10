"""Packing under a quota of attention time, against trying every size."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from common.scheduler.attention_cost import AttentionCost, Chunk
from common.scheduler.quota import largest_fit, pack, remainder

PROMPTS = st.lists(st.builds(Chunk, st.integers(0, 300), st.integers(1, 120)), max_size=8)
# Whole numbers of a unit: their sums are exact, and the reference may add them in another order.
COSTS = st.builds(
    AttentionCost,
    st.integers(0, 50).map(float),
    st.integers(0, 3).map(float),
    st.integers(1, 40).map(float),
)
QUOTAS = st.integers(1, 40_000).map(float)


def _pack_by_trying(
    prompts: list[Chunk], cost: AttentionCost, quota: float, block_size: int
) -> list[tuple[int, int]]:
    """Return (cached, tokens) of each chunk: whole prompts while they fit, then every size."""
    packed: list[tuple[int, int]] = []

    def spent(extra: tuple[int, int]) -> float:
        return sum(
            cost.chunk_seconds
            + cost.pair_seconds * tokens * (cached + tokens / 2)
            + cost.token_seconds * tokens
            for cached, tokens in [*packed, extra]
        )

    for prompt in prompts:
        cached, length = prompt.num_cached, prompt.num_tokens
        if spent((cached, length)) <= quota:
            packed.append((cached, length))
            continue
        fitting = [size for size in range(1, length + 1) if spent((cached, size)) <= quota]
        on_border = [size for size in fitting if (cached + size) % block_size == 0]
        if on_border:
            packed.append((cached, on_border[-1]))
        elif fitting:
            packed.append((cached, fitting[-1]))
        elif not packed:
            packed.append((cached, 1))
        break
    return packed


@given(PROMPTS, COSTS, QUOTAS, st.sampled_from([1, 4, 16]))
def test_a_step_is_what_trying_every_size_finds(
    prompts: list[Chunk], cost: AttentionCost, quota: float, block_size: int
) -> None:
    packed = pack(prompts, cost, quota, block_size=block_size)
    found = [(chunk.num_cached, chunk.num_tokens) for chunk in packed]
    assert found == _pack_by_trying(prompts, cost, quota, block_size)


@given(PROMPTS, COSTS, QUOTAS)
def test_steps_compute_every_token_once_in_order_within_the_quota(
    prompts: list[Chunk], cost: AttentionCost, quota: float
) -> None:
    waiting = deque(enumerate(prompts))
    computed: list[tuple[int, int]] = []
    while waiting:
        chunks = pack((prompt for _, prompt in waiting), cost, quota)
        assert chunks, "a step with nothing in it would be repeated for ever"
        is_one_token = [chunk.num_tokens for chunk in chunks] == [1]
        assert is_one_token or sum(map(cost.seconds, chunks)) <= quota
        for chunk in chunks:
            number, prompt = waiting.popleft()
            assert chunk.num_cached == prompt.num_cached
            computed += [(number, chunk.num_cached + n) for n in range(chunk.num_tokens)]
            left = remainder(prompt, chunk.num_tokens)
            if left.num_tokens:
                waiting.appendleft((number, left))
    assert computed == [
        (number, prompt.num_cached + n)
        for number, prompt in enumerate(prompts)
        for n in range(prompt.num_tokens)
    ]


@given(COSTS, st.builds(Chunk, st.integers(0, 300), st.integers(1, 120)), QUOTAS)
def test_the_largest_size_fits_and_the_next_one_does_not(
    cost: AttentionCost, prompt: Chunk, seconds: float
) -> None:
    size = largest_fit(cost, prompt, seconds)
    assert 0 <= size <= prompt.num_tokens
    assert size == 0 or cost.seconds(Chunk(prompt.num_cached, size)) <= seconds
    if size < prompt.num_tokens:
        assert cost.seconds(Chunk(prompt.num_cached, size + 1)) > seconds
