"""What another worker must know to go on with a decode that runs here. Pure."""

from dataclasses import replace
from typing import NamedTuple

from common.errors import LocalProtocolError
from common.ids import RequestId
from common.messages.handoff import FirstToken
from common.sampling import SamplingParams
from common.scheduler.request import LocalRequest, RequestPhase


class Migration(NamedTuple):
    """A frozen decode as a handoff moves it.

    ``tokens`` are all tokens but the last drawn one: their K and V are whole in the blocks of
    ``owner``. For the receiver they are the prompt, and ``first_token`` is what comes after it;
    ``params`` tell it which of them are output.
    """

    tokens: tuple[int, ...]
    first_token: FirstToken
    params: SamplingParams
    owner: str


def migration_of(request_id: RequestId, request: LocalRequest | None) -> Migration:
    """Describe a frozen request; LocalProtocolError unless it is one that no step has."""
    sequence = None
    if request is not None and request.phase is RequestPhase.FROZEN:
        sequence = request.live_sequence
    if sequence is None or sequence.is_in_step or sequence.last_token is None:
        raise LocalProtocolError(f"request {request_id} is not frozen")
    params = sequence.request.new.params
    return Migration(
        tokens=tuple(sequence.tokens(0, sequence.length - 1)),
        first_token=FirstToken(choice=sequence.choice, token=sequence.last_token),
        params=replace(
            params,
            num_choices=1,
            first_choice=sequence.choice,
            num_drawn=params.num_drawn + len(sequence.outputs) - 1,
        ),
        owner=sequence.owner,
    )
