"""Several choices of one prompt, and decodes that give way when the pool is full."""

from common.ids import RequestId
from common.kv.blocks import Hold
from common.messages.handoff import FirstToken
from common.sampling import FinishReason, SampledToken
from common.scheduler.effects import (
    CopyBlocks,
    DecodeBegan,
    Effect,
    EmitTokens,
    Preempted,
    RequestEnded,
)
from tests.support.scheduler_bench import EOS, FIRST, Bench, new_request


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def has_preempted(effects: list[Effect]) -> bool:
    return any(isinstance(effect, Preempted) for effect in effects)


def firsts(*choices: int) -> tuple[FirstToken, ...]:
    return tuple(
        FirstToken(choice=choice, token=SampledToken(token_id=2000 + 100 * choice))
        for choice in choices
    )


def held(bench: Bench, owner: str, request_prompt: list[int]) -> None:
    acquired = bench.blocks.acquire(owner, request_prompt, hold=Hold.TRANSFER, max_cached_tokens=0)
    assert acquired is not None


# ---- choices -------------------------------------------------------------------------------------


def test_choices_share_the_prompts_full_blocks_and_copy_its_last_one() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(6), num_choices=3, max_tokens=5))
    effects = bench.step()
    copies = [effect for effect in effects if isinstance(effect, CopyBlocks)]
    tables = [bench.blocks.block_ids(f"a/{choice}") for choice in range(3)]
    assert {table[0] for table in tables} == {tables[0][0]}
    assert [copy.pairs for copy in copies] == [((tables[0][1], table[1]),) for table in tables[1:]]
    assert len({table[1] for table in tables}) == 3
    bench.run()
    assert [bench.tokens("a", choice) for choice in range(3)] == [
        [2000 + 100 * choice + index for index in range(5)] for choice in range(3)
    ]
    assert bench.violations == []
    assert len(bench.reports["a"]) == 1


def test_a_prompt_that_ends_on_a_block_border_is_shared_without_a_copy() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(8), num_choices=2))
    assert not any(isinstance(effect, CopyBlocks) for effect in bench.step())
    bench.run()
    assert bench.violations == []


def test_a_choice_that_ends_with_its_first_token_leaves_the_others_alone() -> None:
    for ended in range(3):
        bench = Bench(token_of=lambda _, c, i, e=ended: EOS if c == e else 2000 + c * 100 + i)  # type: ignore[misc]  # a default binds the loop's value
        bench.add(new_request("a", prompt(6), num_choices=3, max_tokens=4))
        bench.run()
        assert [len(bench.tokens("a", choice)) for choice in range(3)] == [
            1 if choice == ended else 4 for choice in range(3)
        ]
        assert bench.violations == []
        assert bench.blocks.counts().referenced == 0


def test_choices_that_all_end_with_their_first_token_end_the_request() -> None:
    bench = Bench(token_of=lambda *_: EOS)
    bench.add(new_request("a", prompt(6), num_choices=3))
    effects = bench.step()
    assert isinstance(effects[-1], RequestEnded)
    assert bench.blocks.counts().referenced == 0


def test_one_cancelled_choice_ends_and_the_others_go_on() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(6), num_choices=3, max_tokens=4))
    bench.step()
    for choice in (0, 2):
        assert bench.cancel("a", choice) == []
        assert not bench.blocks.is_held(f"a/{choice}")
    bench.run()
    assert [len(bench.tokens("a", choice)) for choice in range(3)] == [1, 4, 1]
    (ended,) = bench.reports["a"]
    assert ended == RequestEnded(RequestId("a"), was_cancelled=False)


def test_cancelling_every_choice_one_by_one_ends_the_request() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(6), num_choices=2, max_tokens=9))
    bench.step()
    assert bench.cancel("a", 0) == []
    (ended,) = bench.cancel("a", 1) or []
    assert isinstance(ended, RequestEnded)
    assert bench.blocks.counts().referenced == 0


def test_a_choice_cannot_be_complete_before_the_choices_are_drawn() -> None:
    bench = Bench(budget=4)
    bench.add(new_request("a", prompt(6), num_choices=2))
    assert bench.cancel("a", 0) == []
    bench.step()
    assert bench.cancel("a", 1) == []
    bench.run()
    assert [len(bench.tokens("a", choice)) for choice in range(2)] == [4, 4]


def test_choices_without_room_for_a_copy_are_computed_when_there_is_room() -> None:
    bench = Bench(num_blocks=4, budget=16)
    bench.add(new_request("a", prompt(14), num_choices=2, max_tokens=2))
    bench.step()
    assert bench.blocks.is_held("a/0")
    assert not bench.blocks.is_held("a/1")
    assert not bench.scheduler.can_reserve()
    bench.run()
    assert [len(bench.tokens("a", choice)) for choice in range(2)] == [2, 2]
    assert bench.violations == []


# ---- taken over ----------------------------------------------------------------------------------


def test_a_request_that_was_taken_over_decodes_at_once_and_resends_its_first_token() -> None:
    bench = Bench()
    held(bench, "tr-1", prompt(6))
    effects = bench.take_over(new_request("a", prompt(6), max_tokens=4), FIRST)
    assert effects == [DecodeBegan(RequestId("a"))]
    counts = bench.blocks.counts()
    assert (counts.referenced, counts.in_transfer) == (2, 0)
    (emitted,) = [effect for effect in bench.step() if isinstance(effect, EmitTokens)]
    assert emitted.delta.index == 0
    assert len(emitted.delta.tokens) == 2
    bench.run()
    assert bench.tokens("a") == [2000, 2001, 2002, 2003]
    assert bench.violations == []
    assert not bench.blocks.is_held("tr-1")


