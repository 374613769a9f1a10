"""Which transport a pair of workers uses, from what both report. Pure.

A choice is truthful: what was chosen is what is used, and nothing falls back in silence.
"""

from dataclasses import dataclass

from common.messages.fields import PeerInfo

PREFERENCE = ("local", "shm", "tcp")
"""Every transport, best first; each has its rule in ``_why_not``."""


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

    ``local`` joins a worker with itself (same host, process and epoch), ``shm`` two workers of one
    host, ``tcp`` any two. A ``forced`` transport is honoured or refused, never replaced.
    """
    names = PREFERENCE if forced is None else (forced,)
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
    if name not in PREFERENCE:
        return f"unknown; there are {', '.join(PREFERENCE)}"
    for side in (own, peer):
        if name not in side.transports:
            return f"{side.worker_id} does not offer it"
    if name != "tcp" and own.host != peer.host:
        return "the workers are on different hosts"
    if name == "local" and (own.pid, own.epoch) != (peer.pid, peer.epoch):
        return "the workers are different processes"
    return None


def _list(side: PeerInfo) -> str:
    return "[" + ", ".join(side.transports) + "]"
