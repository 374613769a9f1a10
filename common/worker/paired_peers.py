"""The prefill sides that a decode side has paired with, and whether their processes still run."""

from common.config.processes import ProcessWatch
from common.ids import Epoch
from common.messages.fields import PeerInfo
from common.messages.handoff import PairRefused, PairRequest
from common.transfer.backend import PoolExport
from common.transfer.selection import TransportRefused, select_transport
from common.worker.setup import HandoffSetup

Peer = tuple[str, Epoch]
"""One incarnation of a worker."""


class PairedPeers:
    """At most one incarnation of each worker, with the export of our pool that it writes into."""

    def __init__(self, setup: HandoffSetup) -> None:
        self._setup = setup
        self._exports: dict[Peer, PoolExport] = {}
        self._pids: dict[Peer, int] = {}
        self._watch = ProcessWatch()

    def export_for(self, request: PairRequest) -> PoolExport | PairRefused:
        """Choose how a peer may write, or say which field forbids it, with both values."""
        mine: PeerInfo = self._setup.own.info
        for name, expected, actual in (
            ("model_fingerprint", self._setup.model_fingerprint, request.model_fingerprint),
            ("dtype", mine.dtype, request.peer.dtype),
            ("layout_fingerprint", mine.layout_fingerprint, request.peer.layout_fingerprint),
        ):
            if expected != actual:
                return PairRefused(field=name, expected=expected, actual=actual)
        choice = select_transport(mine, request.peer)
        if isinstance(choice, TransportRefused):
            return PairRefused(field=choice.field, expected=choice.expected, actual=choice.actual)
        return self._setup.exports[choice.name]

    def add(self, peer: Peer, info: PeerInfo, export: PoolExport) -> None:
        """Pair with an incarnation, in place of its worker's earlier one."""
        self.drop_others(peer)
        self._exports[peer] = export
        if info.host == self._setup.own.info.host:
            self._pids[peer] = info.pid
            self._watch.gone_of(self._pids.values())  # notes when the process began

    def drop_others(self, peer: Peer) -> None:
        """Unpair from other incarnations of this one's worker."""
        for other in [p for p in self._exports if p[0] == peer[0] and p != peer]:
            del self._exports[other]

    def drop(self, peer: Peer) -> None:
        """Unpair; the process is watched until ``forget``."""
        self._exports.pop(peer, None)

    def forget(self, peer: Peer) -> None:
        """Unpair, and watch its process no more."""
        self.drop(peer)
        self._pids.pop(peer, None)

    def export_of(self, peer: Peer) -> PoolExport | None:
        """Return the export that a paired incarnation writes into."""
        return self._exports.get(peer)

    def is_on_this_host(self, peer: Peer) -> bool:
        """Whether the incarnation is known to be a process of this host."""
        return peer in self._pids

    def is_running(self, peer: Peer) -> bool:
        """Whether the incarnation's process is known, on this host, to run."""
        pid = self._pids.get(peer)
        return pid is not None and pid not in self._watch.gone_of(self._pids.values())
