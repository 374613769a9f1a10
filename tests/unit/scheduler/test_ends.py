"""Cancels, failures and handoffs: who holds blocks how long, and what is told."""

import pytest

from common.errors import ErrorCode
from common.ids import RequestId
from common.kv.blocks import Hold
from common.messages.handoff import AbortReason
from common.sampling import FinishReason
from common.scheduler.effects import (
    DecodeBegan,
    Effect,
    EmitTokens,
    Preempted,
    PrefillStarted,
    PromptComputed,
    PromptProgressed,
    RequestBroke,
    RequestEnded,
    StopHandoff,
)
from common.scheduler.request import RequestPhase
from tests.support.scheduler_bench import EOS, FIRST, Bench, new_request, tokens_of

A = RequestId("a")
CANCELLED = RequestEnded(A, was_cancelled=True)
STOPPED = StopHandoff(A, AbortReason.CANCELLED)


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def is_idle(bench: Bench) -> bool:
    counts = bench.blocks.counts()
    bench.blocks.validate()
    return counts.referenced == counts.in_transfer == 0 and not bench.scheduler.request_ids()


def sending(num_prompt: int = 6, **params: object) -> Bench:
    """A bench whose remote request "a" is computed, with an open handoff."""
    bench = Bench()
    bench.add(new_request("a", prompt(num_prompt), **params), is_remote=True)
    plan, _ = bench.plan()
    bench.scheduler.open_handoff(A)
    assert plan is not None
    bench.finish(plan)
    return bench


# ---- cancel in every phase -----------------------------------------------------------------------


def test_an_unknown_request_cannot_be_cancelled() -> None:
    assert Bench().cancel("a") is None


def test_a_waiting_request_is_cancelled_at_once() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(6)))
    assert bench.cancel("a") == [CANCELLED]
    assert bench.plan() == (None, [])
    assert is_idle(bench)


def test_a_request_between_two_chunks_is_cancelled_at_once() -> None:
    bench = Bench(budget=4)
    bench.add(new_request("a", prompt(10)))
    bench.step()
    assert bench.cancel("a") == [CANCELLED]
    assert is_idle(bench)


def test_a_request_in_a_step_keeps_its_blocks_until_the_step_ends() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(6)))
    plan, _ = bench.plan()
    assert plan is not None
    assert bench.cancel("a") == []
    assert bench.blocks.is_held("a/0")
    assert bench.cancel("a") == []
    assert bench.finish(plan) == [CANCELLED]
    assert ("a", 0) not in bench.streams
    assert is_idle(bench)


def test_a_decoding_request_is_cancelled_between_steps_at_once_and_in_a_step_after_it() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(6), num_choices=2))
    bench.step()
    plan, _ = bench.plan()
    assert plan is not None
    assert bench.cancel("a") == []
    assert bench.finish(plan) == [CANCELLED]
    assert [len(bench.tokens("a", choice)) for choice in range(2)] == [1, 1]
    assert is_idle(bench)


def test_a_choice_cancelled_in_a_step_keeps_its_blocks_until_the_step_ends() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(6), num_choices=2))
    bench.step()
    plan, _ = bench.plan()
    assert plan is not None
    assert bench.cancel("a", 1) == []
    assert bench.blocks.is_held("a/1")
    bench.finish(plan)
    assert not bench.blocks.is_held("a/1")
    bench.run()
    assert [len(bench.tokens("a", choice)) for choice in range(2)] == [4, 1]
    assert is_idle(bench)


def test_a_preempted_request_is_cancelled_in_the_queue() -> None:
    bench = Bench(num_blocks=6, budget=32)
    bench.add(new_request("old", prompt(10), max_tokens=8))
    bench.add(new_request("a", prompt(10, 50), max_tokens=8))
    bench.step_until(lambda effects: any(isinstance(effect, Preempted) for effect in effects))
    assert not bench.blocks.is_held("a/0")
    assert bench.cancel("a") == [CANCELLED]
    bench.run()
    assert len(bench.tokens("old")) == 8
    assert is_idle(bench)


def test_a_cancelled_request_is_told_once_however_often_it_is_cancelled() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(6)))
    bench.cancel("a")
    assert bench.cancel("a") is None
    assert bench.reports["a"] == [CANCELLED]


# ---- a remote request and its handoff ------------------------------------------------------------


