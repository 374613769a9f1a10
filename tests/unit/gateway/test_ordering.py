import pytest

from common.errors import RemoteProtocolError
from common.ids import RequestId
from common.messages.tokens import TokenDelta as WireDelta
from common.sampling import FinishReason, SampledToken
from services.gateway.backend import PromptDone, TokenDelta
from services.gateway.ordering import MAX_HELD_DELTAS, StreamOrder


def sampled(first: int, end: int) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(token_id=100 + index) for index in range(first, end))


def wire(
    first: int,
    end: int,
    *,
    choice: int = 0,
    finish: FinishReason | None = None,
    num_cached: int | None = None,
) -> WireDelta:
    """The tokens at places ``first .. end - 1`` of a choice."""
    return WireDelta(
        request_id=RequestId("req-1"),
        choice=choice,
        index=first,
        tokens=sampled(first, end),
        finish_reason=finish,
        num_cached_tokens=num_cached,
    )


def delta(
    first: int, end: int, *, choice: int = 0, finish: FinishReason | None = None
) -> TokenDelta:
    return TokenDelta(choice, sampled(first, end), finish)


def test_deltas_in_order_go_on_at_once() -> None:
    order = StreamOrder(1)
    assert order.add(wire(0, 1)) == [delta(0, 1)]
    assert order.add(wire(1, 3)) == [delta(1, 3)]
    assert not order.is_finished
    finished = delta(3, 4, finish=FinishReason.STOP)
    assert order.add(wire(3, 4, finish=FinishReason.STOP)) == [finished]
    assert order.is_finished


def test_a_gap_is_waited_for_and_then_all_go_on_together() -> None:
    order = StreamOrder(1)
    assert order.add(wire(2, 3)) == []
    assert order.add(wire(1, 2)) == []
    assert order.add(wire(0, 1)) == [delta(0, 3)]


def test_the_decode_sides_copy_of_the_first_token_is_dropped() -> None:
    order = StreamOrder(1)
    assert order.add(wire(0, 1)) == [delta(0, 1)]
    assert order.add(wire(0, 2)) == [delta(1, 2)]


def test_the_decode_sides_copy_stands_in_for_a_first_token_that_was_lost() -> None:
    order = StreamOrder(1)
    assert order.add(wire(0, 2)) == [delta(0, 2)]
    assert order.add(wire(0, 1)) == [], "the prefill side's own delta came late"


def test_repeats_are_dropped_whole_or_in_part() -> None:
    order = StreamOrder(1)
    order.add(wire(0, 3))
    assert order.add(wire(0, 3)) == []
    assert order.add(wire(1, 2)) == []
    assert order.add(wire(2, 5)) == [delta(3, 5)]


def test_of_two_held_deltas_at_one_place_the_longer_counts() -> None:
    order = StreamOrder(1)
    order.add(wire(1, 4))
    order.add(wire(1, 2))
    assert order.add(wire(0, 1)) == [delta(0, 4)]


def test_a_finish_without_tokens_ends_the_choice() -> None:
    order = StreamOrder(1)
    order.add(wire(0, 2))
    assert order.add(wire(2, 2, finish=FinishReason.LENGTH)) == [
        delta(2, 2, finish=FinishReason.LENGTH)
    ]
    assert order.is_finished


def test_a_finish_waits_for_the_tokens_before_it() -> None:
    order = StreamOrder(1)
    assert order.add(wire(2, 3, finish=FinishReason.STOP)) == []
    assert not order.is_finished
    assert order.add(wire(0, 2)) == [delta(0, 3, finish=FinishReason.STOP)]
    assert order.is_finished


def test_a_finish_that_repeats_known_tokens_still_ends_the_choice() -> None:
    order = StreamOrder(1)
    order.add(wire(0, 3))
    assert order.add(wire(1, 3, finish=FinishReason.LENGTH)) == [
        delta(3, 3, finish=FinishReason.LENGTH)
    ]


def test_nothing_goes_on_after_a_finish() -> None:
    order = StreamOrder(1)
    order.add(wire(0, 1, finish=FinishReason.STOP))
    assert order.add(wire(1, 2)) == []
    assert order.add(wire(0, 1, finish=FinishReason.STOP)) == []


def test_held_tokens_beyond_a_finish_are_dropped_with_it() -> None:
    order = StreamOrder(1)
    order.add(wire(1, 2, finish=FinishReason.STOP))
    order.add(wire(2, 6))
    order.add(wire(5, 9))
    assert order.add(wire(0, 1)) == [delta(0, 2, finish=FinishReason.STOP)]
    assert order.is_finished


def test_a_delta_that_overlaps_a_finish_adds_no_tokens_after_it() -> None:
    order = StreamOrder(1)
    order.add(wire(1, 3, finish=FinishReason.STOP))
    order.add(wire(2, 6))
    assert order.add(wire(0, 2)) == [delta(0, 3, finish=FinishReason.STOP)]


def test_choices_are_ordered_apart() -> None:
    order = StreamOrder(2)
    assert order.add(wire(1, 2, choice=1)) == []
    assert order.add(wire(0, 1, choice=0, finish=FinishReason.STOP)) == [
        delta(0, 1, choice=0, finish=FinishReason.STOP)
    ]
    assert not order.is_finished
    assert order.add(wire(0, 1, choice=1)) == [delta(0, 2, choice=1)]


def test_the_prompt_is_done_once_and_before_its_first_token() -> None:
    order = StreamOrder(2)
    assert order.add(wire(0, 1, num_cached=64)) == [PromptDone(64), delta(0, 1)]
    assert order.add(wire(0, 1, choice=1, num_cached=64)) == [delta(0, 1, choice=1)]
    assert order.add(wire(0, 2, num_cached=0)) == [delta(1, 2)]


def test_the_prompt_is_told_even_by_a_delta_that_has_to_wait() -> None:
    order = StreamOrder(1)
    assert order.add(wire(1, 2, num_cached=0)) == [PromptDone(0)]


def test_a_choice_ended_from_this_side_takes_nothing_more() -> None:
    order = StreamOrder(2)
    order.finish(0)
    assert order.add(wire(0, 1, num_cached=3)) == [PromptDone(3)]
    assert not order.is_finished
    order.finish(1)
    assert order.is_finished


@pytest.mark.parametrize("choice", [2, 127])
def test_a_choice_that_was_not_asked_for_is_the_workers_fault(choice: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"choice {choice} of 2"):
        StreamOrder(2).add(wire(0, 1, choice=choice))


def test_a_token_that_never_comes_is_the_workers_fault_and_bounds_what_is_held() -> None:
    order = StreamOrder(1)
    order.add(wire(0, 1))
    for index in range(MAX_HELD_DELTAS):
        order.add(wire(2 + index, 3 + index))
    with pytest.raises(RemoteProtocolError, match="token 1 never came"):
        order.add(wire(2 + MAX_HELD_DELTAS, 3 + MAX_HELD_DELTAS))


def test_a_gap_is_known_as_long_as_it_lasts() -> None:
    order = StreamOrder(num_choices=2)
    assert not order.has_gap
    order.add(wire(2, 4, choice=1))
    assert order.has_gap
    order.add(wire(0, 2, choice=1))
    assert not order.has_gap
    order.add(wire(9, 10, choice=0))
    order.finish(0)
    assert not order.has_gap, "a choice that ended waits for nothing"
