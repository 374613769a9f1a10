"""The prefill side of all handoffs of a worker: peers, their mapped pools, transfers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import monotonic

import structlog

from common.errors import ErrorCode, ProtocolError, RemoteProtocolError, TransferError
from common.handoff.events import (
    AbortReceived,
    AcceptedReceived,
    BlocksComputed,
    CancelRequested,
    CommitRefusedReceived,
    Ended,
    Outcome,
    PeerLost,
    PrefillFinished,
    ReservedReceived,
    ReserveRefusedReceived,
    SendAbort,
    SendAborted,
    SendCommit,
    SenderEffect,
    SenderEvent,
    SendRelease,
    StartWrite,
    WriteFailed,
    WriteFinished,
)
from common.handoff.sender import HandoffSender, SenderPhase
from common.ids import Epoch, RequestId, TransferId, WorkerId, new_transfer_id
from common.messages.codec import Received
from common.messages.fields import PairStatus, PeerInfo
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
from common.transfer.backend import TransferBackend, WriteReport
from common.transport.sockets import DealerLink
from common.worker.decode_peer import RETRY_SECONDS, DecodePeer, FailedPairs, PeerKey
from common.worker.outgoing import HandoffEnd, HandoffKind, Outgoing, OutgoingTransfer
from common.worker.payload import pack_checksums, pack_ids, unpack_ids
from common.worker.setup import HandoffSetup

log = structlog.get_logger()

Connect = Callable[[str], DealerLink[PrefillToDecode, DecodeToPrefill]]
OnEnded = Callable[[HandoffEnd], None]


class OutboundHandoffs:
    """Reserves, writes and commits at decode sides. Lives in the worker's loop."""

    def __init__(
        self,
        setup: HandoffSetup,
        backends: Mapping[str, TransferBackend],
        connect: Connect,
        on_ended: OnEnded,
    ) -> None:
        self._setup = setup
        self._backends = backends
        self._connect = connect
        self._on_ended = on_ended
        self._peers: dict[PeerKey, DecodePeer] = {}
        self._failed = FailedPairs()
        self._transfers: dict[TransferId, OutgoingTransfer] = {}
        self._by_request: dict[RequestId, OutgoingTransfer] = {}

    # ---- peers -----------------------------------------------------------------------------------

    def pair(self, info: PeerInfo) -> None:
        """Begin to pair with a decode side, unless that was begun."""
        self._peer(info)

    def peer_left(self, worker_id: WorkerId, epoch: Epoch, reason: str) -> None:
        """End every handoff with a dead or departed incarnation."""
        self._failed.discard((worker_id, epoch))
        peer = self._peers.pop((worker_id, epoch), None)
        if peer is None:
            return
        peer.is_gone = True
        for transfer in [t for t in self._transfers.values() if t.peer is peer]:
            self._handle(transfer, PeerLost(f"decode worker {worker_id} {reason}"))
        peer.link.close()
        if peer.pool is not None:
            peer.pool.end()

    def _peer(self, info: PeerInfo) -> DecodePeer:
        key = (info.worker_id, info.epoch)
        peer = self._peers.get(key)
        if peer is None:
            link, now = self._connect(info.handoff_endpoint), monotonic()
            peer = DecodePeer(info, link, self._setup.lease_seconds, now, now)
            self._peers[key] = peer
            self._ask(peer)
            self._setup.tasks.create_task(self._serve(peer), name=f"handoff to {info.worker_id}")
        return peer

    def _ask(self, peer: DecodePeer) -> None:
        """Ask a decode side to pair, over the link's present connection."""
        request = PairRequest(
            peer=self._setup.own.info, model_fingerprint=self._setup.model_fingerprint
        )
        peer.link.try_send(request, cause="pairing")
        peer.asked_on = peer.link.num_connects

    async def _serve(self, peer: DecodePeer) -> None:
        async for received in peer.link.received():
            if received.envelope.epoch != peer.info.epoch:
                log.warning(
                    "message_refused",
                    reason=f"epoch {received.envelope.epoch} of {peer.info.worker_id} is not "
                    f"{peer.info.epoch}",
                )
                continue
            peer.heard_at = monotonic()
            try:
                await self._receive(peer, received)
            except ProtocolError as error:
                log.error("handoff_protocol_error", peer=peer.info.worker_id, reason=str(error))

    async def _receive(self, peer: DecodePeer, received: Received[DecodeToPrefill]) -> None:
        message = received.message
        match message:
            case PairAccepted():
                await self._paired(peer, message)
            case PairRefused():
                self._pairing_failed(
                    peer,
                    f"{message.field} is {message.expected} there and {message.actual} here",
                    retry_seconds=inf,  # for this incarnation it stays so
                )
            case LeasesRenewed():
                self._renewed(peer, message)
            case Reserved():
                self._to_machine(peer, message.transfer_id, self._reserved(peer, received))
            case ReserveRefused():
                refused = ReserveRefusedReceived(message.code, message.message)
                self._to_machine(peer, message.transfer_id, refused)
            case Accepted():
                self._to_machine(peer, message.transfer_id, AcceptedReceived())
            case CommitRefused():
                refused_commit = CommitRefusedReceived(message.block_index)
                self._to_machine(peer, message.transfer_id, refused_commit)
            case Abort():
                if message.transfer_id not in self._transfers:
                    # Already over here, so nothing is being written: the peer may stop draining.
                    answer = Aborted(transfer_id=message.transfer_id)
                    peer.link.try_send(answer, cause=message.transfer_id)
                self._to_machine(peer, message.transfer_id, AbortReceived(message.reason))

    async def _paired(self, peer: DecodePeer, accepted: PairAccepted) -> None:
        if peer.pool is not None or peer.is_gone:
            return
        failure = await peer.open_pool(accepted, self._backends, self._setup.copier)
        if failure is not None:
            self._pairing_failed(peer, failure)
        elif peer.pool is not None:
            self._failed.discard(peer.key)
            for transfer_id in peer.unsent:
                self._send_reserve(self._transfers[transfer_id])
            peer.unsent.clear()

    def _pairing_failed(
        self, peer: DecodePeer, message: str, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        """Give a pairing up, to be begun anew after a while."""
        self._peers.pop(peer.key, None)
        peer.is_gone = True
        self._refuse_unsent(peer, message, retry_seconds)
        peer.link.close()

    def _refuse_unsent(self, peer: DecodePeer, message: str, retry_seconds: float) -> None:
        self._failed.add(peer.info, message, monotonic() + retry_seconds)
        refused = ReserveRefusedReceived(
            ErrorCode.TRANSFER_FAILED, f"cannot pair with {peer.info.worker_id}: {message}"
        )
        for transfer_id in list(peer.unsent):
            self._handle(self._transfers[transfer_id], refused)

    # ---- transfers -------------------------------------------------------------------------------

    def begin(self, outgoing: Outgoing, target: PeerInfo) -> None:
        """Ask another worker to reserve blocks; ``progress`` and ``finish`` follow."""
        self._by_request[outgoing.request_id] = self._begin(outgoing, target)

    def send_prefix(self, outgoing: Outgoing, target: PeerInfo) -> None:
        """Let another worker have blocks that are whole, while its request may be here too."""
        transfer = self._begin(outgoing, target)
        self._handle(transfer, PrefillFinished((), len(outgoing.prompt), monotonic()))

    def _begin(self, outgoing: Outgoing, target: PeerInfo) -> OutgoingTransfer:
        peer = self._peer(target)
        machine = HandoffSender(len(outgoing.block_ids), monotonic() + self._setup.lease_seconds)
        transfer = OutgoingTransfer(new_transfer_id(), outgoing, peer, machine)
        self._transfers[transfer.transfer_id] = transfer
        log.info(
            "handoff_begun",
            request_id=outgoing.request_id,
            transfer_id=transfer.transfer_id,
            decode_worker=target.worker_id,
            kind=outgoing.kind,
            num_blocks=machine.num_blocks,
        )
        if peer.pool is None:
            peer.unsent.append(transfer.transfer_id)
        else:
            self._send_reserve(transfer)
        return transfer

    def progress(self, request_id: RequestId, num_blocks: int) -> None:
        """The first blocks of the prompt are whole."""
        self._event(request_id, BlocksComputed(num_blocks))

    def finish(self, request_id: RequestId, finished: PrefillFinished) -> None:
        """The prompt is whole and the first tokens are drawn."""
        self._event(request_id, finished)

    def stop(self, request_id: RequestId, reason: AbortReason) -> None:
        """The request needs no decode side any more."""
        self._event(request_id, CancelRequested(reason))

    def tick(self, now: float) -> None:
        """Notice expired leases, and peers that do not pair."""
        for peer in [p for p in self._peers.values() if p.pool is None]:
            if peer.asked_on != peer.link.num_connects:
                self._ask(peer)
            if (reason := peer.why_not_paired(now)) is None:
                continue
            if peer.is_given_up(now):
                self._pairing_failed(peer, reason)
            else:
                self._refuse_unsent(peer, reason, RETRY_SECONDS)
        for info in self._failed.due(now):
            self._peer(info)
        for transfer in list(self._transfers.values()):
            if transfer.transfer_id in transfer.peer.unsent:
                transfer.machine.renew(now + self._setup.lease_seconds)
            self._execute(transfer, transfer.machine.tick(now))

    def renew_leases(self) -> None:
        """Tell every paired peer which transfers are alive here."""
        alive: dict[int, list[TransferId]] = {id(peer): [] for peer in self._peers.values()}
        for transfer in self._transfers.values():
            if transfer.transfer_id not in transfer.peer.unsent and not transfer.peer.is_gone:
                alive[id(transfer.peer)].append(transfer.transfer_id)
        for peer in self._peers.values():
            if peer.pool is not None:
                peer.link.try_send(RenewLeases(transfer_ids=tuple(alive[id(peer)])), cause="leases")

    @property
    def num_open(self) -> int:
        """Handoffs that have not ended."""
        return len(self._transfers)

    def pairs(self) -> tuple[PairStatus, ...]:
        """Tell with which decode sides this worker is paired, and why not with the others."""
        return self._failed.report(self._peers, monotonic())

    def close(self) -> None:
        """Close all links and mappings. No write may be in flight."""
        for peer in list(self._peers.values()):
            peer.is_gone = True
            peer.link.close()
            if peer.pool is not None:
                peer.pool.end()
        self._peers.clear()

    def _send_reserve(self, transfer: OutgoingTransfer) -> None:
        outgoing = transfer.outgoing
        reserve = Reserve(
            transfer_id=transfer.transfer_id,
            request_id=outgoing.request_id,
            gateway_id=outgoing.gateway_id,
            tokens_endpoint=outgoing.tokens_endpoint,
            params=outgoing.params,
            num_prompt_tokens=len(outgoing.prompt),
            is_prefix=outgoing.kind is HandoffKind.PREFIX,
        )
        self._send(transfer, reserve, (pack_ids(outgoing.prompt),))

    def _send(
        self, transfer: OutgoingTransfer, message: PrefillToDecode, payload: tuple[bytes, ...] = ()
    ) -> None:
        if transfer.peer.is_gone:
            return
        if not transfer.peer.link.try_send(message, transfer.request_id, payload):
            log.error("handoff_queue_full", peer=transfer.peer.info.worker_id)
            info = transfer.peer.info
            loop = asyncio.get_running_loop()
            loop.call_soon(self.peer_left, info.worker_id, info.epoch, "takes no messages")

    def _reserved(self, peer: DecodePeer, received: Received[DecodeToPrefill]) -> ReservedReceived:
        message = received.message
        assert isinstance(message, Reserved), "called for Reserved alone"
        transfer = self._transfers.get(message.transfer_id)
        count = len(received.payload[0]) // 4 if received.payload else 0
        if transfer is not None and count != transfer.machine.num_blocks:
            asked = transfer.machine.num_blocks
            raise RemoteProtocolError(f"{count} blocks reserved; {asked} asked")
        ids = unpack_ids(received.payload, count, peer.num_pool_blocks)
        if transfer is not None and transfer.peer is peer:
            transfer.token = message.token
        return ReservedReceived(tuple(ids), message.num_cached_blocks)

    def _renewed(self, peer: DecodePeer, message: LeasesRenewed) -> None:
        deadline = monotonic() + peer.lease_seconds
        for transfer_id in message.transfer_ids:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and transfer.peer is peer:
                transfer.machine.renew(deadline)
        for transfer_id in message.unknown_ids:
            self._to_machine(peer, transfer_id, AbortReceived(AbortReason.UNKNOWN_TRANSFER))

    def _to_machine(self, peer: DecodePeer, transfer_id: TransferId, event: SenderEvent) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None and transfer.peer is peer:
            self._handle(transfer, event)

    def _event(self, request_id: RequestId, event: SenderEvent) -> None:
        transfer = self._by_request.get(request_id)
        if transfer is not None:
            self._handle(transfer, event)

    def _handle(self, transfer: OutgoingTransfer, event: SenderEvent) -> None:
        self._execute(transfer, transfer.machine.handle(event))

    def _execute(self, transfer: OutgoingTransfer, effects: Sequence[SenderEffect]) -> None:
        transfer_id = transfer.transfer_id
        for effect in effects:
            match effect:
                case StartWrite(first, num_blocks):
                    self._start_write(transfer, first, num_blocks)
                case SendCommit(finished, checksums):
                    commit = self._commit_of(transfer, finished)
                    self._send(transfer, commit, (pack_checksums(checksums),))
                case SendRelease():
                    self._send(transfer, Release(transfer_id=transfer_id))
                case SendAbort(reason):
                    self._send(transfer, Abort(transfer_id=transfer_id, reason=reason))
                case SendAborted():
                    self._send(transfer, Aborted(transfer_id=transfer_id))
                case Ended(outcome):
                    self._ended(transfer, outcome)

    def _commit_of(self, transfer: OutgoingTransfer, finished: PrefillFinished) -> Commit:
        outgoing = transfer.outgoing
        live = outgoing.live_choices()  # some may have been cancelled since the prefill ended
        return Commit(
            transfer_id=transfer.transfer_id,
            num_tokens=len(outgoing.prompt),
            num_cached_tokens=finished.num_cached_tokens,
            first_tokens=tuple(f for f in finished.first_tokens if f.choice in live),
            prefill_done_at=finished.at,
            seconds_since_prefill=monotonic() - finished.at,
            is_migration=outgoing.kind is HandoffKind.DECODE,
            phases=transfer.phases(self._setup.own.info.worker_id),
        )

    def _start_write(self, transfer: OutgoingTransfer, first: int, num_blocks: int) -> None:
        pool = transfer.peer.pool
        assert pool is not None, "a peer that reserved is paired"
        sources = transfer.outgoing.block_ids[first : first + num_blocks]
        targets = transfer.machine.target_ids[first : first + num_blocks]
        writing = pool.write(sources, targets, transfer.token)
        self._setup.tasks.create_task(
            self._write(transfer, writing), name=f"write {transfer.transfer_id}"
        )

    async def _write(
        self, transfer: OutgoingTransfer, writing: asyncio.Future[WriteReport]
    ) -> None:
        event: SenderEvent
        try:
            report = await writing
        except TransferError as error:
            event = WriteFailed(str(error))
        else:
            transfer.num_bytes += report.num_bytes
            transfer.num_calls += report.num_calls
            transfer.write_seconds += report.seconds
            event = WriteFinished(tuple(int(c) for c in report.checksums))
        self._handle(transfer, event)

    def _ended(self, transfer: OutgoingTransfer, outcome: Outcome) -> None:
        assert transfer.machine.phase is SenderPhase.ENDED, "the machine said so"
        del self._transfers[transfer.transfer_id]
        if self._by_request.get(transfer.request_id) is transfer:
            del self._by_request[transfer.request_id]
        if transfer.transfer_id in transfer.peer.unsent:
            transfer.peer.unsent.remove(transfer.transfer_id)
        log.info(
            "handoff_ended",
            request_id=transfer.request_id,
            transfer_id=transfer.transfer_id,
            decode_worker=transfer.peer.info.worker_id,
            outcome=type(outcome).__name__,
            detail=str(outcome),
            num_cached_blocks=transfer.machine.num_cached_blocks,
            num_bytes=transfer.num_bytes,
            num_calls=transfer.num_calls,
            write_seconds=round(transfer.write_seconds, 6),
        )
        worker_id = transfer.peer.info.worker_id
        self._on_ended(HandoffEnd(transfer.outgoing, worker_id, outcome, transfer.totals))