def test_a_remote_prompt_tells_its_blocks_chunk_by_chunk_and_then_its_first_tokens() -> None:
    bench = Bench(budget=8)
    bench.add(new_request("a", prompt(14), num_choices=2), is_remote=True)
    assert bench.step() == [PrefillStarted(A, 0), PromptProgressed(A, 2)]
    bench.scheduler.open_handoff(A)
    first, second, computed = bench.step()
    assert [tokens_of(e.delta) for e in (first, second) if isinstance(e, EmitTokens)] == [
        [2000],
        [2100],
    ]
    assert isinstance(computed, PromptComputed)
    assert [item.choice for item in computed.first_tokens] == [0, 1]
    counts = bench.blocks.counts()
    assert (counts.referenced, counts.in_transfer) == (0, 4)
    assert bench.plan() == (None, [])


def test_a_cached_prefix_of_a_remote_prompt_can_leave_before_the_first_step() -> None:
    bench = Bench(budget=8)
    bench.add(new_request("warm", prompt(8), max_tokens=1))
    bench.run()
    bench.add(new_request("a", prompt(14)), is_remote=True)
    plan, effects = bench.plan()
    assert effects == [PrefillStarted(A, 8), PromptProgressed(A, 2)]
    assert plan is not None
    bench.finish(plan)
    assert bench.computed["a"].num_cached_tokens == 8


def test_choices_that_ended_with_their_first_token_are_not_handed_over() -> None:
    bench = Bench(token_of=lambda _, choice, index: EOS if choice == 0 else 7)
    bench.add(new_request("a", prompt(6), num_choices=3), is_remote=True)
    bench.step()
    assert [first.choice for first in bench.computed["a"].first_tokens] == [1, 2]
    assert bench.reason("a", 0) is FinishReason.STOP


def test_a_remote_request_whose_choices_all_ended_needs_no_decode_side() -> None:
    bench = Bench(token_of=lambda *_: EOS)
    bench.add(new_request("a", prompt(6)), is_remote=True)
    plan, _ = bench.plan()
    bench.scheduler.open_handoff(A)
    assert plan is not None
    assert bench.finish(plan)[-1] == StopHandoff(A, AbortReason.NOT_NEEDED)
    assert bench.blocks.is_held("a/0"), "the handoff may still read"
    assert bench.close_handoff("a", was_accepted=False) == [RequestEnded(A, was_cancelled=False)]
    assert is_idle(bench)


def test_an_accepted_handoff_frees_the_blocks_into_the_cache_and_tells_nothing() -> None:
    bench = sending()
    assert bench.close_handoff("a", was_accepted=True) == []
    assert bench.reports == {}
    assert is_idle(bench)
    assert bench.blocks.match(prompt(6), 6) == 4


def test_a_refused_handoff_keeps_the_prompt_for_another_try() -> None:
    bench = sending()
    assert bench.close_handoff("a", was_accepted=False) == []
    request = bench.scheduler.find(A)
    assert request is not None
    assert request.phase is RequestPhase.SENDING
    assert bench.blocks.counts().in_transfer == 2
    bench.scheduler.open_handoff(A)
    bench.close_handoff("a", was_accepted=True)
    assert is_idle(bench)


def test_a_handoff_of_a_request_that_is_gone_closes_silently() -> None:
    assert Bench().close_handoff("a", was_accepted=False) == []


@pytest.mark.parametrize("is_accepted", [False, True])
def test_a_cancel_during_a_handoff_keeps_the_blocks_until_it_closes(is_accepted: bool) -> None:
    bench = sending()
    assert bench.cancel("a") == [STOPPED]
    assert bench.blocks.counts().in_transfer == 2
    bench.close_handoff("a", was_accepted=is_accepted)
    assert is_idle(bench)
    assert bench.reports.get("a", []) == ([] if is_accepted else [CANCELLED])


def test_a_cancel_while_the_prompt_computes_and_its_handoff_is_open_waits_for_both() -> None:
    bench = Bench(budget=8)
    bench.add(new_request("a", prompt(14)), is_remote=True)
    bench.step()
    bench.scheduler.open_handoff(A)
    plan, _ = bench.plan()
    assert plan is not None
    assert bench.cancel("a") == [STOPPED]
    assert bench.finish(plan) == []
    assert bench.blocks.is_held("a/0")
    assert bench.close_handoff("a", was_accepted=False) == [CANCELLED]
    assert is_idle(bench)


def test_a_handoff_that_closes_during_the_step_leaves_the_blocks_to_the_step() -> None:
    bench = Bench(budget=8)
    bench.add(new_request("a", prompt(14)), is_remote=True)
    bench.step()
    bench.scheduler.open_handoff(A)
    plan, _ = bench.plan()
    assert plan is not None
    bench.cancel("a")
    assert bench.close_handoff("a", was_accepted=False) == []
    assert bench.blocks.is_held("a/0")
    assert bench.finish(plan) == [CANCELLED]
    assert is_idle(bench)


