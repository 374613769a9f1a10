"""What a step holds: budget, chunks, order, prefix hits, and how sequences end."""

import pytest

from common.errors import ConfigError, ErrorCode, LocalProtocolError
from common.ids import RequestId
from common.kv.blocks import Hold
from common.sampling import FinishReason
from common.scheduler.effects import (
    EmitTokens,
    PrefillStarted,
    RequestBroke,
    RequestEnded,
)
from common.scheduler.local import LocalScheduler
from common.scheduler.steps import SchedulerLimits, StepPlan
from tests.support.scheduler_bench import EOS, FIRST, GATEWAY, STOP, Bench, new_request, tokens_of


def rows_of(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(row.sequence.owner, row.start, row.num_tokens) for row in plan.rows]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


# ---- admission and chunks ------------------------------------------------------------------------


def test_an_idle_scheduler_plans_nothing() -> None:
    bench = Bench()
    assert bench.plan() == (None, [])
    assert bench.scheduler.can_reserve()


def test_requests_are_admitted_in_the_order_they_came() -> None:
    bench = Bench(budget=16)
    for name, length in (("a", 5), ("b", 5), ("c", 5)):
        bench.add(new_request(name, prompt(length, ord(name))))
    plan, effects = bench.plan()
    assert rows_of(plan) == [("a/0", 0, 5), ("b/0", 0, 5), ("c/0", 0, 5)]
    assert effects == [PrefillStarted(RequestId(name), 0) for name in "abc"]


def test_a_long_prompt_is_cut_on_block_borders_and_goes_on_where_it_stopped() -> None:
    bench = Bench(budget=10)
    bench.add(new_request("a", prompt(21)))
    chunks = []
    for _ in range(3):
        plan, _ = bench.plan()
        chunks += rows_of(plan)
        assert plan is not None
        bench.finish(plan)
    assert chunks == [("a/0", 0, 8), ("a/0", 8, 8), ("a/0", 16, 5)]
    assert bench.tokens("a") == [2000]


def test_decodes_come_first_and_take_their_budget_from_the_prompts() -> None:
    bench = Bench(budget=9, max_seqs=8)
    bench.add(new_request("a", prompt(4)))
    bench.step()
    bench.add(new_request("b", prompt(30, 100)))
    plan, _ = bench.plan()
    assert rows_of(plan) == [("a/0", 4, 1), ("b/0", 0, 8)]


def test_a_prompt_that_got_less_than_it_needs_is_the_last_of_its_step() -> None:
    """Later requests are not even admitted: they would hold blocks here and at decode sides."""
    bench = Bench(budget=10)
    for name in "abc":
        bench.add(new_request(name, prompt(12, 100 * ord(name))))
    plan, effects = bench.plan()
    assert rows_of(plan) == [("a/0", 0, 8)]
    assert effects == [PrefillStarted(RequestId("a"), 0)]
    assert bench.scheduler.load(num_sending=0, num_receiving=0).num_waiting == 2


def test_a_step_never_has_more_rows_than_sequences_are_allowed() -> None:
    bench = Bench(budget=16, max_seqs=2)
    for name in "abc":
        bench.add(new_request(name, prompt(3, 100 * ord(name)), max_tokens=6))
    bench.run()
    assert bench.violations == []
    assert [len(bench.tokens(name)) for name in "abc"] == [6, 6, 6]


def test_prompts_being_computed_wait_while_decodes_fill_the_rows() -> None:
    bench = Bench(budget=8, max_seqs=2, num_blocks=32)
    bench.add(new_request("long", prompt(30), max_tokens=2))
    bench.step()
    for name in ("tr-1", "tr-2"):
        given = new_request(name, prompt(3, 500 + ord(name[-1])), max_tokens=3)
        acquired = bench.blocks.acquire(name, given.prompt, hold=Hold.TRANSFER, max_cached_tokens=0)
        assert acquired is not None
        bench.take_over(given, FIRST, owner=name)
    plan, _ = bench.plan()
    assert rows_of(plan) == [("tr-1", 3, 1), ("tr-2", 3, 1)]
    assert plan is not None
    bench.finish(plan)
    bench.run()
    assert bench.violations == []
    assert len(bench.tokens("long")) == 2


def test_a_request_that_no_empty_pool_could_hold_is_refused_at_once() -> None:
    bench = Bench(num_blocks=4)
    (broke,) = bench.add(new_request("a", prompt(16)))
    assert isinstance(broke, RequestBroke)
    assert (broke.request_id, broke.gateway_id, broke.code) == ("a", GATEWAY, ErrorCode.NO_ROOM)
    assert "16 tokens" in broke.message
    assert bench.scheduler.find(RequestId("a")) is None