def test_what_was_taken_over_is_found_by_the_next_prompt() -> None:
    bench = Bench()
    held(bench, "tr-1", prompt(9))
    bench.take_over(new_request("a", prompt(9)), FIRST)
    bench.step()
    assert bench.blocks.match(prompt(9), 9) == 8


def test_choices_that_were_taken_over_share_the_arrived_blocks() -> None:
    bench = Bench()
    held(bench, "tr-1", prompt(6))
    bench.take_over(new_request("a", prompt(6), num_choices=4, max_tokens=4), firsts(1, 3))
    assert bench.blocks.block_ids("tr-1")[0] == bench.blocks.block_ids("tr-1/3")[0]
    bench.run()
    assert [len(bench.tokens("a", choice)) for choice in (1, 3)] == [4, 4]
    assert ("a", 0) not in bench.streams
    assert bench.violations == []


def test_a_prompt_that_fills_the_pool_ends_every_taken_over_choice_by_length() -> None:
    bench = Bench(num_blocks=2)
    held(bench, "tr-1", prompt(7))
    bench.take_over(new_request("a", prompt(7), num_choices=2, max_tokens=9), firsts(0, 1))
    bench.run()
    assert bench.violations == []
    for choice in range(2):
        assert bench.reason("a", choice) is FinishReason.LENGTH
    held(bench, "tr-1", prompt(8, 50))
    bench.take_over(new_request("b", prompt(8, 50), num_choices=2, max_tokens=9), firsts(0, 1))
    bench.run()
    assert bench.violations == []
    assert [bench.tokens("b", choice) for choice in range(2)] == [[2000], [2100]]
    assert [bench.reason("b", choice) for choice in range(2)] == [FinishReason.LENGTH] * 2


# ---- preemption ----------------------------------------------------------------------------------


def test_the_newest_decode_gives_way_and_comes_back_with_the_same_tokens() -> None:
    bench = Bench(num_blocks=6, budget=32)
    bench.add(new_request("old", prompt(10), max_tokens=8))
    bench.add(new_request("new", prompt(10, 50), max_tokens=8))
    preempted: list[Preempted] = []
    for _ in range(60):
        preempted += [effect for effect in bench.step() if isinstance(effect, Preempted)]
        bench.blocks.validate()
    assert {effect.request_id for effect in preempted} == {"new"}
    assert preempted[0].num_tokens == 13
    for name in ("old", "new"):
        assert bench.tokens(name) == [2000 + index for index in range(8)]
    assert list(bench.reports) == ["old", "new"]
    assert bench.violations == []
    assert bench.blocks.counts().referenced == 0


def test_a_preempted_decode_waits_at_the_head_before_newer_requests() -> None:
    bench = Bench(num_blocks=6, budget=32)
    for name, first in (("old", 0), ("new", 50)):
        bench.add(new_request(name, prompt(10, first), max_tokens=8))
    bench.step_until(has_preempted)
    bench.add(new_request("late", prompt(2, 90), max_tokens=1))
    bench.step_until(lambda _: "late" in bench.reports)
    assert bench.blocks.is_held("new/0"), "it came back no later than the newer request came in"
    bench.run()
    assert len(bench.tokens("new")) == 8


def test_a_worker_with_preempted_sequences_takes_no_reservations() -> None:
    bench = Bench(num_blocks=6, budget=32)
    for name, first in (("old", 0), ("new", 50)):
        bench.add(new_request(name, prompt(10, first), max_tokens=8))
    assert bench.scheduler.can_reserve(), "what waits for its turn alone is no lack of room"
    bench.step()
    assert bench.scheduler.can_reserve()
    bench.step_until(has_preempted)
    assert not bench.scheduler.can_reserve()


def test_reservations_are_taken_again_when_what_found_no_room_is_cancelled() -> None:
    bench = Bench(num_blocks=4)
    bench.add(new_request("a", prompt(9), max_tokens=3))
    bench.step()
    bench.add(new_request("big", prompt(9, 100)))
    bench.step()
    assert not bench.scheduler.can_reserve()
    bench.cancel("big")
    assert bench.scheduler.can_reserve()


def test_a_lone_decode_that_cannot_grow_waits_for_a_transfers_blocks() -> None:
    bench = Bench(num_blocks=4, budget=16)
    bench.add(new_request("a", prompt(7), max_tokens=4))
    bench.step()
    held(bench, "tr-1", prompt(8, 50))
    bench.step_until(has_preempted)
    assert bench.plan() == (None, [])
    bench.blocks.release("tr-1")
    bench.run()
    assert len(bench.tokens("a")) == 4
    assert bench.violations == []


def test_a_preempted_choice_is_computed_again_from_what_is_cached() -> None:
    bench = Bench(num_blocks=7, budget=32)
    bench.add(new_request("a", prompt(10), num_choices=3, max_tokens=9))
    bench.run()
    assert [len(bench.tokens("a", choice)) for choice in range(3)] == [9, 9, 9]
    assert bench.violations == []
