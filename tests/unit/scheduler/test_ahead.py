"""Steps that are planned while the one before is in flight."""

import pytest

from common.ids import RequestId
from common.sampling import FinishReason
from common.scheduler.request import PendingDraw
from common.scheduler.steps import StepPlan
from tests.support.scheduler_bench import EOS, Bench, new_request


def prompt(length: int, kind: int = 0) -> list[int]:
    return [100 * kind + place for place in range(length)]


def planned(bench: Bench) -> StepPlan:
    plan, _ = bench.plan()
    assert plan is not None
    return plan


def test_a_decode_names_the_token_that_is_still_to_be_drawn() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=9))
    bench.step()
    first, second = planned(bench), planned(bench)
    assert (first.rows[0].start, first.rows[0].pending) == (3, None)
    assert (second.rows[0].start, second.rows[0].pending) == (4, PendingDraw(first.number, 0))


def test_a_prompt_goes_on_where_the_chunk_in_flight_will_end() -> None:
    bench = Bench(budget=8)
    bench.add(new_request("a", prompt(20)))
    rows = [planned(bench).rows[0], planned(bench).rows[0]]
    assert [(row.start, row.num_tokens, row.is_last) for row in rows] == [
        (0, 8, False),
        (8, 8, False),
    ]


def test_nothing_follows_a_last_chunk_before_its_draw_is_known() -> None:
    bench = Bench(budget=32)
    bench.add(new_request("a", prompt(20)))
    planned(bench)
    assert bench.plan() == (None, [])


@pytest.mark.parametrize("max_tokens", [2, 3, 7])
def test_no_step_is_planned_beyond_the_last_token_that_is_wanted(max_tokens: int) -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=max_tokens))
    num_steps = bench.run(num_ahead=1)
    assert len(bench.tokens("a")) == max_tokens
    assert bench.scheduler.num_steps == max_tokens, f"{num_steps} turns"
    assert bench.violations == []


def test_the_row_of_a_sequence_that_ended_meanwhile_is_thrown_away() -> None:
    bench = Bench(token_of=lambda _request, _choice, index: EOS if index == 2 else 2000 + index)
    bench.add(new_request("a", prompt(3), max_tokens=9))
    bench.step()
    first, second = planned(bench), planned(bench)
    bench.finish(first)
    third = planned(bench)
    bench.finish(second)  # draws EOS, while the third step computes what comes after it
    assert bench.reason("a") is FinishReason.STOP
    assert bench.blocks.counts().referenced > 0, "a step still writes its blocks"
    assert bench.reports == {}
    bench.finish(third)
    assert bench.tokens("a") == [2000, 2001, EOS]
    assert bench.blocks.counts().referenced == 0
    assert len(bench.reports["a"]) == 1


@pytest.mark.parametrize(
    "penalty",
    [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}],
)
def test_a_draw_that_reads_earlier_tokens_waits_for_them(penalty: dict[str, float]) -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=9, **penalty))
    bench.add(new_request("b", prompt(3, kind=1), max_tokens=9))
    bench.step()
    assert [row.sequence.request.request_id for row in planned(bench).rows] == ["a", "b"]
    assert [row.sequence.request.request_id for row in planned(bench).rows] == ["b"]


def test_a_cancelled_sequence_keeps_its_blocks_until_its_last_step_is_over() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=9))
    bench.step()
    first, second = planned(bench), planned(bench)
    bench.cancel("a")
    bench.finish(first)
    assert bench.blocks.counts().referenced > 0
    bench.finish(second)
    assert bench.blocks.counts().referenced == 0


def test_a_row_that_fails_ends_the_one_planned_after_it() -> None:
    bench = Bench()
    bench.add(new_request("a", prompt(3), max_tokens=9))
    bench.step()
    first, second = planned(bench), planned(bench)
    bench.finish(first, failing=[0])
    bench.finish(second)
    assert bench.scheduler.find(RequestId("a")) is None
    assert bench.blocks.counts().referenced == 0


def test_a_full_pool_preempts_only_what_is_in_no_step() -> None:
    """The same tokens come out with and without planning ahead, however scarce the blocks."""
    streams = []
    for num_ahead in (0, 1):
        bench = Bench(num_blocks=6, budget=16)
        for name in ("a", "b", "c"):
            bench.add(new_request(name, prompt(3, kind=ord(name)), max_tokens=12))
        bench.run(num_ahead=num_ahead)
        assert bench.violations == []
        streams.append([bench.tokens(name) for name in ("a", "b", "c")])
    assert streams[0] == streams[1]
    assert [len(tokens) for tokens in streams[0]] == [12, 12, 12]


def test_the_newest_is_left_out_of_a_step_to_give_way_in_the_next() -> None:
    """Else it would be in a step whenever the oldest asks for its blocks."""
    bench = Bench(num_blocks=4)
    bench.add(new_request("old", prompt(7), max_tokens=9))
    bench.add(new_request("new", prompt(5, kind=1), max_tokens=9))
    bench.step()
    first = planned(bench)
    assert [row.sequence.owner for row in first.rows] == ["old/0", "new/0"]
    assert bench.plan() == (None, []), "the oldest asks for a block, and the newest has to wait"
    bench.finish(first)
    assert [row.sequence.owner for row in planned(bench).rows] == ["old/0"]
    assert not bench.blocks.is_held("new/0")


def test_a_prompt_that_fills_the_pool_exactly_is_taken_when_one_token_is_wanted() -> None:
    bench = Bench(num_blocks=2)
    bench.add(new_request("a", prompt(8), max_tokens=1))
    bench.run()
    assert bench.tokens("a") == [2000]
