import pytest

from services.controller.policy.placement import choose_decode, num_blocks_needed
from tests.unit.controller.policy.builders import BROKEN, WORKS, C, D, P, worker


def test_a_decode_is_placed_again_where_its_prefill_side_can_hand_over() -> None:
    decodes = [worker("d0", D), worker("d1", D, used=50), worker("d2", D, used=90)]
    prefill = worker("p", P, pairings={"d0": BROKEN, "d2": WORKS})
    assert choose_decode(decodes, 1, prefill) == decodes[2]
    assert choose_decode(decodes[:2], 1, prefill) == decodes[1]
    assert choose_decode(decodes[:1], 1, prefill) is None


def test_a_decode_is_placed_again_where_most_room_is() -> None:
    decodes = [worker("d0", D, used=30), worker("d1", D, used=20, total=50), worker("d2", D, 0, 40)]
    assert choose_decode(decodes, 1, worker("p", P)) == decodes[0], "a share, not a count"
    full = [worker("d0", D, used=9, total=12), worker("d1", D, used=950)]
    assert choose_decode(full, 4, worker("p", P)) == full[1], "room goes before share"
    assert choose_decode(full, 13, worker("p", P)) == full[1], "a pool that can hold it"
    assert choose_decode(full, 1001, worker("p", P)) is None


def test_a_handoff_never_goes_to_a_worker_that_may_not_decode_for_others() -> None:
    assert choose_decode([worker("p0", P), worker("c", C)], 1, worker("p1", P)) is None


def test_help_makes_a_prefill_worker_a_decode_side_of_itself_before_all_others() -> None:
    prefill = worker("p", P, used=500, may_decode=True)
    assert choose_decode([worker("d", D), prefill], 1, prefill) == prefill
    other = worker("p1", P, pairings={"p": BROKEN, "d": WORKS})
    assert choose_decode([prefill, worker("d", D, used=900)], 1, other) == worker("d", D, used=900)


@pytest.mark.parametrize(
    ("prompt", "choices", "max_tokens", "expected"),
    [(64, 1, 1, 1), (65, 4, 1, 2), (63, 1, 9, 1), (64, 1, 9, 2), (65, 1, 9, 2), (65, 4, 9, 5)],
)
def test_blocks_are_counted_with_a_tail_for_each_choice(
    prompt: int, choices: int, max_tokens: int, expected: int
) -> None:
    assert num_blocks_needed(prompt, choices, max_tokens, 64) == expected
