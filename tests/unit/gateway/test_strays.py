"""When tokens that nobody asked for have a decode ended."""

from common.ids import RequestId
from services.gateway.strays import MAX_KEPT, QUIET_SECONDS, Strays

R = RequestId("r")


def test_a_request_that_was_never_heard_of_is_cancelled_at_once_and_again_if_it_goes_on() -> None:
    strays = Strays()
    assert strays.is_due(R, 10.0)
    strays.note(R, 10.0)
    assert not strays.is_due(R, 10.0 + QUIET_SECONDS)
    assert strays.is_due(R, 10.1 + QUIET_SECONDS)


def test_late_tokens_of_a_request_that_has_just_ended_are_no_news_however_many_end_after_it() -> (
    None
):
    strays = Strays()
    strays.note(R, 10.0)
    for number in range(MAX_KEPT - 1):
        strays.note(RequestId(f"other-{number}"), 11.0)
    assert not strays.is_due(R, 11.0)
    strays.note(RequestId("one more"), 11.0)
    assert strays.is_due(R, 11.0), "what is remembered is bounded"


def test_a_second_end_counts_from_its_own_time() -> None:
    strays = Strays()
    strays.note(R, 10.0)
    strays.note(RequestId("other"), 11.0)
    strays.note(R, 11.5)
    strays.note(RequestId("last"), 10.5 + QUIET_SECONDS)
    assert not strays.is_due(R, 10.5 + QUIET_SECONDS)
