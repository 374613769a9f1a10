"""Prefixes that are copied or loaded instead of computed: who holds one, and who waits for one.

The holder hands its cached blocks over like a prompt that was just prefilled, after it has loaded
what the store has of them where the order says so; the receiver writes down what it lacks, verifies
it and lets it stay cached. A request waits for its prefix, copied or loaded, until that has come,
it is told that nothing will, or too much time has passed; it computes whatever is not here then.
"""

import asyncio
import itertools
from collections.abc import Sequence
from time import monotonic

import structlog

from common.errors import RemoteProtocolError
from common.handoff.events import HandedOver
from common.ids import GatewayId, RequestId
from common.messages.control import (
    CopyPrefix,
    PlaceRequest,
    PrefixNotCopied,
    PrefixUnavailable,
)
from common.messages.fields import Phases
from common.sampling import SamplingParams
from common.worker.incoming import PrefixEnded
from common.worker.outgoing import HandoffEnd, HandoffKind, Outgoing
from common.worker.parts import Channels, WorkerParts
from common.worker.payload import unpack_prompt
from common.worker.phases import PhaseLedger, PrefixCopied, PrefixLoaded
from common.worker.stored_prefixes import OnLoaded

log = structlog.get_logger()

MAX_WAIT_SECONDS = 30.0
"""A backstop: who cannot send a prefix says so, and of who is gone the controller tells."""

# A reservation names who gets the tokens. Of a prefix there are none.
_NO_GATEWAY = GatewayId("none")
_NO_ENDPOINT = "inproc://none"
_NO_TOKENS = SamplingParams(seed=0, max_tokens=1)


