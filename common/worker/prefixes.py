"""Prefixes that are copied instead of computed: the worker that holds one, and the one that waits.

The holder hands its cached blocks over like a prompt that was just prefilled; the receiver writes
down what it lacks, verifies it and lets it stay cached. A request waits for its prefix a while, and
computes whatever has not come by then.
"""

import asyncio
import itertools
from collections.abc import Sequence
from time import monotonic

import structlog

from common.errors import RemoteProtocolError
from common.ids import GatewayId, RequestId
from common.messages.control import CopyPrefix
from common.sampling import SamplingParams
from common.worker.incoming import PrefixEnded
from common.worker.outgoing import HandoffEnd, HandoffKind, Outgoing
from common.worker.parts import Channels, WorkerParts
from common.worker.payload import unpack_prompt
from common.worker.phases import PhaseLedger, PrefixCopied

log = structlog.get_logger()

MAX_WAIT_SECONDS = 1.0

# A reservation names who gets the tokens. Of a prefix there are none.
_NO_GATEWAY = GatewayId("none")
_NO_ENDPOINT = "inproc://none"
_NO_TOKENS = SamplingParams(seed=0, max_tokens=1)


class PrefixCopies:
    """Both sides of one worker. ``wake`` is set when a request waits no more."""

    def __init__(self, parts: WorkerParts, ledger: PhaseLedger, wake: asyncio.Event) -> None:
        self._blocks = parts.blocks
        self._scheduler = parts.scheduler
        self._ledger = ledger
        self._wake = wake
        self._numbers = itertools.count()
        self._wait_until: dict[RequestId, float] = {}

    def attach(self, channels: Channels) -> None:
        """Join to the channels; they call back, so they come second."""
        self._outbound = channels.outbound

    # ---- the worker that holds a prefix ----------------------------------------------------------

    def send(self, order: CopyPrefix, payload: tuple[bytes, ...]) -> None:
        """Hand over what is cached here of a prefix."""
        try:
            tokens = unpack_prompt(payload, order.num_tokens, num_drawn=0)
        except RemoteProtocolError as error:
            log.error("order_ignored", request_id=order.request_id, reason=str(error))
            return
        owner = f"prefix-{next(self._numbers)}-{order.request_id}"
        num_held = self._blocks.hold_prefix(owner, tokens)
        if num_held == 0:
            log.info("prefix_not_cached", request_id=order.request_id, num_tokens=len(tokens))
            return
        outgoing = Outgoing(
            kind=HandoffKind.PREFIX,
            request_id=order.request_id,
            gateway_id=_NO_GATEWAY,
            tokens_endpoint=_NO_ENDPOINT,
            params=_NO_TOKENS,
            prompt=tokens[:num_held],
            owner=owner,
            block_ids=self._blocks.block_ids(owner),
            live_choices=frozenset,
        )
        self._outbound.send_prefix(outgoing, order.target)

    def sent(self, end: HandoffEnd) -> None:
        """Nothing reads the prefix's blocks for another worker any more."""
        self._blocks.release(end.outgoing.owner)

    # ---- the worker that waits for one -----------------------------------------------------------

    def await_prefix(
        self, request_id: RequestId, prompt: Sequence[int], num_tokens: int, now: float
    ) -> bool:
        """Return whether a new request is to wait for so much of its prompt; not where it is here.

        The copy may have come before the request.
        """
        if num_tokens <= self._blocks.match(prompt, num_tokens):
            return False
        self._wait_until[request_id] = now + MAX_WAIT_SECONDS
        return True

    def ended(self, end: PrefixEnded) -> None:
        """A copy for a request is here, or will not come."""
        if self._wait_until.pop(end.request_id, None) is None:
            return
        self._ledger.prefix_ended(end.request_id, end.copied, monotonic())
        self._scheduler.prefix_arrived(end.request_id)
        self._wake.set()

    def tick(self, now: float) -> None:
        """Let go on what has waited long enough."""
        for request_id in [r for r, until in self._wait_until.items() if now >= until]:
            log.warning("prefix_late", request_id=request_id, seconds=MAX_WAIT_SECONDS)
            self.ended(PrefixEnded(request_id, PrefixCopied()))

    def forget(self, request_id: RequestId) -> None:
        """The request ended."""
        self._wait_until.pop(request_id, None)
