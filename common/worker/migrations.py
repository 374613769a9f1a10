"""Running decodes that leave this worker for another one, as the controller orders."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic

import structlog

from common.errors import LocalProtocolError
from common.handoff.events import PrefillFinished
from common.handoff.migration import (
    BeginHandoff,
    CancelHere,
    DecodeStill,
    EndHere,
    GoOn,
    HandoffOver,
    LeavingDecode,
    LetGo,
    MigrationEffect,
    MigrationEvent,
    MigrationPhase,
    OrderRepeated,
    RequestOver,
)
from common.ids import RequestId
from common.messages.control import MigrateDecode, MigrationFailed
from common.messages.fields import PeerInfo
from common.scheduler.effects import Effect
from common.worker.outgoing import HandoffEnd, HandoffKind, Outgoing
from common.worker.parts import Channels, WorkerParts
from common.worker.phases import PhaseLedger

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Leaving:
    target: PeerInfo
    machine: LeavingDecode = field(default_factory=LeavingDecode)


class Migrations:
    """The migrations that began here and are not over.

    ``execute`` carries the scheduler's effects out; ``wake`` is set when a decode goes on.
    """

    def __init__(
        self,
        parts: WorkerParts,
        ledger: PhaseLedger,
        execute: Callable[[Iterable[Effect]], None],
        wake: asyncio.Event,
    ) -> None:
        self._id = parts.worker_id
        self._blocks = parts.blocks
        self._scheduler = parts.scheduler
        self._ledger = ledger
        self._execute = execute
        self._wake = wake
        self._leaving: dict[RequestId, _Leaving] = {}

    def attach(self, channels: Channels) -> None:
        """Join to the channels; they call back, so they come second."""
        self._control = channels.control
        self._outbound = channels.outbound

    def order(self, order: MigrateDecode) -> None:
        """Freeze a decode, to hand it over when it stands still; or say why that cannot be."""
        request_id = order.request_id
        if request_id in self._leaving:
            self._handle(request_id, OrderRepeated())
            return
        if order.decode.worker_id == self._id:
            self._tell_failed(request_id, "it is at the target already")
            return
        try:
            effects = self._scheduler.freeze(request_id)
        except LocalProtocolError as error:
            self._tell_failed(request_id, str(error))
            return
        log.info("decode_leaves", request_id=request_id, decode_worker=order.decode.worker_id)
        self._leaving[request_id] = _Leaving(order.decode)
        self._execute(effects)

    def still(self, request_id: RequestId) -> None:
        """No step has a frozen request any more."""
        self._handle(request_id, DecodeStill())

    def request_over(self, request_id: RequestId) -> None:
        """A request ended here; it may never have been ordered away."""
        if request_id in self._leaving:
            self._handle(request_id, RequestOver())

    def ended(self, end: HandoffEnd) -> None:
        """The handoff of a decode is over."""
        self._handle(end.outgoing.request_id, HandoffOver(end.outcome))

    def _handle(self, request_id: RequestId, event: MigrationEvent) -> None:
        leaving = self._leaving[request_id]
        effects = leaving.machine.handle(event)
        if leaving.machine.phase is MigrationPhase.ENDED:
            del self._leaving[request_id]
        for effect in effects:
            self._carry_out(request_id, leaving.target, effect)

    def _carry_out(self, request_id: RequestId, target: PeerInfo, effect: MigrationEffect) -> None:
        match effect:
            case BeginHandoff():
                self._begin(request_id, target)
                return
            case LetGo():
                self._execute(self._scheduler.close_handoff(request_id, was_accepted=True))
                self._ledger.forget(request_id)
                return
            case GoOn() | EndHere() | CancelHere():
                self._execute(self._scheduler.close_handoff(request_id, was_accepted=False))
        if isinstance(effect, GoOn):
            self._ledger.thawed(request_id, monotonic())
            self._execute(self._scheduler.thaw(request_id))
            self._tell_failed(request_id, effect.message)
            self._wake.set()
        elif isinstance(effect, CancelHere):
            self._execute(self._scheduler.cancel(request_id, None) or [])

    def _begin(self, request_id: RequestId, target: PeerInfo) -> None:
        now = monotonic()
        request = self._scheduler.find(request_id)
        assert request is not None, "it was frozen just now"
        migration = self._scheduler.migration_of(request_id)
        num_blocks = -(-len(migration.tokens) // self._scheduler.block_size)
        outgoing = Outgoing(
            kind=HandoffKind.DECODE,
            request_id=request_id,
            gateway_id=request.new.gateway_id,
            tokens_endpoint=request.new.tokens_endpoint,
            params=migration.params,
            prompt=migration.tokens,
            owner=migration.owner,
            block_ids=self._blocks.block_ids(migration.owner)[:num_blocks],
            live_choices=lambda: request.live_choices,
            phases=self._ledger.frozen(request_id, now),
        )
        self._scheduler.open_handoff(request_id)
        self._outbound.begin(outgoing, target)
        finished = PrefillFinished((migration.first_token,), request.num_cached_tokens, now)
        self._outbound.finish(request_id, finished)

    def _tell_failed(self, request_id: RequestId, message: str) -> None:
        log.warning("migration_failed", request_id=request_id, reason=message)
        failed = MigrationFailed(request_id=request_id, message=message[:4096])
        self._control.send(failed, request_id)