class PrefixCopies:
    """Both sides of one worker. ``wake`` is set when a request waits no more."""

    def __init__(self, parts: WorkerParts, ledger: PhaseLedger, wake: asyncio.Event) -> None:
        self._blocks = parts.blocks
        self._scheduler = parts.scheduler
        self._stored = parts.stored
        self._ledger = ledger
        self._wake = wake
        self._numbers = itertools.count()
        self._wait_until: dict[RequestId, float] = {}
        self._load_until: dict[RequestId, float] = {}
        self._without_room: dict[RequestId, Sequence[int]] = {}

    def attach(self, channels: Channels) -> None:
        """Join to the channels; they call back, so they come second."""
        self._outbound = channels.outbound
        self._control = channels.control

    # ---- the worker that holds a prefix ----------------------------------------------------------

    def send(self, order: CopyPrefix, payload: tuple[bytes, ...]) -> None:
        """Hand over what is cached here of a prefix, loading first what the store has of it."""
        try:
            tokens = unpack_prompt(payload, order.num_tokens, num_drawn=0)
        except RemoteProtocolError as error:
            log.error("order_ignored", request_id=order.request_id, reason=str(error))
            return
        began = monotonic()

        def loaded(came: PrefixLoaded) -> None:
            phases = self._ledger.loaded_for_other(came, monotonic() - began)
            self._send_cached(order, tokens, phases)

        num_stored = self._whole(min(order.num_stored_tokens, len(tokens)))
        if num_stored <= self._blocks.match(tokens, num_stored) or not self._try_load(
            order.request_id, tokens[:num_stored], loaded
        ):
            self._send_cached(order, tokens, ())

    def _send_cached(self, order: CopyPrefix, tokens: Sequence[int], phases: Phases) -> None:
        owner = f"prefix-{next(self._numbers)}-{order.request_id}"
        num_held = self._blocks.hold_prefix(owner, tokens)
        if num_held == 0:
            log.info("prefix_not_cached", request_id=order.request_id, num_tokens=len(tokens))
            self._tell_not_copied(order.request_id, "nothing of it is cached")
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
            phases=phases,
        )
        self._outbound.send_prefix(outgoing, order.target)

    def sent(self, end: HandoffEnd) -> None:
        """Nothing reads the prefix's blocks for another worker any more."""
        self._blocks.release(end.outgoing.owner)
        if not isinstance(end.outcome, HandedOver):
            self._tell_not_copied(end.outgoing.request_id, str(end.outcome))

    def _tell_not_copied(self, request_id: RequestId, message: str) -> None:
        told = PrefixNotCopied(request_id=request_id, message=message[:4096])
        self._control.send(told, request_id)

    def _whole(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._scheduler.block_size

    def _try_load(self, request_id: RequestId, tokens: Sequence[int], then: OnLoaded) -> bool:
        if self._stored is None:
            return False
        return self._stored.prefixes.try_load(request_id, tokens, then)

    # ---- the worker that waits for one -----------------------------------------------------------

    def await_prefix(self, order: PlaceRequest, prompt: Sequence[int], now: float) -> int:
        """Return for how many leading tokens of its prompt a new request is to wait.

        0 where they are here already. Its load begins now. A copy may have come before the request.
        """
        request_id = order.request_id
        # The last token of a prompt is always computed, and with it its block.
        num_stored = self._whole(min(order.num_stored_tokens, len(prompt) - 1))
        stored = prompt[:num_stored]
        if num_stored > self._blocks.match(prompt, num_stored) and self._try_load(
            request_id, stored, lambda came: self._tried(request_id, stored, came)
        ):
            self._load_until[request_id] = now + MAX_WAIT_SECONDS
            return num_stored
        if order.num_prefix_tokens <= self._blocks.match(prompt, order.num_prefix_tokens):
            return 0
        self._wait_until[request_id] = now + MAX_WAIT_SECONDS
        return order.num_prefix_tokens

    def _tried(self, request_id: RequestId, tokens: Sequence[int], came: PrefixLoaded) -> None:
        """The store's part of a prefix is here, will not come, or found no room.

        Then it comes as near as the host tier, if there is one, until there is room.
        """
        prefetcher = None if self._stored is None else self._stored.prefetcher
        if came.had_room or prefetcher is None:
            self._loaded(request_id, came)
        elif self._load_until.pop(request_id, None) is not None:
            self._without_room[request_id] = tokens
            num_cached = self._blocks.match(tokens, len(tokens)) // self._scheduler.block_size
            prefetcher.begin(request_id, self._blocks.prefix_hashes(tokens), num_cached)
            self._scheduler.prefix_has_no_room(request_id)
            self._wake.set()

    def load_now(self, request_id: RequestId) -> None:
        """There is room for a prefix that had found none."""
        tokens = self._without_room.pop(request_id)
        assert self._stored is not None, "it has been tried before"
        self._load_until[request_id] = monotonic() + MAX_WAIT_SECONDS
        if self._stored.prefetcher is not None:
            self._stored.prefetcher.stop(request_id)
        if not self._stored.prefixes.try_load_now(
            request_id, tokens, lambda came: self._loaded(request_id, came)
        ):
            self._loaded(request_id, PrefixLoaded())

    def _loaded(self, request_id: RequestId, came: PrefixLoaded) -> None:
        """The store's part of a prefix is here, or will not come."""
        if self._load_until.pop(request_id, None) is None:
            return
        self._end_prefetch(request_id)
        self._ledger.prefix_loaded(request_id, came, monotonic())
        self._go_on(request_id)

    def unavailable(self, order: PrefixUnavailable) -> None:
        """The copy that a request may wait for will not come."""
        self.ended(PrefixEnded(order.request_id, PrefixCopied()))

    def ended(self, end: PrefixEnded) -> None:
        """A copy for a request is here, or will not come."""
        if self._wait_until.pop(end.request_id, None) is None:
            return
        self._ledger.prefix_ended(end.request_id, end.copied, monotonic())
        self._go_on(end.request_id)

    def _go_on(self, request_id: RequestId) -> None:
        self._scheduler.prefix_arrived(request_id)
        self._wake.set()

    def tick(self, now: float) -> None:
        """Let go on what has waited long enough."""
        for request_id in [r for r, until in self._wait_until.items() if now >= until]:
            log.warning("prefix_late", request_id=request_id, seconds=MAX_WAIT_SECONDS)
            self.ended(PrefixEnded(request_id, PrefixCopied()))
        for request_id in [r for r, until in self._load_until.items() if now >= until]:
            log.warning("prefix_late", request_id=request_id, seconds=MAX_WAIT_SECONDS)
            self._forget_load(request_id)
            self._loaded(request_id, PrefixLoaded())

    def forget(self, request_id: RequestId) -> None:
        """The request ended, here or at the worker that its prefix is loaded for."""
        self._wait_until.pop(request_id, None)
        self._load_until.pop(request_id, None)
        self._without_room.pop(request_id, None)
        self._end_prefetch(request_id)
        self._forget_load(request_id)

    def _forget_load(self, request_id: RequestId) -> None:
        if self._stored is not None:
            self._stored.prefixes.forget(request_id)

    def _end_prefetch(self, request_id: RequestId) -> None:
        if self._stored is not None and self._stored.prefetcher is not None:
            self._stored.prefetcher.end(request_id)
