"""The admin conversation: the operator's CLI (DEALER) with the controller (ROUTER)."""

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
    Name,
    Pairs,
    Role,
    Seconds,
    Text,
    WorkerLoad,
    WorkerState,
)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class GetStatus:
    """CLI → controller: tell the cluster's state. A repeat is safe."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class WorkerStatus:
    """One worker as its last heartbeat told it. ``kv`` and ``load`` are None before the first.

    ``pairs`` are a prefill worker's, with the decode workers that it knows.
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
    workers: Annotated[tuple[WorkerStatus, ...], Field(max_length=4096)]
    gateways: Annotated[tuple[GatewayStatus, ...], Field(max_length=4096)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRUCT)
class AdminRefused:
    """Controller → CLI: the command was not carried out, and why."""

    command: Name
    message: Text


CliToController = GetStatus
ControllerToCli = StatusReport | AdminRefused
