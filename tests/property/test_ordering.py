"""Two workers send one request's tokens; any interleaving gives the gateway the same stream."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import RequestId
from common.messages.tokens import TokenDelta as WireDelta
from common.sampling import FinishReason, SampledToken
from services.gateway.backend import PromptDone, TokenDelta
from services.gateway.ordering import StreamOrder

Sent = list[WireDelta]


def deltas_of(choice: int, length: int, cuts: list[int], first: int = 0) -> Sent:
    """Cut a finished choice of ``length`` tokens into deltas, from place ``first`` on."""
    borders = sorted({first, *(cut for cut in cuts if first < cut < length), length})
    sent = [
        WireDelta(
            request_id=RequestId("req-1"),
            choice=choice,
            index=start,
            tokens=tuple(SampledToken(token_id=1000 * choice + i) for i in range(start, end)),
            finish_reason=FinishReason.STOP if end == length else None,
            num_cached_tokens=5 if start == 0 else None,
        )
        for start, end in pairwise(borders)
    ]
    assert sent, "every choice has a token"
    return sent


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[list[int], Sent]:
    """Lengths of the choices, and all deltas in an order in which they may arrive."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    sent: Sent = []
    for choice, length in enumerate(lengths):
        cuts = draw(st.lists(st.integers(1, 12), max_size=6))
        sent += deltas_of(choice, length, cuts)
        # Another worker, or the same one again, tells a part of it in other pieces.
        if draw(st.booleans()):
            again = draw(st.lists(st.integers(1, 12), max_size=6))
            sent += deltas_of(choice, length, again, draw(st.integers(0, length - 1)))
    return lengths, draw(st.permutations(sent))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(exchanges())
def test_every_order_of_arrival_gives_each_token_once_and_in_order(
    exchange: tuple[list[int], Sent],
) -> None:
    lengths, sent = exchange
    order = StreamOrder(len(lengths))
    received: list[list[int]] = [[] for _ in lengths]
    reasons: list[FinishReason | None] = [None for _ in lengths]
    num_prompts = 0
    for delta in sent:
        for event in order.add(delta):
            if isinstance(event, PromptDone):
                num_prompts += 1
                continue
            assert isinstance(event, TokenDelta)
            assert reasons[event.choice] is None, "nothing follows a finish"
            assert event.tokens or event.finish_reason, "an event says something"
            received[event.choice] += [token.token_id for token in event.tokens]
            reasons[event.choice] = event.finish_reason
    expected = [[1000 * c + i for i in range(length)] for c, length in enumerate(lengths)]
    assert received == expected
    assert reasons == [FinishReason.STOP] * len(lengths)
    assert num_prompts == 1
    assert order.is_finished
