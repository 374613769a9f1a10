"""Which prefixes the tree of prompts finds hot, and what it keeps to know that."""

from collections.abc import Sequence
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controller.policy import prefix_heat
from services.controller.policy.prefix_heat import (
    HALF_LIFE_SECONDS,
    HOT_USES,
    MIN_HOT_BLOCKS,
    PrefixHeat,
)

BLOCK_SIZE = 1
SHARED = tuple(range(10))
ENOUGH = int(HOT_USES)


def frame(prompt: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in prompt)


def chain(prompt: Sequence[int]) -> tuple[bytes, ...]:
    """Return a hash for each block that names all before it; a block is one token here."""
    return tuple(
        blake2b(frame(prompt[: place + 1]), digest_size=16).digest() for place in range(len(prompt))
    )


def use(heat: PrefixHeat, prompt: Sequence[int], now: float = 0.0) -> None:
    heat.use(chain(prompt), frame(prompt), BLOCK_SIZE, now)
    heat.validate()


def hot(heat: PrefixHeat, now: float = 0.0) -> list[tuple[int, ...]]:
    """Return the tokens of what is hot; its hashes are those of its tokens."""
    found: list[tuple[int, ...]] = []
    for prefix in heat.hot(now):
        tokens = memoryview(prefix.tokens).cast("i").tolist()
        assert prefix.hashes == chain(tokens)
        assert prefix.digest == prefix.hashes[-1]
        found.append(tuple(tokens))
    return found


def test_what_many_prompts_share_is_hot_where_they_part() -> None:
    heat = PrefixHeat()
    for number in range(ENOUGH):
        assert hot(heat) == []
        use(heat, (*SHARED, 100 + number, 7, 7, 7))
    assert hot(heat) == [SHARED]


def test_a_prompt_that_comes_again_and_again_is_hot() -> None:
    heat = PrefixHeat()
    for _ in range(ENOUGH):
        use(heat, SHARED)
    assert hot(heat) == [SHARED]


def test_the_turns_of_one_conversation_are_not_hot() -> None:
    heat = PrefixHeat()
    for num_turns in range(1, 20):
        use(heat, tuple(range(10 * num_turns)))
    assert hot(heat) == []


def test_the_hotter_prefix_comes_first() -> None:
    heat = PrefixHeat()
    inner = (*SHARED, *range(50, 55))
    for number in range(ENOUGH):
        use(heat, (*inner, 100 + number))
    for number in range(ENOUGH):
        use(heat, (*SHARED, 200 + number))
    use(heat, (*inner, 99))
    assert hot(heat) == [SHARED, inner]


def test_a_prefix_that_is_used_no_more_cools() -> None:
    heat = PrefixHeat()
    for number in range(ENOUGH + 1):
        use(heat, (*SHARED, 100 + number))
    assert hot(heat, HALF_LIFE_SECONDS / 10) == [SHARED]
    assert hot(heat, HALF_LIFE_SECONDS) == []


def test_uses_that_are_far_apart_make_nothing_hot() -> None:
    heat = PrefixHeat()
    for number in range(50):
        use(heat, (*SHARED, 100 + number), now=number * HALF_LIFE_SECONDS)
    assert hot(heat, 50 * HALF_LIFE_SECONDS) == []


@pytest.mark.parametrize(("num_blocks", "num_hot"), [(MIN_HOT_BLOCKS - 1, 0), (MIN_HOT_BLOCKS, 1)])
def test_a_prefix_of_a_few_blocks_is_never_hot(num_blocks: int, num_hot: int) -> None:
    heat = PrefixHeat()
    for _ in range(100):
        use(heat, SHARED[:num_blocks])
    assert len(hot(heat)) == num_hot


def test_prompts_that_never_come_again_do_not_drive_a_hot_prefix_out() -> None:
    heat = PrefixHeat()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_heat, "MAX_NODES", 20)
        for number in range(ENOUGH):
            use(heat, (*SHARED, 100 + number))
        for number in range(200):
            use(heat, range(1000 * number + 1000, 1000 * number + 1006))
        assert hot(heat) == [SHARED]


def test_of_a_long_prompt_only_the_beginning_is_kept() -> None:
    heat = PrefixHeat()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_heat, "MAX_CHAIN_BLOCKS", 6)
        for _ in range(ENOUGH):
            use(heat, SHARED)
    assert (hot(heat), heat.num_blocks) == ([SHARED[:6]], 6)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=12), st.floats(0, 20)), max_size=40
    )
)
def test_memory_is_bounded_and_no_prefix_is_hotter_than_it_is_used(
    prompts: list[tuple[list[int], float]],
) -> None:
    heat, now = PrefixHeat(), 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_heat, "MAX_NODES", 12)
        patch.setattr(prefix_heat, "MAX_BLOCKS", 40)
        patch.setattr(prefix_heat, "MAX_CHAIN_BLOCKS", 10)
        seen: list[tuple[list[int], float]] = []
        for prompt, seconds in prompts:
            now += seconds
            use(heat, prompt, now)
            seen.append((prompt, now))
            assert heat.num_nodes <= 12
            assert heat.num_blocks <= 40
            for prefix in heat.hot(now):
                tokens = memoryview(prefix.tokens).cast("i").tolist()
                uses = (
                    0.5 ** ((now - at) / HALF_LIFE_SECONDS)
                    for used, at in seen
                    if used[: len(tokens)] == tokens
                )
                assert HOT_USES <= prefix.num_uses <= sum(uses) + 1e-6
                assert prefix.hashes == chain(tokens)
