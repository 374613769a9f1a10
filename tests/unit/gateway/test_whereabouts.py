"""Which workers a request needs, by what placements and tokens tell."""

from common.ids import Epoch, RequestId
from services.gateway.whereabouts import Whereabouts

R = RequestId("r")
P, D, MOVED = ("p0", Epoch(1)), ("d0", Epoch(2)), ("d1", Epoch(3))


def test_both_sides_are_needed_until_the_decode_side_has_sent_tokens() -> None:
    where = Whereabouts()
    where.placed(R, P, D, 1.0)
    where.heard(R, P, 2.0)
    assert where.gone(R, {P, D}) is None
    assert where.gone(R, {P}) == "d0"
    assert where.gone(R, {D}) == "p0"
    where.heard(R, D, 3.0)
    assert where.gone(R, {D}) is None
    assert where.gone(R, {P}) == "d0"


def test_a_decode_that_moved_needs_its_new_worker_alone() -> None:
    where = Whereabouts()
    where.placed(R, P, D, 1.0)
    where.heard(R, D, 2.0)
    where.heard(R, MOVED, 3.0)
    assert where.gone(R, {MOVED}) is None
    assert where.gone(R, {P, D}) == "d1"


def test_a_worker_that_was_started_anew_is_another_one() -> None:
    where = Whereabouts()
    where.placed(R, D, D, 1.0)
    assert where.gone(R, {("d0", Epoch(9))}) == "d0"


def test_nothing_is_said_of_workers_that_are_not_known() -> None:
    where = Whereabouts()
    where.placed(R, None, None, 1.0)
    assert where.gone(R, set()) is None
    assert where.gone(RequestId("other"), set()) is None


def test_silence_counts_from_the_last_tokens_or_the_loss_of_the_controller() -> None:
    where = Whereabouts()
    where.placed(R, P, D, 1.0)
    assert where.quiet_seconds(R, 3.0) == 2.0
    where.heard(R, P, 3.0)
    assert where.quiet_seconds(R, 4.0) == 1.0
    where.orphaned(R, 10.0)
    assert where.quiet_seconds(R, 12.0) == 2.0
    where.forget(R)
    assert where.quiet_seconds(R, 99.0) == 0.0
