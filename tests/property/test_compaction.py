"""Moves of cached blocks against all that could be moved, in pools of any pattern."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.blocks import BlockManager, Hold
from common.kv.compaction import LEAST_GAIN, plan_moves
from common.kv.journal import replay
from common.kv.runs import Run, to_runs

FREE, CACHED, HELD = ".", "c", "#"

bounded = settings(max_examples=300, deadline=None, derandomize=True)
pools = st.lists(st.sampled_from((FREE, FREE, CACHED, CACHED, HELD)), max_size=24).map("".join)


def free_runs(pool: str) -> list[Run]:
    return to_runs(place for place, state in enumerate(pool) if state == FREE)


def longest(pool: str) -> int:
    return max((length for _, length in free_runs(pool)), default=0)


def plan(pool: str, max_moves: int) -> list[tuple[int, int]]:
    cached = [place for place, state in enumerate(pool) if state == CACHED]
    return plan_moves(free_runs(pool), cached[::-1], max_moves)


def after(pool: str, moves: list[tuple[int, int]]) -> str:
    states = list(pool)
    for source, target in moves:
        assert states[source] == CACHED
        assert states[target] == FREE
        states[source], states[target] = FREE, CACHED
    return "".join(states)


def could_be(pool: str, max_moves: int) -> int:
    """Return the longest window that can be freed, by trying all that begin and end at pieces."""
    best = 0
    runs = [run for run in free_runs(pool) if run[0] > 0]
    for start in range(len(pool)):
        for end in range(start + 1, len(pool) + 1):
            inside = pool[start:end]
            is_cut = any(
                run_start < edge < run_start + length
                for run_start, length in free_runs(pool)
                for edge in (start, end)
            )
            places = sum(length for first, length in runs if not start <= first < end)
            if HELD in inside or is_cut or inside.count(CACHED) > min(max_moves, places):
                continue
            best = max(best, end - start)
    return best


@bounded
@given(pools, st.integers(0, 12))
def test_the_longest_free_run_becomes_the_longest_that_it_can_or_nothing_moves(
    pool: str, max_moves: int
) -> None:
    moves = plan(pool, max_moves)
    moved = after(pool, moves)
    best = could_be(pool, max_moves)
    if moves:
        assert longest(moved) >= best >= longest(pool) * LEAST_GAIN
    else:
        assert best < max(longest(pool) * LEAST_GAIN, longest(pool) + 1)
    assert len(moves) <= max_moves
    assert moved.count(CACHED) == pool.count(CACHED)


@bounded
@given(pools, st.integers(1, 12))
def test_moves_come_to_an_end(pool: str, max_moves: int) -> None:
    for _ in range(len(pool) + 1):
        moves = plan(pool, max_moves)
        if not moves:
            return
        pool = after(pool, moves)
    raise AssertionError(f"still moving: {pool}")


def test_holes_between_cached_blocks_are_joined() -> None:
    pool = "#.c.c.c.#..#"
    assert after(pool, plan(pool, 10)) == "#c......#cc#"
    assert after(pool, plan(pool, 1)) == "#cc.c...#..#"


def test_held_blocks_are_not_moved_across() -> None:
    assert plan("#.#.#.#c", 10) == []


Chains = list[tuple[list[int], bool]]


@bounded
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=10), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 8),
)
def test_a_manager_finds_every_prefix_where_its_bytes_went(chains: Chains, max_moves: int) -> None:
    lines: list[str] = []
    manager = BlockManager(20, 2, 0, "m", lambda op: lines.append(op.to_json()))
    pool: dict[int, tuple[int, ...]] = {}  # what is written into each block
    owners: list[str] = []
    for number, (tokens, _) in enumerate(chains):
        name = f"owner-{number}"
        got = manager.acquire(name, tokens, hold=Hold.REQUEST, max_cached_tokens=len(tokens))
        if got is None:
            continue
        owners.append(name)
        for place in range(got.num_cached_tokens // 2, len(got.block_ids)):
            pool[got.block_ids[place]] = tuple(tokens[: 2 * place + 2])
        manager.publish(name, tokens)
    for name in owners:
        if chains[int(name.removeprefix("owner-"))][1]:
            manager.release(name)
    before = manager.counts()
    hits = [manager.match(tokens, len(tokens)) for tokens, _ in chains]
    moves = manager.plan_compaction(max_moves)
    for source, target in moves:
        pool[target] = pool[source]
    manager.relocate(moves)
    manager.validate()
    now = manager.counts()
    assert (now.free, now.cached, now.referenced) == (before.free, before.cached, before.referenced)
    assert now.largest_free_run >= before.largest_free_run * (LEAST_GAIN if moves else 1)
    assert [manager.match(tokens, len(tokens)) for tokens, _ in chains] == hits
    assert replay(lines).free == {
        block for start, length in manager.free_runs() for block in range(start, start + length)
    }
    for number, (tokens, _) in enumerate(chains):
        name = f"again-{number}"
        if manager.hold_prefix(name, tokens):
            for place, block in enumerate(manager.block_ids(name)):
                assert pool[block] == tuple(tokens[: 2 * place + 2])
            manager.release(name)
