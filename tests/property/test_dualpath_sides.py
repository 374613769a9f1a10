"""DualPath's two sides against plain readings of the paper, and what must hold of them."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from services.controller.policy.dualpath.decode_side import (
    DecodeEngine,
    GroupLoad,
    assign_decodes,
    spread,
)
from services.controller.policy.dualpath.engines import EngineId, GroupId, QueuedRequest, Side
from services.controller.policy.dualpath.path import reading_side
from services.controller.policy.dualpath.prefill_side import PrefillEngine, assign_prompts
from services.controller.policy.dualpath.thresholds import Thresholds
from tests.unit.controller.policy.dualpath.references import (
    Decode,
    Prefill,
    algorithm_1,
    phase_1,
    phase_2,
)


@st.composite
def queues(draw: st.DrawFn, max_blocks: int = 12) -> list[QueuedRequest]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 100), st.integers(1, max_blocks)), max_size=20))
    return [QueuedRequest(f"r{n}", tokens, blocks) for n, (tokens, blocks) in enumerate(sizes)]


@st.composite
def decode_engines(draw: st.DrawFn) -> list[Decode]:
    count = draw(st.integers(1, 6))
    return [
        Decode(
            name,
            draw(st.integers(0, 5)),
            draw(st.integers(0, 200)),
            draw(st.integers(0, 20)),
        )
        for name in range(count)
    ]


LOADS = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 60)), min_size=1, max_size=6)
LIMITS = st.integers(0, 150)


@given(LOADS, queues(), LIMITS, LIMITS)
def test_prompts_go_where_algorithm_1_sends_them(
    loads: list[tuple[int, int]], requests: list[QueuedRequest], alpha: int, beta: int
) -> None:
    thresholds = Thresholds(alpha, beta)
    engines = [
        PrefillEngine(EngineId(name), tokens, queue, thresholds)
        for name, (tokens, queue) in enumerate(loads)
    ]
    plain = [Prefill(name, tokens, queue) for name, (tokens, queue) in enumerate(loads)]
    queue = deque(requests)
    assigned = assign_prompts(engines, queue)
    expected = algorithm_1(plain, deque(requests), alpha, beta)
    found = [(one.request.request_id, one.engine, int(one.category[1])) for one in assigned]
    assert found == expected
    # First come, first served; what could not be assigned still waits, in order.
    assert [*(one.request for one in assigned), *queue] == requests
    # One request at most takes an engine beyond beta; and nobody waits while one is within it.
    for engine in plain:
        given_to = [
            r for r, (_, name, _) in zip(requests, found, strict=False) if name == engine.name
        ]
        if given_to:
            assert engine.tokens - given_to[-1].num_tokens <= beta
    assert not queue or all(engine.tokens > beta for engine in plain)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 300), st.integers(1, 12)),
        min_size=1,
        max_size=5,
    ),
    queues(),
)
def test_requests_are_spread_as_phase_1_says(
    groups: list[tuple[int, int, int]], requests: list[QueuedRequest]
) -> None:
    loads = [GroupLoad(GroupId(name), *group) for name, group in enumerate(groups)]
    queue = deque(requests)
    found = [(request.request_id, group) for request, group in spread(queue, loads)]
    assert found == phase_1(requests, dict(enumerate(groups)))
    largest = max(pool for _, _, pool in groups)
    assert list(queue) == [r for r in requests if r.num_blocks > largest]


@given(decode_engines(), queues())
def test_decodes_go_where_phase_2_sends_them(
    plain: list[Decode], requests: list[QueuedRequest]
) -> None:
    engines = [DecodeEngine(EngineId(e.name), e.requests, e.tokens, e.free) for e in plain]
    queue = deque(requests)
    assigned = assign_decodes(engines, queue)
    found = [(one.request.request_id, one.engine, one.category == "low_token") for one in assigned]
    assert found == phase_2(plain, requests)
    # Within a group nobody overtakes, and no memory is promised twice.
    assert [*(one.request for one in assigned), *queue] == requests
    assert all(engine.free_blocks >= 0 for engine in engines)
    # The head waits only for room.
    assert not queue or all(engine.free_blocks < queue[0].num_blocks for engine in engines)


@given(decode_engines(), queues(max_blocks=1))
def test_tokens_stay_within_z_or_within_one_request_of_the_least_loaded(
    plain: list[Decode], requests: list[QueuedRequest]
) -> None:
    """With room everywhere, phase 2 balances: nobody gets beyond both bounds."""
    engines = [DecodeEngine(EngineId(e.name), e.requests, e.tokens, len(requests)) for e in plain]
    before = max(e.tokens for e in plain)
    queue = deque(requests)
    assign_decodes(engines, queue)
    assert not queue
    total = sum(r.num_tokens for r in requests) + sum(e.tokens for e in plain)
    z = 1.05 * total / len(engines)
    longest = max((r.num_tokens for r in requests), default=0)
    least = min(engine.num_tokens for engine in engines)
    assert max(e.num_tokens for e in engines) <= max(before, z + 1e-6, least + longest)


@given(st.integers(0, 5), st.integers(0, 5))
def test_the_shorter_queue_reads(prefill: int, decode: int) -> None:
    queues = {Side.PREFILL: prefill, Side.DECODE: decode}
    chosen = reading_side(prefill, decode)
    assert queues[chosen] == min(prefill, decode)
    if prefill == decode:
        assert chosen is Side.PREFILL
