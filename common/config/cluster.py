"""Settings of how processes find, reach and watch each other, and of the folders they write."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from common.config.environment import environment
from common.config.folders import (
    MAX_RUN_DIR_BYTES,
    default_cache_dir,
    default_log_dir,
    default_run_dir,
)
from common.config.value_types import Folder


def _short_enough(path: Path) -> Path:
    size = len(str(path.absolute()).encode())
    if size > MAX_RUN_DIR_BYTES:
        raise ValueError(
            f"is {size} bytes long, over {MAX_RUN_DIR_BYTES}: the sockets in it would have paths "
            "that the kernel cuts; choose a shorter one"
        )
    return path.absolute()


def _endpoint_with_key(endpoint: str) -> str:
    if endpoint and not re.fullmatch(r"tcp://[^\s?]+:[0-9]{1,5}\?key=[0-9a-f]{64}", endpoint):
        raise ValueError(
            "is no endpoint of a controller; copy what `flowpath serve` prints on its host: "
            "tcp://address:port?key=64 hex digits"
        )
    return endpoint


class ClusterSettings(BaseModel):
    """How processes find, reach and watch each other, and the folders that they write.

    It stands beside ``ServingSettings``: folders are named after its port.
    """

    cluster_host: str = Field(
        "",
        max_length=256,
        description="This host's address for workers and gateways on other hosts; empty keeps the "
        "cluster on one host, over private socket files.",
    )
    control_port: int = Field(
        7400, ge=0, le=65535, description="TCP port of the controller where cluster_host is set."
    )
    controller: Annotated[str, AfterValidator(_endpoint_with_key)] = Field(
        "",
        max_length=512,
        description="Endpoint of a controller on another host, as `flowpath serve` prints it there "
        "(tcp://address:port?key=...).",
    )
    worker_id: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,31})?$",
        description="Name in the cluster of a worker or gateway started on its own; empty is its "
        "program's name and 0.",
    )
    keys: Folder | None = Field(
        default=None,
        description="Key folder of this host (`flowpath keygen`); needed as soon as processes talk "
        "over TCP.",
    )
    transport: Literal[
        "auto", "shm", "tcp", "cuda_ipc", "nccl", "rdma", "ranks", "layerwise", "gather_buffer"
    ] = Field(
        "auto",
        description="How KV moves between workers; auto takes the best that both sides offer. "
        "rdma needs NIXL (`.venv/bin/pip install '.[rdma]'`). layerwise and gather_buffer are what "
        "cuda_ipc is compared with.",
    )
    heartbeat_seconds: float = Field(
        0.2, ge=0.01, le=60, description="Time between heartbeats to the controller."
    )
    death_seconds: float = Field(
        1.5,
        gt=0,
        le=600,
        description="Silence after which a process is taken for dead; at least three heartbeats. "
        "One on the controller's host that still runs gets five times as long.",
    )
    lease_seconds: float = Field(
        5.0, ge=0.05, le=600, description="Lease of a handoff, renewed by both workers."
    )
    drain_seconds: float = Field(
        30.0, ge=0, le=3600, description="Time that running requests get to finish at a stop."
    )
    run_dir: Annotated[Folder, AfterValidator(_short_enough)] = Field(
        default_factory=lambda data: default_run_dir(environment, data["port"]),
        description="Folder of sockets, private to the user (mode 0700); by default in "
        "XDG_RUNTIME_DIR or the temporary folder, one per user and port.",
    )
    log_dir: Folder = Field(
        default_factory=lambda data: default_log_dir(environment, data["port"]),
        description="Folder of log files, one per process; by default flowpath/PORT in "
        "XDG_STATE_HOME or ~/.local/state.",
    )
    cache_dir: Folder = Field(
        default_factory=lambda: default_cache_dir(environment),
        description="Folder of converted models; by default flowpath in XDG_CACHE_HOME or "
        "~/.cache.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged."
    )
    log_stderr: bool = Field(
        default=False,
        description="Whether a program started on its own writes its log lines to standard error "
        "too, as containers want it.",
    )
    metrics_port_base: int = Field(
        0,
        ge=0,
        le=65000,
        description="First of the loopback ports on which each process serves its own metrics: "
        "controller, gateways, workers, in this order; 0 opens none.",
    )