def test_a_step_smaller_than_a_block_could_never_end_a_prompt_and_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 tokens cannot compute a block of 4"):
        LocalScheduler(Bench().blocks, SchedulerLimits(3, 8, 4, 0))


def test_the_head_of_the_queue_waits_for_room_and_nothing_overtakes_it() -> None:
    bench = Bench(num_blocks=4, budget=16)
    bench.add(new_request("a", prompt(9), max_tokens=3))
    bench.step()
    bench.add(new_request("big", prompt(9, 100), max_tokens=1))
    bench.add(new_request("small", prompt(2, 200), max_tokens=1))
    plan, effects = bench.plan()
    assert rows_of(plan) == [("a/0", 9, 1)]
    assert effects == []
    assert not bench.scheduler.can_reserve()
    assert plan is not None
    bench.finish(plan)
    bench.run()
    assert list(bench.reports) == ["a", "big", "small"]


def test_a_request_is_not_taken_in_twice() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3)))
    with pytest.raises(LocalProtocolError, match="request a is here already"):
        bench.add(new_request("a", prompt(3)))
    with pytest.raises(LocalProtocolError, match="request a is here already"):
        bench.scheduler.add_decoding(new_request("a", prompt(3)), "tr-1", FIRST, 0)


def test_only_two_steps_are_open_at_a_time() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=9))
    bench.step()
    bench.plan()
    bench.plan()
    with pytest.raises(LocalProtocolError, match="two steps are open already"):
        bench.plan()


def test_steps_are_finished_in_the_order_of_their_plans() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=9))
    bench.step()
    bench.plan()
    second, _ = bench.plan()
    assert second is not None
    with pytest.raises(LocalProtocolError, match="step 2 is not the oldest open one"):
        bench.finish(second)


def test_a_prompt_beside_decodes_that_leave_less_than_a_block_goes_on() -> None:
    bench = Bench(budget=4, num_blocks=24)
    bench.add(new_request("a", prompt(3), max_tokens=30))
    bench.step()
    bench.add(new_request("b", prompt(9), max_tokens=2))
    rows = []
    for _ in range(3):
        plan, _ = bench.plan()
        assert plan is not None
        rows.append(rows_of(plan)[1])
        bench.finish(plan)
    assert rows == [("b/0", 0, 3), ("b/0", 3, 1), ("b/0", 4, 3)]
    bench.run()
    assert bench.violations == []


# ---- prefix hits ---------------------------------------------------------------------------------


def test_a_known_prefix_is_not_computed_again_but_the_last_token_is() -> None:
    bench = Bench(budget=32)
    bench.add(new_request("a", prompt(12), max_tokens=1))
    bench.run()
    bench.add(new_request("b", prompt(12), max_tokens=1))
    bench.add(new_request("c", [*prompt(6), 99, 98], max_tokens=1))
    plan, effects = bench.plan()
    assert rows_of(plan) == [("b/0", 8, 4), ("c/0", 4, 4)]
    assert effects == [PrefillStarted(RequestId("b"), 8), PrefillStarted(RequestId("c"), 4)]
    assert plan is not None
    emitted = [e.delta for e in bench.finish(plan) if isinstance(e, EmitTokens)]
    assert [delta.num_cached_tokens for delta in emitted] == [8, 4]
    assert bench.violations == []


def test_a_chunk_is_a_prefix_for_others_once_the_step_after_it_is_planned() -> None:
    bench = Bench(budget=16, num_blocks=24)
    bench.add(new_request("a", prompt(40), max_tokens=1))
    bench.step()
    bench.step()
    bench.add(new_request("b", prompt(17), max_tokens=1))
    plan, _ = bench.plan()
    assert rows_of(plan) == [("a/0", 32, 8), ("b/0", 16, 1)]


def test_outputs_extend_the_known_prefix_of_a_conversation() -> None:
    bench = Bench(budget=32)
    bench.add(new_request("a", prompt(6), max_tokens=7))
    bench.run()
    spoken = [*prompt(6), *bench.tokens("a")]
    bench.add(new_request("b", [*spoken, 5, 5], max_tokens=1))
    plan, _ = bench.plan()
    assert rows_of(plan) == [("b/0", 12, 3)], "all 12 tokens whose K and V were computed are found"


# ---- ends ----------------------------------------------------------------------------------------


def scripted(*tokens: int) -> Bench:
    return Bench(token_of=lambda request_id, choice, index: tokens[index])


