import pytest

from common.errors import ErrorCode, RequestError
from common.sampling import FinishReason, SampledToken
from services.gateway.backend import PromptDone, TokenDelta
from services.gateway.pending import MAX_TOKENS_AT_ONCE, PendingEvents


def delta(choice: int, *ids: int, reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(choice, tuple(SampledToken(token_id) for token_id in ids), reason)


def test_a_delta_that_is_taken_at_once_is_passed_on_as_it_is():
    pending = PendingEvents()
    event = delta(0, 5)
    pending.add([event])
    assert pending.pop() is event
    assert pending.pop() is None


def test_what_nobody_takes_is_joined_and_leaves_a_bounded_number_at_a_time():
    pending = PendingEvents()
    pending.add([PromptDone(3)])
    for token_id in range(300):
        pending.add([delta(1, token_id), delta(0, 2 * token_id)])
    pending.add([delta(1, reason=FinishReason.LENGTH)])
    assert pending.pop() == PromptDone(3)
    assert pending.pop() == delta(1, *range(MAX_TOKENS_AT_ONCE))
    assert pending.pop() == delta(0, *range(0, 2 * MAX_TOKENS_AT_ONCE, 2))
    last = delta(1, *range(MAX_TOKENS_AT_ONCE, 300), reason=FinishReason.LENGTH)
    assert pending.pop() == last, "the other choices take turns, and the end comes at the end"
    pending.add([delta(0, 7)])
    assert pending.pop() == delta(0, *range(2 * MAX_TOKENS_AT_ONCE, 600, 2), 7)
    assert pending.pop() is None


def test_an_error_comes_after_the_tokens_before_it_and_stays():
    pending = PendingEvents()
    pending.add([delta(0, 1)])
    pending.fail(RequestError(ErrorCode.WORKER_DIED, "gone"))
    pending.add([delta(0, 2)])
    assert pending.pop() == delta(0, 1, 2)
    for _ in range(2):
        with pytest.raises(RequestError, match="gone"):
            pending.pop()
