"""The decode side of all handoffs of a worker: reservations, verification, take-over."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

import numpy as np
import structlog

from common.errors import ErrorCode, ProtocolError, RemoteProtocolError
from common.handoff.events import (
    AbortedReceived,
    AbortReceived,
    CancelRequested,
    CommitReceived,
    Ended,
    FreeBlocks,
    PeerLost,
    ReceiverEffect,
    ReceiverEvent,
    ReleaseReceived,
    ReserveRepeated,
    SendAbort,
    SendAccepted,
    SendCommitRefused,
    SendReserved,
    StartDecode,
    StartVerify,
    Verified,
    VerifyFailed,
)
from common.handoff.receiver import HandoffReceiver, ReceiverPhase
from common.ids import Epoch, RequestId, TransferId, WorkerId
from common.kv.blocks import BlockManager, Hold
from common.messages.codec import Received
from common.messages.handoff import (
    Abort,
    Aborted,
    AbortReason,
    Accepted,
    Commit,
    CommitRefused,
    DecodeToPrefill,
    LeasesRenewed,
    PairAccepted,
    PairRefused,
    PairRequest,
    PrefillToDecode,
    Release,
    RenewLeases,
    Reserve,
    Reserved,
    ReserveRefused,
)
from common.scheduler.request import NewRequest
from common.transfer.verify import verify_blocks
from common.transport.sockets import RouterHub
from common.worker.availability import Refusal
from common.worker.fences import WriteFences
from common.worker.incoming import IncomingTransfer, PrefixEnded, TakenOver
from common.worker.paired_peers import PairedPeers, Peer
from common.worker.payload import pack_ids, unpack_checksums, unpack_prompt
from common.worker.phases import PrefixCopied
from common.worker.setup import HandoffSetup

log = structlog.get_logger()


class InboundHandoffs:
    """Holds blocks for prefill sides and takes their requests over. Lives in the worker's loop."""

    def __init__(
        self,
        setup: HandoffSetup,
        hub: RouterHub[DecodeToPrefill, PrefillToDecode],
        blocks: BlockManager,
        why_refuse: Callable[[Reserve], Refusal | None],
        on_taken_over: Callable[[TakenOver], None],
        on_dropped: Callable[[RequestId], None],
        on_prefix: Callable[[PrefixEnded], None],
    ) -> None:
        self._setup = setup
        self._hub = hub
        self._blocks = blocks
        self._why_refuse = why_refuse
        self._on_taken_over = on_taken_over
        self._on_dropped = on_dropped
        self._on_prefix = on_prefix
        self._peers = PairedPeers(setup)
        self._undead: dict[Peer, str] = {}
        self._fences = WriteFences(setup.tasks, blocks.release)
        self._transfers: dict[TransferId, IncomingTransfer] = {}

    async def serve(self) -> None:
        """Answer prefill sides until the socket is closed."""
        async for received in self._hub.received():
            try:
                self._receive(received)
            except ProtocolError as error:
                log.error(
                    "handoff_protocol_error", peer=received.envelope.sender, reason=str(error)
                )

    def cancel(self, request_id: RequestId, choice: int | None) -> bool:
        """Cancel a request, or one choice of it, that is not decoding yet.

        Returns whether it is here.
        """
        for transfer in list(self._transfers.values()):
            owned = transfer.machine.phase is ReceiverPhase.ACCEPTED
            if transfer.request_id != request_id or owned or transfer.is_prefix:
                continue
            if choice is None:
                self._handle(transfer, CancelRequested(AbortReason.CANCELLED))
            else:
                transfer.cancelled_choices.add(choice)
            return True
        return False

    def peer_left(self, worker_id: WorkerId, epoch: Epoch, reason: str) -> None:
        """End every handoff with a dead or departed incarnation.

        A process that was only taken for dead may wake up inside a write into shared memory: its
        blocks drain until it is gone, or is back under a new epoch, which ends its old writes.
        """
        peer = (str(worker_id), epoch)
        self._peers.drop(peer)
        transfers = self._transfers_of(peer)
        may_write = [t for t in transfers if not t.export.is_fencing]
        if may_write and self._peers.is_running(peer):
            log.warning("peer_may_still_write", peer=worker_id, num_transfers=len(may_write))
            self._undead[peer] = reason
            for transfer in transfers:
                if transfer.machine.phase is ReceiverPhase.RESERVED:
                    self._handle(transfer, CancelRequested(AbortReason.LEASE_EXPIRED))
            return
        self._bury(peer, reason)

    def _bury(self, peer: Peer, reason: str) -> None:
        """Nothing of this incarnation writes any more."""
        self._undead.pop(peer, None)
        self._peers.forget(peer)
        for transfer in self._transfers_of(peer):
            self._handle(transfer, PeerLost(f"prefill worker {peer[0]} {reason}"))

    def _transfers_of(self, peer: Peer) -> list[IncomingTransfer]:
        return [t for t in self._transfers.values() if t.peer == peer]

    def stop_all(self, reason: AbortReason) -> None:
        """End every handoff that is not accepted yet."""
        for transfer in list(self._transfers.values()):
            self._handle(transfer, CancelRequested(reason))

    def tick(self, now: float) -> None:
        """Notice expired leases, and the end of processes that were taken for dead."""
        for peer, reason in list(self._undead.items()):
            if not self._peers.is_running(peer):
                self._bury(peer, reason)
        for transfer in list(self._transfers.values()):
            self._execute(transfer, transfer.machine.tick(now))

    @property
    def num_open(self) -> int:
        """Handoffs whose blocks are held for a prefill side."""
        return sum(
            1 for t in self._transfers.values() if t.machine.phase is not ReceiverPhase.ACCEPTED
        )

    # ---- messages --------------------------------------------------------------------------------

    def _receive(self, received: Received[PrefillToDecode]) -> None:
        message = received.message
        peer = (received.envelope.sender, received.envelope.epoch)
        if not isinstance(message, PairRequest) and self._peers.export_of(peer) is None:
            self._refuse_stranger(peer, message)
            return
        match message:
            case PairRequest():
                self._pair(peer, message)
            case Reserve():
                self._reserve(peer, message, received.payload)
            case Commit():
                self._commit(peer, message, received.payload)
            case Release():
                self._to_machine(peer, message.transfer_id, ReleaseReceived())
            case Abort():
                self._to_machine(peer, message.transfer_id, AbortReceived(message.reason))
            case Aborted():
                self._to_machine(peer, message.transfer_id, AbortedReceived())
            case RenewLeases():
                self._renew(peer, message)

    def _refuse_stranger(self, peer: Peer, message: PrefillToDecode) -> None:
        log.warning("message_refused", peer=peer[0], reason="not paired with this incarnation")
        if isinstance(message, Reserve):
            refused = ReserveRefused(
                transfer_id=message.transfer_id,
                code=ErrorCode.TRANSFER_FAILED,
                message="not paired with this incarnation",
            )
            self._hub.try_send(peer, refused, message.request_id)

    def _pair(self, peer: Peer, request: PairRequest) -> None:
        chosen = self._peers.export_for(request)
        if isinstance(chosen, PairRefused):
            log.error("pairing_refused", peer=peer[0], field=chosen.field, actual=chosen.actual)
            self._hub.try_send(peer, chosen, "pairing")
            return
        for old in {t.peer for t in self._transfers.values()}:
            if old[0] == peer[0] and old != peer:
                self._bury(old, "was replaced by a new incarnation")
        self._peers.add(peer, request.peer, chosen)
        accepted = PairAccepted(
            epoch=self._setup.own.info.epoch,
            transport=chosen.name,
            pool=chosen.handle(),
            lease_seconds=self._setup.lease_seconds,
        )
        self._hub.try_send(peer, accepted, "pairing")

    def _reserve(self, peer: Peer, message: Reserve, payload: tuple[bytes, ...]) -> None:
        held = self._transfers.get(message.transfer_id)
        if held is not None:
            if held.peer == peer:
                self._handle(held, ReserveRepeated())
            return
        export = self._peers.export_of(peer)
        if export is None or self._fences.is_freeing(message.transfer_id):
            return  # a late repeat
        prompt = unpack_prompt(payload, message.num_prompt_tokens, message.params.num_drawn)
        refusal = self._why_refuse(message)
        acquired = None
        if refusal is None:
            growth = 0 if message.is_prefix else message.params.num_left
            wanted = len(prompt) + min(growth, self._setup.growth_tokens)
            acquired = self._blocks.acquire(
                message.transfer_id,
                prompt,
                hold=Hold.TRANSFER,
                max_cached_tokens=len(prompt),
                capacity_tokens=wanted if self._blocks.can_ever_hold(wanted) else len(prompt),
            )
            refusal = (ErrorCode.NO_ROOM, f"no {len(prompt)} tokens of KV memory are free")
        if acquired is None:
            self._refuse(peer, message, refusal)
            return
        new = NewRequest(
            message.request_id,
            message.gateway_id,
            message.tokens_endpoint,
            message.params,
            prompt,
        )
        transfer = IncomingTransfer(
            message.transfer_id,
            peer,
            new,
            HandoffReceiver(monotonic() + self._setup.lease_seconds),
            acquired.block_ids[: -(-len(prompt) // self._setup.block_size)],
            acquired.num_cached_tokens // self._setup.block_size,
            export,
            message.is_prefix,
        )
        self._transfers[transfer.transfer_id] = transfer
        self._grant(transfer)
        log.info(
            "reserved",
            request_id=message.request_id,
            transfer_id=message.transfer_id,
            num_blocks=len(transfer.block_ids),
            num_cached_blocks=transfer.num_cached_blocks,
        )
        self._send_reserved(transfer)

    def _refuse(self, peer: Peer, message: Reserve, refusal: Refusal) -> None:
        refused = ReserveRefused(
            transfer_id=message.transfer_id, code=refusal[0], message=refusal[1]
        )
        log.info("reserve_refused", request_id=message.request_id, reason=refusal[1])
        self._hub.try_send(peer, refused, message.request_id)
        if message.is_prefix:
            self._on_prefix(PrefixEnded(message.request_id, PrefixCopied()))

    def _commit(self, peer: Peer, message: Commit, payload: tuple[bytes, ...]) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None or transfer.peer != peer:
            unknown = Abort(transfer_id=message.transfer_id, reason=AbortReason.UNKNOWN_TRANSFER)
            self._hub.try_send(peer, unknown, message.transfer_id)
            return
        num_written = len(transfer.block_ids) - transfer.num_cached_blocks
        if message.num_tokens != len(transfer.new.prompt):
            raise RemoteProtocolError(
                f"commit of {message.num_tokens} tokens; {len(transfer.new.prompt)} reserved"
            )
        event = CommitReceived(
            message.first_tokens,
            message.num_cached_tokens,
            self._done_at(peer, message),
            unpack_checksums(payload, num_written),
            message.is_migration,
            message.phases,
        )
        self._handle(transfer, event)

    def _done_at(self, peer: Peer, commit: Commit) -> float:
        """Return when the peer's part ended, on this host's clock, which may not be the peer's."""
        now = monotonic()
        if self._peers.is_on_this_host(peer):
            return min(now, commit.prefill_done_at)
        return now - commit.seconds_since_prefill

    def _renew(self, peer: Peer, message: RenewLeases) -> None:
        """Renew what the peer names; what it no longer names, it no longer writes into."""
        deadline = monotonic() + self._setup.lease_seconds
        alive = set(message.transfer_ids)
        known: list[TransferId] = []
        for transfer in [t for t in self._transfers.values() if t.peer == peer]:
            if transfer.transfer_id in alive:
                known.append(transfer.transfer_id)
                transfer.machine.renew(deadline)
                if transfer.machine.phase is ReceiverPhase.ACCEPTED:
                    # It would not name it any more, had it got our answer.
                    self._send(transfer, Accepted(transfer_id=transfer.transfer_id))
            elif transfer.machine.phase is ReceiverPhase.DRAINING:
                self._handle(transfer, AbortedReceived())
            elif transfer.machine.phase is ReceiverPhase.ACCEPTED:
                self._handle(transfer, ReleaseReceived())
            elif transfer.machine.phase is ReceiverPhase.RESERVED:
                self._handle(transfer, AbortReceived(AbortReason.UNKNOWN_TRANSFER))
        answer = LeasesRenewed(
            transfer_ids=tuple(known), unknown_ids=tuple(alive.difference(known))
        )
        self._hub.try_send(peer, answer, "leases")

    # ---- machines --------------------------------------------------------------------------------

    def _to_machine(self, peer: Peer, transfer_id: TransferId, event: ReceiverEvent) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.peer == peer:
            self._handle(transfer, event)

    def _handle(self, transfer: IncomingTransfer, event: ReceiverEvent) -> None:
        self._execute(transfer, transfer.machine.handle(event))

    def _execute(self, transfer: IncomingTransfer, effects: Sequence[ReceiverEffect]) -> None:
        transfer_id = transfer.transfer_id
        for effect in effects:
            match effect:
                case SendReserved():
                    self._send_reserved(transfer)
                case StartVerify(checksums):
                    self._setup.tasks.create_task(
                        self._verify(transfer, checksums), name=f"verify {transfer_id}"
                    )
                case SendAccepted():
                    self._send(transfer, Accepted(transfer_id=transfer_id))
                case SendCommitRefused(block_index):
                    refused = CommitRefused(
                        transfer_id=transfer_id,
                        block_index=block_index,
                        message="its checksum is not the one that was committed",
                    )
                    self._grant(transfer)
                    self._send(transfer, refused)
                case SendAbort(reason):
                    self._send(transfer, Abort(transfer_id=transfer_id, reason=reason))
                    self._fences.start(
                        transfer.export, transfer_id, partial(self._end_drain, transfer)
                    )
                case StartDecode(commit):
                    self._take_over(transfer, commit)
                case FreeBlocks():
                    self._fences.free(transfer.export, transfer_id)
                case Ended(outcome):
                    self._ended(transfer, type(outcome).__name__, str(outcome))

    async def _verify(self, transfer: IncomingTransfer, checksums: tuple[int, ...]) -> None:
        loop = asyncio.get_running_loop()
        expected = np.array(checksums, dtype=np.uint64)
        await self._fences.fence(transfer.export, transfer.transfer_id)
        wrong = await loop.run_in_executor(
            self._setup.copier, verify_blocks, self._setup.pool, transfer.written_ids, expected
        )
        if wrong is None:
            self._handle(transfer, Verified())
            return
        place = wrong + transfer.num_cached_blocks
        log.error(
            "block_damaged",
            request_id=transfer.request_id,
            transfer_id=transfer.transfer_id,
            block_index=place,
        )
        self._handle(transfer, VerifyFailed(place))

    def _grant(self, transfer: IncomingTransfer) -> None:
        """Let the peer write, the first time or once more."""
        transfer.token = transfer.export.grant(
            transfer.transfer_id, transfer.written_ids, transfer.token or None
        )

    def _end_drain(self, transfer: IncomingTransfer) -> None:
        """A fence says what the peer's ``Aborted`` says, also when the peer cannot be reached."""
        if transfer.machine.phase is ReceiverPhase.DRAINING:
            self._handle(transfer, AbortedReceived())

    def _take_over(self, transfer: IncomingTransfer, commit: CommitReceived) -> None:
        seconds = monotonic() - commit.prefill_done_at
        log.info(
            "handoff_accepted",
            request_id=transfer.request_id,
            transfer_id=transfer.transfer_id,
            prefill_worker=transfer.peer[0],
            seconds_since_prefill=round(seconds, 6),
            is_prefix=transfer.is_prefix,
            is_migration=commit.is_migration,
        )
        if not transfer.is_prefix:
            self._on_taken_over(transfer.taken_over(commit))
            return
        # Nobody holds the blocks from now on; they stay cached.
        self._blocks.publish(transfer.transfer_id, transfer.new.prompt)
        self._blocks.release(transfer.transfer_id)
        self._on_prefix(PrefixEnded(transfer.request_id, transfer.copied(commit)))

    def _ended(self, transfer: IncomingTransfer, outcome: str, detail: str) -> None:
        del self._transfers[transfer.transfer_id]
        log.info(
            "handoff_closed",
            request_id=transfer.request_id,
            transfer_id=transfer.transfer_id,
            prefill_worker=transfer.peer[0],
            outcome=outcome,
            detail=detail,
        )
        if outcome == "HandedOver":
            return
        if transfer.is_prefix:
            self._on_prefix(PrefixEnded(transfer.request_id, PrefixCopied()))
        else:
            self._on_dropped(transfer.request_id)

    def _send_reserved(self, transfer: IncomingTransfer) -> None:
        reserved = Reserved(
            transfer_id=transfer.transfer_id,
            num_cached_blocks=transfer.num_cached_blocks,
            token=transfer.token,
        )
        self._send(transfer, reserved, (pack_ids(transfer.block_ids),))

    def _send(
        self, transfer: IncomingTransfer, message: DecodeToPrefill, payload: tuple[bytes, ...] = ()
    ) -> None:
        if not self._hub.try_send(transfer.peer, message, transfer.request_id, payload):
            # The lease ends what this answer would have moved on.
            log.warning("handoff_answer_lost", transfer_id=transfer.transfer_id)
