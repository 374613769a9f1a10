"""Tokens on their way to gateways: one message per engine step and gateway."""

from collections.abc import Callable

import structlog

from common.errors import ErrorCode
from common.ids import GatewayId, RequestId
from common.messages.tokens import StreamFailed, TokenDelta, TokensGenerated, WorkerToGateway
from common.transport.sockets import DealerLink

log = structlog.get_logger()

Connect = Callable[[str], DealerLink[WorkerToGateway, WorkerToGateway]]


class TokenEmitter:
    """Gathers deltas and sends them; a gateway that does not take them loses those streams."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._links: dict[GatewayId, DealerLink[WorkerToGateway, WorkerToGateway]] = {}
        self._deltas: dict[GatewayId, list[TokenDelta]] = {}

    def open(self, gateway_id: GatewayId, endpoint: str) -> None:
        """Connect to a gateway, unless that is done; its endpoint may have changed."""
        link = self._links.get(gateway_id)
        if link is not None and link.endpoint == endpoint:
            return
        if link is not None:
            link.close()
        self._links[gateway_id] = self._connect(endpoint)

    def add(self, gateway_id: GatewayId, delta: TokenDelta) -> None:
        """Put a delta into the gateway's next message."""
        self._deltas.setdefault(gateway_id, []).append(delta)

    def flush(self) -> list[RequestId]:
        """Send what was added; return the requests whose gateway did not take it."""
        lost: list[RequestId] = []
        for gateway_id, deltas in self._deltas.items():
            message = TokensGenerated(deltas=tuple(deltas))
            if not self._links[gateway_id].try_send(message, cause="step"):
                lost += [delta.request_id for delta in deltas]
                log.error("gateway_queue_full", gateway_id=gateway_id, num_streams=len(deltas))
        self._deltas.clear()
        return lost

    def fail(
        self, gateway_id: GatewayId, request_id: RequestId, code: ErrorCode, message: str
    ) -> None:
        """Tell a gateway that a request ended with an error, after the tokens added so far."""
        self.flush()
        link = self._links.get(gateway_id)
        if link is not None:
            failed = StreamFailed(request_id=request_id, code=code, message=message[:4096])
            link.try_send(failed, cause=request_id)

    def close(self, linger_seconds: float) -> None:
        """Close all links; the last tokens get ``linger_seconds`` to leave."""
        for link in self._links.values():
            link.close(linger_seconds)
        self._links.clear()
