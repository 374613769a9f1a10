"""Which transport a pair of workers uses, from what both report. Pure.

A choice is truthful: what was chosen is what is used, and nothing falls back in silence.
"""

from dataclasses import dataclass

from common.messages.fields import PeerInfo

PREFERENCE = ("local", "cuda_ipc", "shm", "ranks", "rdma", "nccl", "tcp")
"""The transports that a worker may offer by itself, best first.

Within a host memory is mapped where it can be. Between hosts adapters come first where both sides
have them: they take no processor of either side, and no multiprocessors as ``nccl`` does."""
COMPARISONS = ("layerwise", "gather_buffer")
"""Transports that are there to be measured: a worker offers one only when it is told to."""
TRANSPORTS = (*PREFERENCE, *COMPARISONS)
"""Every transport; each has its rule in ``_why_not``."""
NETWORKED = ("rdma", "nccl", "tcp")
"""The transports that join workers of different hosts."""


@dataclass(frozen=True, slots=True)
class TransportChosen:
    """Use this transport; ``reason`` is for the log."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TransportRefused:
    """No transport fits: ``field`` with the value expected here and the peer's actual one."""

    field: str
    expected: str
    actual: str
    message: str


def select_transport(
    own: PeerInfo, peer: PeerInfo, forced: str | None = None
) -> TransportChosen | TransportRefused:
    """Choose the best transport that both sides report and that can join them.

    ``local`` joins a worker with itself (same host, process and epoch), ``rdma``, ``nccl`` and
    ``tcp`` any two, all others two workers of one host. A ``forced`` transport is honoured or
    refused, never replaced. What a worker does not offer (a pool on a GPU no shared memory) is
    never chosen.
    """
    names = TRANSPORTS if forced is None else (forced,)
    objections: list[str] = []
    for name in names:
        objection = _why_not(name, own, peer)
        if objection is None:
            reason = "forced" if forced is not None else "best that both sides report"
            return TransportChosen(name, f"{reason}; here {_list(own)}, there {_list(peer)}")
        objections.append(f"{name}: {objection}")
    why = "; ".join(objections)
    return TransportRefused(
        field="transports",
        expected=f"{_list(own)} on host {own.host}" + (f", forced {forced}" if forced else ""),
        actual=f"{_list(peer)} on host {peer.host}",
        message=(
            f"no transport joins {own.worker_id} (host {own.host}: {_list(own)}) and"
            f" {peer.worker_id} (host {peer.host}: {_list(peer)}): {why}"
        ),
    )


def _why_not(name: str, own: PeerInfo, peer: PeerInfo) -> str | None:
    if name not in TRANSPORTS:
        return f"unknown; there are {', '.join(TRANSPORTS)}"
    for side in (own, peer):
        if name not in side.transports:
            return f"{side.worker_id} does not offer it"
    if name not in NETWORKED and own.host != peer.host:
        return "the workers are on different hosts"
    if name == "local" and (own.pid, own.epoch) != (peer.pid, peer.epoch):
        return "the workers are different processes"
    return None


def _list(side: PeerInfo) -> str:
    return "[" + ", ".join(side.transports) + "]"
