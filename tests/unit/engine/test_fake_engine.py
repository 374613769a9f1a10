"""The engine without a model: its tokens depend on every block, and on nothing else."""

from collections.abc import Sequence

import pytest

from common.engine.fake_engine import FakeEngine, SteadyPace, expected_tokens
from common.engine.interface import SampleSpec, StepRow
from common.kv.layout import KVLayout
from common.sampling import SamplingParams

VOCAB = 1000
LAYOUT = KVLayout(num_layers=2, block_size=8, num_kv_heads=1, head_dim=4, dtype="float32")
PROMPT = list(range(1, 20))
GREEDY = SamplingParams(seed=3, max_tokens=4, temperature=0)


def fresh_pool() -> memoryview:
    return memoryview(bytearray(8 * LAYOUT.block_bytes))


def prefill(engine: FakeEngine, params: SamplingParams, table: list[int], num_choices: int) -> None:
    samples = tuple(SampleSpec(params, choice, PROMPT, ()) for choice in range(num_choices))
    engine.execute([StepRow(PROMPT[:8], 0, table)])
    (drawn,) = engine.execute([StepRow(PROMPT[8:], 8, table, samples)])
    wanted = [expected_tokens(PROMPT, params, choice, VOCAB)[0] for choice in range(num_choices)]
    assert [token.token_id for token in drawn] == wanted


def decode(engine: FakeEngine, params: SamplingParams, table: list[int]) -> list[int]:
    tokens = [expected_tokens(PROMPT, params, 0, VOCAB)[0]]
    while len(tokens) < params.max_tokens:
        start = len(PROMPT) + len(tokens) - 1
        row = StepRow(tokens[-1:], start, table, (SampleSpec(params, 0, PROMPT, tokens),))
        tokens.append(engine.execute([row])[0][0].token_id)
    return tokens


def test_chunks_and_decodes_draw_what_is_expected_of_the_prompt() -> None:
    engine = FakeEngine(LAYOUT, fresh_pool(), VOCAB)
    prefill(engine, GREEDY, [5, 2, 7], 1)
    assert decode(engine, GREEDY, [5, 2, 7]) == expected_tokens(PROMPT, GREEDY, 0, VOCAB)


def test_choices_differ_only_when_they_are_drawn_at_random() -> None:
    hot = SamplingParams(seed=3, max_tokens=4, temperature=1)
    prefill(FakeEngine(LAYOUT, fresh_pool(), VOCAB), hot, [0, 1, 2], 2)
    assert expected_tokens(PROMPT, hot, 0, VOCAB) != expected_tokens(PROMPT, hot, 1, VOCAB)
    assert expected_tokens(PROMPT, GREEDY, 0, VOCAB) == expected_tokens(PROMPT, GREEDY, 1, VOCAB)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_byte_that_is_changed_in_any_layer_changes_the_tokens(layer: int) -> None:
    pool = fresh_pool()
    engine = FakeEngine(LAYOUT, pool, VOCAB)
    prefill(engine, GREEDY, [5, 2, 7], 1)
    layer_bytes = LAYOUT.planes * LAYOUT.plane_elements * LAYOUT.element_bytes
    pool[2 * LAYOUT.block_bytes + layer * layer_bytes] ^= 1
    assert decode(engine, GREEDY, [5, 2, 7]) != expected_tokens(PROMPT, GREEDY, 0, VOCAB)


def test_swapped_blocks_change_the_tokens() -> None:
    engine = FakeEngine(LAYOUT, fresh_pool(), VOCAB)
    prefill(engine, GREEDY, [5, 2, 7], 1)
    assert decode(engine, GREEDY, [2, 5, 7]) != expected_tokens(PROMPT, GREEDY, 0, VOCAB)


def test_tokens_that_end_a_choice_are_never_drawn() -> None:
    first = expected_tokens(PROMPT, GREEDY, 0, VOCAB)[0]
    params = SamplingParams(seed=3, max_tokens=1, temperature=0, eos_token_ids=(first,))
    assert expected_tokens(PROMPT, params, 0, VOCAB) == [first + 1]


def test_logprobs_come_where_they_are_asked_for() -> None:
    engine = FakeEngine(LAYOUT, fresh_pool(), VOCAB)
    params = SamplingParams(seed=3, max_tokens=1, temperature=0, num_logprobs=2)
    spec = SampleSpec(params, 0, PROMPT, ())
    ((token,),) = engine.execute([StepRow(PROMPT, 0, [0, 1, 2], (spec,))])
    assert token.top_logprobs[0] == (token.token_id, token.logprob)
    assert len(token.top_logprobs) == 2


def test_each_step_is_paced_before_anything_is_written() -> None:
    seen: list[tuple[int, int]] = []
    pool = fresh_pool()
    steady = SteadyPace(0.0)

    def pace(rows: Sequence[StepRow]) -> None:
        steady(rows)
        seen.append((len(rows), sum(pool)))

    engine = FakeEngine(LAYOUT, pool, VOCAB, pace)
    engine.execute([StepRow(PROMPT[:8], 0, [0]), StepRow(PROMPT[:8], 0, [1])])
    assert seen == [(2, 0)]
    assert sum(pool) > 0