def test_a_failure_during_a_handoff_is_told_once_and_frees_when_it_closes() -> None:
    bench = sending()
    broke, stop = bench.take(bench.scheduler.fail(A, ErrorCode.WORKER_DIED, "decode-0 died"))
    assert isinstance(broke, RequestBroke)
    assert stop == STOPPED
    assert bench.cancel("a") == [], "the cancel that follows has nothing to add"
    assert bench.close_handoff("a", was_accepted=False) == []
    assert bench.reports["a"] == [broke]
    assert is_idle(bench)


def test_a_failure_during_a_step_is_told_once_and_frees_when_the_step_ends() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(6)))
    plan, _ = bench.plan()
    assert plan is not None
    (broke,) = bench.take(bench.scheduler.fail(A, ErrorCode.INTERNAL, "no gateway"))
    assert bench.take(bench.scheduler.fail(A, ErrorCode.INTERNAL, "again")) == []
    assert bench.finish(plan) == []
    assert bench.reports["a"] == [broke]
    assert is_idle(bench)


def test_failing_a_request_that_is_gone_does_nothing() -> None:
    assert Bench().scheduler.fail(A, ErrorCode.INTERNAL, "no gateway") == []


def test_cancelling_the_last_choice_during_a_handoff_stops_it() -> None:
    bench = sending(num_choices=2)
    assert bench.cancel("a", 0) == []
    assert bench.blocks.is_held("a/0"), "the other choice needs the prompt"
    assert bench.cancel("a", 1) == [STOPPED]
    bench.close_handoff("a", was_accepted=False)
    assert is_idle(bench)


# ---- decoded here after all ----------------------------------------------------------------------


def test_a_computed_prompt_can_be_decoded_here_after_a_refusal() -> None:
    bench = sending(num_choices=2)
    bench.close_handoff("a", was_accepted=False)
    began, *_ = bench.take(bench.scheduler.place_locally(A))
    assert began == DecodeBegan(A)
    assert bench.blocks.counts().in_transfer == 0
    bench.run()
    assert [len(bench.tokens("a", choice)) for choice in range(2)] == [4, 4]
    assert bench.violations == []
    assert is_idle(bench)


def test_a_prompt_placed_here_while_it_computes_decodes_without_a_handoff() -> None:
    bench = Bench(budget=8)
    bench.add(new_request("a", prompt(14)), is_remote=True)
    bench.step()
    assert bench.take(bench.scheduler.place_locally(A)) == []
    bench.run()
    assert bench.computed == {}
    assert len(bench.tokens("a")) == 4
    assert is_idle(bench)


def test_a_finished_lead_choice_still_lends_its_prompt_to_the_others() -> None:
    bench = sending(num_choices=3)
    bench.cancel("a", 0)
    bench.close_handoff("a", was_accepted=False)
    bench.take(bench.scheduler.place_locally(A))
    assert not bench.blocks.is_held("a/0")
    bench.run()
    assert [len(bench.tokens("a", choice)) for choice in range(3)] == [1, 4, 4]
    assert bench.violations == []
    assert is_idle(bench)


def test_placing_an_unknown_or_decoding_request_here_changes_nothing() -> None:
    bench = Bench()
    assert bench.scheduler.place_locally(A) == []
    bench.add(new_request("a", prompt(6)))
    bench.step()
    assert bench.scheduler.place_locally(A) == []
    bench.run()
    assert len(bench.tokens("a")) == 4


def test_ends_of_many_requests_in_one_step_are_told_in_the_order_of_its_rows() -> None:
    bench = Bench(budget=16)
    for name in "abc":
        bench.add(new_request(name, prompt(3, 100 * ord(name)), max_tokens=1))
    effects: list[Effect] = bench.step()
    assert [e.request_id for e in effects if isinstance(e, RequestEnded)] == ["a", "b", "c"]


def test_a_taken_over_request_is_cancelled_like_any_other() -> None:
    bench = Bench()
    acquired = bench.blocks.acquire("tr-1", prompt(6), hold=Hold.TRANSFER, max_cached_tokens=0)
    assert acquired is not None
    bench.take_over(new_request("a", prompt(6)), FIRST)
    assert bench.cancel("a") == [CANCELLED]
    assert is_idle(bench)
