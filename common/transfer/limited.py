"""Any transport behind a shared link of limited rate, to try a slower fabric than there is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from types import MappingProxyType

from common.messages.fields import ExportedPool
from common.traffic.arbiter import TrafficClass
from common.traffic.shared_link import SharedLink
from common.transfer.backend import LinkRate, PeerLink, TransferBackend, WriteReport


class LimitedLink:
    """A peer's pool whose writes pass the shared link as KV traffic, and take as long as there."""

    def __init__(self, link: PeerLink, fabric: SharedLink, block_bytes: int) -> None:
        self._link = link
        self._fabric = fabric
        self._block_bytes = block_bytes

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Copy blocks (see ``PeerLink``); the report's seconds are the shared link's too."""
        began = perf_counter()
        with self._fabric.passing(len(pairs_src) * self._block_bytes, TrafficClass.KV):
            report = self._link.write(pairs_src, pairs_dst, token)
        return replace(report, seconds=perf_counter() - began)

    def measure(self) -> LinkRate:
        """Measure the link beneath; neither its rate nor its limit is above the shared link's."""
        measured, most = self._link.measure(), self._fabric.bytes_per_second / 1e9
        return replace(
            measured,
            gigabytes_per_second=min(measured.gigabytes_per_second, most),
            limit_gigabytes_per_second=min(measured.limit_gigabytes_per_second, most),
        )

    def close(self) -> None:
        """Let go of the peer's pool."""
        self._link.close()


class LimitedBackend:
    """A transport whose links all pass one shared link, which has a limit."""

    is_networked = True
    """Writes wait, so no other work may share their thread."""

    def __init__(self, backend: TransferBackend, fabric: SharedLink) -> None:
        self._backend = backend
        self._fabric = fabric

    @property
    def name(self) -> str:
        """The name of the transport beneath."""
        return self._backend.name

    def open_peer(self, handle: ExportedPool) -> PeerLink:
        """Open a peer's pool behind the shared link."""
        return LimitedLink(self._backend.open_peer(handle), self._fabric, handle.block_bytes)


def limit_backends(
    backends: Mapping[str, TransferBackend], fabric: SharedLink
) -> Mapping[str, TransferBackend]:
    """Put all transports behind one link; those of a link without limit stay as they are."""
    if not fabric.bytes_per_second:
        return backends
    limited = {name: LimitedBackend(backend, fabric) for name, backend in backends.items()}
    return MappingProxyType(limited)
