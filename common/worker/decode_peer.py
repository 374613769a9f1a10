"""One decode side as a prefill side sees it: its link, and its pool once they are paired."""

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from time import monotonic

import structlog

from common.errors import TransferError
from common.ids import Epoch, TransferId, WorkerId
from common.messages.fields import PairStatus, PeerInfo
from common.messages.handoff import DecodeToPrefill, PairAccepted, PrefillToDecode
from common.transfer.backend import TransferBackend
from common.transport.sockets import DealerLink
from common.worker.peer_pool import WritablePool

log = structlog.get_logger()

PAIRING_SECONDS = 30.0
"""How long a decode side may take to answer, and its pool to be mapped."""
PATIENCE_SECONDS = 3.0
"""How long a pairing is expected to succeed; after that, others are better."""
RETRY_SECONDS = 2.0
"""After how long a pairing that failed is tried again."""

PeerKey = tuple[WorkerId, Epoch]
"""One incarnation of a worker."""


@dataclass(slots=True, eq=False)
class DecodePeer:
    """A link to one incarnation; ``unsent`` are the transfers that wait until it is paired."""

    info: PeerInfo
    link: DealerLink[PrefillToDecode, DecodeToPrefill]
    lease_seconds: float
    begun_at: float
    heard_at: float
    pool: WritablePool | None = None
    num_pool_blocks: int = 0
    transport: str = ""
    is_gone: bool = False
    unsent: list[TransferId] = field(default_factory=list)
    asked_on: int = 0
    """``num_connects`` of the link when the peer was asked to pair."""

    @property
    def key(self) -> PeerKey:
        """Its incarnation."""
        return (self.info.worker_id, self.info.epoch)

    async def open_pool(
        self, accepted: PairAccepted, backends: Mapping[str, TransferBackend], copier: Executor
    ) -> str | None:
        """Map the pool that it offers; return why that failed, or None."""
        backend = backends.get(accepted.transport)
        if backend is None:
            return f"it chose {accepted.transport}; here is {', '.join(backends)}"
        started = monotonic()
        try:
            pool = await WritablePool.open(backend, accepted.pool, copier)
        except TransferError as error:
            return str(error)
        if self.is_gone:
            pool.end()
            return None
        self.pool = pool
        self.num_pool_blocks = accepted.pool.num_blocks
        self.lease_seconds = accepted.lease_seconds
        self.transport = accepted.transport
        log.info(
            "paired",
            peer=self.info.worker_id,
            transport=accepted.transport,
            pool_bytes=accepted.pool.num_bytes,
            gigabytes_per_second=round(pool.rate.gigabytes_per_second, 2),
            limit_gigabytes_per_second=round(pool.rate.limit_gigabytes_per_second, 2),
            seconds=round(monotonic() - started, 4),
        )
        if pool.rate.is_flagged:
            log.warning(
                "slow_link",
                peer=self.info.worker_id,
                share_of_limit=round(pool.rate.ratio, 3),
                reason="far below what this host gives; see docs/two-hosts.md",
            )
        return None

    def is_given_up(self, now: float) -> bool:
        """Whether the pairing took too long."""
        return now - self.begun_at > PAIRING_SECONDS

    def why_not_paired(self, now: float) -> str | None:
        """Say why the pairing has failed so far, if it has.

        A key that is not let in may be so soon: the link keeps trying, and then it is asked again.
        """
        if self.link.refusal is None and self.is_given_up(now):
            return f"no answer within {PAIRING_SECONDS:g} s"
        return self.link.refusal

    def trouble(self, now: float) -> str:
        """Say why nothing should be sent to it for now; empty when there is no reason."""
        if self.pool is None:
            is_slow = now - self.begun_at > PATIENCE_SECONDS
            return f"not paired within {PATIENCE_SECONDS:g} s" if is_slow else ""
        is_silent = now - self.heard_at > self.lease_seconds
        return f"paired, but silent for over {self.lease_seconds:g} s" if is_silent else ""


def _rate_of(peer: DecodePeer | None) -> float:
    """Return the link's rate in bytes per second; 0 while it is not paired."""
    if peer is None or peer.pool is None:
        return 0.0
    return peer.pool.rate.gigabytes_per_second * 1e9


class FailedPairs:
    """The decode sides that could not be paired with: why, and when to try again."""

    def __init__(self) -> None:
        self._failed: dict[PeerKey, tuple[PeerInfo, str, float]] = {}

    def add(self, info: PeerInfo, reason: str, retry_at: float) -> None:
        """Note a failure, and log it unless it is the one that is known."""
        key = (info.worker_id, info.epoch)
        known = self._failed.get(key)
        if known is None or known[1] != reason:
            log.error("pairing_failed", peer=info.worker_id, reason=reason)
        self._failed[key] = (info, reason, retry_at)

    def discard(self, key: PeerKey) -> None:
        """Forget one: it is paired, or gone."""
        self._failed.pop(key, None)

    def due(self, now: float) -> list[PeerInfo]:
        """Return those to be tried again now."""
        return [info for info, _, retry_at in self._failed.values() if now >= retry_at]

    def report(self, peers: Mapping[PeerKey, DecodePeer], now: float) -> tuple[PairStatus, ...]:
        """Tell of every decode side, those among ``peers`` and those that failed."""
        troubles = {key: ("", reason) for key, (_, reason, _) in self._failed.items()}
        for key, peer in peers.items():
            if peer.pool is not None or key not in troubles:
                troubles[key] = (peer.transport, peer.trouble(now))
        return tuple(
            PairStatus(
                worker_id=key[0],
                epoch=key[1],
                transport=transport,
                reason=reason[:1024],
                bytes_per_second=_rate_of(peers.get(key)),
            )
            for key, (transport, reason) in troubles.items()
        )
