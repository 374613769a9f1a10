"""What goes into the controller's core and what comes out of it."""

from dataclasses import dataclass
from typing import Literal

from common.ids import Epoch, RequestId
from common.messages.admin import (
    ControllerToCli,
    OrderDrain,
    OrderRole,
    OrderRoles,
    ScalerHello,
)
from common.messages.codec import Received
from common.messages.control import (
    ControllerToGateway,
    ControllerToWorker,
    GatewayToController,
    WorkerToController,
)
from services.controller.standing_orders import KeptOrders

PeerKey = tuple[str, Epoch]
"""One incarnation of a worker or gateway: its id and epoch."""
ToPeer = ControllerToWorker | ControllerToGateway
FromPeer = WorkerToController | GatewayToController
Fact = tuple[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A worker or gateway sent this."""

    received: Received[FromPeer]


@dataclass(frozen=True, slots=True)
class OrderReceived:
    """The operator, or a scaler, sent this on the admin channel."""

    sender: PeerKey
    order: OrderRole | OrderRoles | OrderDrain | ScalerHello
    cause: str


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send this; comes back as ``SendFailed`` when it could not be queued."""

    peer: PeerKey
    message: ToPeer
    cause: str
    payload: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Effect: send this on the admin channel; one that has left misses it."""

    peer: PeerKey
    message: ControllerToCli
    cause: str


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The peer is not connected any more, or its queue is full; nothing was sent."""

    send: Send


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went on. ``gone_pids``: those of ``local_pids`` whose process does not run."""

    gone_pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: log one decision or fact."""

    event: str
    cause: str
    request_id: RequestId | None = None
    facts: tuple[Fact, ...] = ()
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class KeepOrders:
    """Effect: let these orders, and no others, outlive the controller."""

    orders: KeptOrders


CoreEvent = MessageReceived | OrderReceived | SendFailed | Tick
Effect = Send | Answer | Note | KeepOrders
