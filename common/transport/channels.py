"""Every channel with its bounds: what is queued at most, and what happens when that is full."""

from dataclasses import dataclass
from enum import StrEnum


class WhenFull(StrEnum):
    """What a sender does when a peer's queue is full; no channel blocks or buffers unbounded."""

    DROP_PEER = "drop_peer"
    """The peer is taken for dead: its conversation ends and is begun anew."""
    REFUSE = "refuse"
    """The one thing that the message was for fails by name; the peer is kept."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One kind of conversation. High-water marks are in messages per peer."""

    name: str
    connects: str
    binds: str
    high_water_mark: int
    max_message_bytes: int
    when_full: WhenFull
    meaning: str


CONTROL = Channel(
    "control",
    "worker, gateway",
    "controller",
    65536,
    64 * 1024 * 1024,
    WhenFull.DROP_PEER,
    "hello, heartbeat, submit, place, cancel",
)
HANDOFF = Channel(
    "handoff",
    "prefill side",
    "decode side",
    16384,
    64 * 1024 * 1024,
    WhenFull.DROP_PEER,
    "pair, reserve, commit, accept, release, leases",
)
TOKENS = Channel(
    "tokens",
    "worker",
    "gateway",
    16384,
    8 * 1024 * 1024,
    WhenFull.REFUSE,
    "token batches, one per engine step and gateway; the streams in a full message fail",
)
ADMIN = Channel(
    "admin",
    "CLI",
    "controller",
    256,
    8 * 1024 * 1024,
    WhenFull.REFUSE,
    "operator commands, never queued behind work",
)
CHANNELS = (CONTROL, HANDOFF, TOKENS, ADMIN)
