"""Tokens on their way to gateways: one message per engine step and gateway."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import structlog

from common.errors import ErrorCode
from common.ids import GatewayId, RequestId
from common.messages.tokens import StreamFailed, TokenDelta, TokensGenerated, WorkerToGateway
from common.transport.sockets import DealerLink

log = structlog.get_logger()

IDLE_SECONDS = 60.0
"""A link that took nothing so long is closed: its gateway may have left, which nobody tells us."""
MAX_ENDPOINTS_KEPT = 1024

Link = DealerLink[WorkerToGateway, WorkerToGateway]
Connect = Callable[[str], Link]


@dataclass(slots=True)
class _Outlet:
    """One gateway. Without a link it is connected to again when there is something for it."""

    endpoint: str
    link: Link | None
    used_at: float


class TokenEmitter:
    """Gathers deltas and sends them; a gateway that does not take them loses those streams."""

    def __init__(self, connect: Connect, clock: Callable[[], float] = monotonic) -> None:
        self._connect = connect
        self._clock = clock
        self._outlets: OrderedDict[GatewayId, _Outlet] = OrderedDict()  # the oldest use first
        self._deltas: dict[GatewayId, list[TokenDelta]] = {}

    @property
    def num_links(self) -> int:
        """Gateways that are connected to now."""
        return sum(outlet.link is not None for outlet in self._outlets.values())

    def open(self, gateway_id: GatewayId, endpoint: str) -> None:
        """Connect to a gateway, unless that is done; its endpoint may have changed."""
        outlet = self._outlets.get(gateway_id)
        if outlet is not None and outlet.endpoint != endpoint:
            if outlet.link is not None:
                outlet.link.close()
            outlet = None
        if outlet is None:
            self._outlets[gateway_id] = _Outlet(endpoint, None, self._clock())
        self._link_to(gateway_id)
        self._close_idle()

    def add(self, gateway_id: GatewayId, delta: TokenDelta) -> None:
        """Put a delta into the gateway's next message."""
        self._deltas.setdefault(gateway_id, []).append(delta)

    def flush(self) -> list[RequestId]:
        """Send what was added; return the requests whose gateway did not take it."""
        lost: list[RequestId] = []
        for gateway_id, deltas in self._deltas.items():
            message = TokensGenerated(deltas=tuple(deltas))
            link = self._link_to(gateway_id)
            if link is None or not link.try_send(message, cause="step"):
                lost += [delta.request_id for delta in deltas]
                log.error("gateway_queue_full", gateway_id=gateway_id, num_streams=len(deltas))
        self._deltas.clear()
        return lost

    def fail(
        self, gateway_id: GatewayId, request_id: RequestId, code: ErrorCode, message: str
    ) -> None:
        """Tell a gateway that a request ended with an error, after the tokens added so far."""
        self.flush()
        link = self._link_to(gateway_id)
        if link is not None:
            failed = StreamFailed(request_id=request_id, code=code, message=message[:4096])
            link.try_send(failed, cause=request_id)

    def close(self, linger_seconds: float) -> None:
        """Close all links; the last tokens get ``linger_seconds`` to leave."""
        for outlet in self._outlets.values():
            if outlet.link is not None:
                outlet.link.close(linger_seconds)
        self._outlets.clear()

    def _link_to(self, gateway_id: GatewayId) -> Link | None:
        """Return the link for something that is to be sent now; None for a gateway unheard of."""
        outlet = self._outlets.get(gateway_id)
        if outlet is None:
            return None
        outlet.used_at = self._clock()
        self._outlets.move_to_end(gateway_id)
        if outlet.link is None:
            outlet.link = self._connect(outlet.endpoint)
        return outlet.link

    def _close_idle(self) -> None:
        """Close the links that took nothing for long; forget the endpoints that are too many."""
        is_too_old = self._clock() - IDLE_SECONDS
        for outlet in self._outlets.values():
            if outlet.used_at > is_too_old:
                break
            if outlet.link is not None:
                outlet.link.close()
                outlet.link = None
        while len(self._outlets) > MAX_ENDPOINTS_KEPT:
            oldest = next(iter(self._outlets.values()))
            if oldest.link is not None:
                break
            self._outlets.popitem(last=False)
