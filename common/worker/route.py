"""Where a worker's request goes when its prompt is computed."""

from dataclasses import dataclass

from common.messages.control import DecodeRefused
from common.messages.fields import PeerInfo
from common.scheduler.effects import PromptComputed


@dataclass(slots=True, eq=False)
class Route:
    """Where a request is to be decoded, and what its handoff will need when it can begin."""

    decode: PeerInfo | None
    received_at: float
    computed: PromptComputed | None = None
    computed_at: float = 0.0
    refused: DecodeRefused | None = None
    """What the controller was told, while the request waits for another decode side."""
    is_known: bool = True
    """Whether the present controller knows of the request, as far as we can tell."""