def test_a_choice_ends_at_the_end_of_sequence_token_which_is_sent() -> None:
    bench = scripted(7, EOS, 9)
    bench.add(new_request("a", prompt(3)))
    bench.run()
    assert bench.tokens("a") == [7, EOS]
    assert bench.reason("a") is FinishReason.STOP
    assert bench.reports["a"] == [RequestEnded(RequestId("a"), was_cancelled=False)]


def test_ignoring_the_end_of_sequence_goes_on_to_the_length() -> None:
    bench = scripted(EOS, EOS, EOS)
    bench.add(new_request("a", prompt(3), ignore_eos=True, max_tokens=3))
    bench.run()
    assert bench.tokens("a") == [EOS] * 3
    assert bench.reason("a") is FinishReason.LENGTH


def test_a_stop_token_ends_even_where_the_end_of_sequence_is_ignored() -> None:
    bench = scripted(EOS, STOP, 5)
    bench.add(new_request("a", prompt(3), ignore_eos=True))
    bench.run()
    assert bench.tokens("a") == [EOS, STOP]
    assert bench.reason("a") is FinishReason.STOP


def test_before_min_tokens_nothing_but_the_length_ends() -> None:
    bench = scripted(EOS, STOP, 7, EOS, 9)
    bench.add(new_request("a", prompt(3), min_tokens=2, max_tokens=9))
    bench.run()
    assert bench.tokens("a") == [EOS, STOP, 7, EOS]


def test_max_tokens_of_one_ends_with_the_prefill() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=1))
    effects = bench.step()
    assert isinstance(effects[-1], RequestEnded)
    assert [tokens_of(e.delta) for e in effects if isinstance(e, EmitTokens)] == [[2000]]
    assert bench.blocks.counts().referenced == 0


def test_a_pool_of_exactly_one_requests_size_serves_it_to_its_last_token() -> None:
    bench = Bench(num_blocks=4, budget=16)
    bench.add(new_request("a", prompt(10), max_tokens=7))
    bench.run()
    # 16 slots hold the prompt and six outputs; the seventh is drawn and needs no slot.
    assert len(bench.tokens("a")) == 7
    assert bench.reason("a") is FinishReason.LENGTH


def test_a_request_that_outgrows_the_whole_pool_ends_by_length_instead_of_hanging() -> None:
    bench = Bench(num_blocks=4, budget=16)
    bench.add(new_request("a", prompt(10), max_tokens=50))
    bench.run()
    assert len(bench.tokens("a")) == 7
    assert bench.reason("a") is FinishReason.LENGTH
    assert bench.violations == []


def test_room_for_output_is_asked_for_at_admission_but_no_more_than_the_request_may_use() -> None:
    bench = Bench(growth=8)
    bench.add(new_request("a", prompt(4), max_tokens=100))
    bench.add(new_request("b", prompt(4, 50), max_tokens=1))
    bench.plan()
    assert len(bench.blocks.block_ids("a/0")) == 3
    assert len(bench.blocks.block_ids("b/0")) == 2


# ---- broken rows ---------------------------------------------------------------------------------


def test_a_broken_row_ends_its_request_alone() -> None:
    bench = Bench(budget=16)
    for name in "abc":
        bench.add(new_request(name, prompt(3, 100 * ord(name)), max_tokens=2))
    plan, _ = bench.plan()
    assert plan is not None
    bench.finish(plan, failing=[1])
    (broke,) = bench.reports["b"]
    assert isinstance(broke, RequestBroke)
    assert (broke.code, broke.message) == (ErrorCode.INTERNAL, "the row broke")
    bench.run()
    assert [len(bench.tokens(name)) for name in "ac"] == [2, 2]
    assert bench.blocks.counts().referenced == 0


def test_a_request_with_several_broken_rows_is_told_once() -> None:
    bench = Bench(budget=16)
    bench.add(new_request("a", prompt(3), num_choices=3))
    bench.step()
    plan, _ = bench.plan()
    assert plan is not None
    assert len(plan.rows) == 3
    bench.finish(plan, failing=[0, 1, 2])
    assert len(bench.reports["a"]) == 1
    assert bench.blocks.counts().referenced == 0


def test_the_load_counts_what_there_is_to_do() -> None:
    bench = Bench(budget=8, num_blocks=8)
    bench.add(new_request("a", prompt(4)))
    bench.step()
    bench.add(new_request("b", prompt(12, 100)))
    bench.add(new_request("c", prompt(9, 200)))
    bench.step()
    load = bench.scheduler.load(num_sending=3, num_receiving=4)
    assert (load.num_waiting, load.num_prefilling, load.num_decoding) == (1, 1, 1)
    assert (load.num_sending, load.num_receiving, load.num_steps) == (3, 4, 2)
    assert load.uncomputed_tokens == (12 - 4) + 9
