"""The admin conversation: the operator's CLI and scalers (DEALER) with the controller (ROUTER)."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from common.ids import GatewayId, WorkerId
from common.messages.fields import (
    STRUCT,
    Count,
    EpochNumber,
    Flag,
    KVCounts,
    Mode,
    Name,
    Pairs,
    Role,
    Seconds,
    Text,
    WorkerLoad,
    WorkerRates,
    WorkerState,
    WorkerTotals,
)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class GetStatus:
    """CLI → controller: tell the cluster's state. A repeat is safe."""


class RoleControl(StrEnum):
    """Who gives the workers their roles."""

    AUTO = "auto"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class OrderRole:
    """CLI → controller: let a worker take a role. Answered by ``OrderDone`` or refused."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class OrderRoles:
    """CLI → controller: let the controller give roles, or only the operator. Idempotent."""

    control: RoleControl


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class OrderDrain:
    """CLI → controller: let a worker take no new work and move its decodes away, or undo that."""

    worker_id: WorkerId
    is_draining: Flag


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class OrderDone:
    """Controller → CLI: the command is under way, or was so already; ``status`` shows the rest."""

    message: Text


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class ScalerHello:
    """Scaler → controller, every second: it can start and stop workers on ``host``.

    ``running`` are the workers that it keeps. ``max_workers`` is its budget. The controller answers
    nothing, but sends ``StartWorker`` and ``StopWorker`` when load asks for them.
    """

    backend: Name
    host: Name
    max_workers: Count
    running: Annotated[tuple[WorkerId, ...], Field(max_length=4096)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class StartWorker:
    """Controller → scaler: start a worker of this name in this role. Idempotent."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class StopWorker:
    """Controller → scaler: end this worker for good; it is drained. Idempotent."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class WorkerStatus:
    """One worker as its last heartbeat told it. ``kv`` and ``load`` are None before the first.

    ``pairs`` are a prefill worker's, with the decode workers that it knows. ``role`` is the one it
    says it has; while ``is_switching`` it was told another one.
    """

    id: WorkerId
    pid: Count
    host: Name
    epoch: EpochNumber
    role: Role
    state: WorkerState
    heartbeat_age_seconds: Seconds
    kv: KVCounts | None
    load: WorkerLoad | None
    pairs: Pairs
    mode: Mode
    rates: WorkerRates | None
    is_switching: Flag = False
    totals: WorkerTotals | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class GatewayStatus:
    """One gateway as its last heartbeat told it."""

    id: GatewayId
    pid: Count
    host: Name
    url: Text
    num_streams: Count
    is_draining: Flag


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class StatusReport:
    """Controller → CLI: the cluster at this moment."""

    is_ready: Flag
    reason: Text
    model_name: Text
    model_fingerprint: Text
    uptime_seconds: Seconds
    num_requests: Count
    policy: Name
    role_control: RoleControl
    scenario: Name
    workers: Annotated[tuple[WorkerStatus, ...], Field(max_length=4096)]
    gateways: Annotated[tuple[GatewayStatus, ...], Field(max_length=4096)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class AdminRefused:
    """Controller → CLI: the command was not carried out, and why."""

    command: Name
    message: Text


CliToController = GetStatus | OrderRole | OrderRoles | OrderDrain | ScalerHello
ControllerToCli = StatusReport | AdminRefused | OrderDone | StartWorker | StopWorker
