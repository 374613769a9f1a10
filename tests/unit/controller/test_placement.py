import pytest

from common.ids import Epoch, WorkerId
from common.messages.fields import Role
from services.controller.policy.placement import (
    Pairing,
    WorkerView,
    choose_decode,
    choose_sides,
    num_blocks_needed,
)


def view(
    name: str,
    role: Role,
    uncomputed: int = 0,
    used: int = 0,
    total: int = 100,
    **pairings: Pairing,
) -> WorkerView:
    known = {(WorkerId(decode), Epoch(1)): pairing for decode, pairing in pairings.items()}
    return WorkerView(WorkerId(name), Epoch(1), role, uncomputed, total, used, known)


P, D, C = Role.PREFILL, Role.DECODE, Role.COMBINED
WORKS, UNKNOWN, BROKEN = Pairing.WORKS, Pairing.UNKNOWN, Pairing.BROKEN


@pytest.mark.parametrize(
    ("workers", "num_blocks", "expected"),
    [
        ([view("p", P), view("d", D)], 2, ("p", "d")),
        ([view("p0", P, 10), view("p1", P, 5), view("d", D)], 2, ("p1", "d")),
        ([view("p0", P), view("p1", P), view("d", D)], 2, ("p0", "d")),
        ([view("p0", P, used=9), view("p1", P), view("d", D)], 2, ("p1", "d")),
        ([view("p", P), view("d0", D, used=50), view("d1", D, used=40)], 2, ("p", "d1")),
        # a share, not a count: 30 of 100 is emptier than 20 of 50
        ([view("p", P), view("d0", D, used=20, total=50), view("d1", D, used=30)], 2, ("p", "d1")),
        # room goes before share: 10 of 12 has no room for 4, 95 of 100 has
        ([view("p", P), view("d0", D, used=9, total=12), view("d1", D, used=95)], 4, ("p", "d1")),
        # nobody has room now: the emptiest may have it later
        ([view("p", P), view("d0", D, used=99), view("d1", D, used=98)], 9, ("p", "d1")),
        ([view("c", C)], 2, ("c", "c")),
        ([view("c0", C, 7), view("c1", C, 3)], 2, ("c1", "c1")),
        ([view("p", P, 9), view("d", D), view("c", C, 1)], 2, ("c", "c")),
        ([view("p", P), view("c", C, 1)], 2, ("c", "c")),
        ([view("p", P)], 2, None),
        ([view("d", D)], 2, None),
        ([], 2, None),
        ([view("p", P, total=3), view("d", D)], 4, None),
        ([view("p", P), view("d", D, total=3)], 4, None),
    ],
)
def test_sides_are_the_least_loaded_workers_that_can_hold_the_request(
    workers: list[WorkerView], num_blocks: int, expected: tuple[str, str] | None
) -> None:
    chosen = choose_sides(workers, num_blocks)
    names = chosen and (chosen.prefill.worker_id, chosen.decode.worker_id)
    assert names == expected


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([view("p", P, d0=BROKEN, d1=WORKS), view("d0", D), view("d1", D, used=90)], ("p", "d1")),
        ([view("p", P, d0=BROKEN), view("d0", D), view("d1", D, used=90)], ("p", "d1")),
        ([view("p", P, d1=WORKS), view("d0", D), view("d1", D, used=90)], ("p", "d1")),
        ([view("p0", P, d=BROKEN), view("p1", P, 99, d=WORKS), view("d", D)], ("p1", "d")),
        ([view("p0", P, d=UNKNOWN), view("p1", P, 99, d=WORKS), view("d", D)], ("p1", "d")),
        ([view("p0", P, d=BROKEN), view("p1", P, 99), view("d", D)], ("p1", "d")),
        ([view("p", P, d=BROKEN), view("d", D), view("c", C, 99)], ("c", "c")),
        ([view("p", P, d=BROKEN), view("d", D)], None),
    ],
)
def test_sides_are_a_pair_that_works_before_one_that_may_and_never_a_broken_one(
    workers: list[WorkerView], expected: tuple[str, str] | None
) -> None:
    chosen = choose_sides(workers, 2)
    assert (chosen and (chosen.prefill.worker_id, chosen.decode.worker_id)) == expected


def test_a_decode_is_placed_again_where_its_prefill_side_can_hand_over() -> None:
    decodes = [view("d0", D), view("d1", D, used=50), view("d2", D, used=90)]
    prefill = view("p", P, d0=BROKEN, d2=WORKS)
    assert choose_decode(decodes, 1, prefill) == decodes[2]
    assert choose_decode(decodes[:2], 1, prefill) == decodes[1]
    assert choose_decode(decodes[:1], 1, prefill) is None


def test_a_handoff_never_goes_to_a_worker_without_the_decode_role() -> None:
    assert choose_decode([view("p", P), view("c", C)], 1, view("p", P)) is None


@pytest.mark.parametrize(
    ("prompt", "choices", "max_tokens", "expected"),
    [(64, 1, 1, 1), (65, 4, 1, 2), (63, 1, 9, 1), (64, 1, 9, 2), (65, 1, 9, 2), (65, 4, 9, 5)],
)
def test_blocks_are_counted_with_a_tail_for_each_choice(
    prompt: int, choices: int, max_tokens: int, expected: int
) -> None:
    assert num_blocks_needed(prompt, choices, max_tokens, 64) == expected
