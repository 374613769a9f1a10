"""Whether a process that says hello fits the cluster."""

from common.config.host import host_name
from common.messages.control import GatewayHello, HelloRefused, WorkerHello
from services.controller.effects import PeerKey
from services.controller.limits import ControllerLimits
from services.controller.members import GatewayRecord, Members, Process, WorkerRecord


def check_worker(members: Members, sender: PeerKey, hello: WorkerHello) -> HelloRefused | None:
    """Return the refusal of a worker that differs from the live ones, or None."""
    peer = hello.peer
    if (peer.worker_id, peer.epoch) != sender:
        return _refusal("worker_id", sender[0], peer.worker_id, "hello names another process")
    if members.gateway_named(peer.worker_id) is not None:
        return _refusal("worker_id", "a free name", peer.worker_id, "a gateway has this name")
    first = next((w for key, w in members.workers.items() if key[0] != sender[0]), None)
    if first is None:
        return _check_gateways(members, hello)
    for name, expected, actual in (
        ("model_fingerprint", first.hello.model_fingerprint, hello.model_fingerprint),
        ("block_size", str(first.hello.block_size), str(hello.block_size)),
        ("dtype", first.peer.dtype, peer.dtype),
        ("layout_fingerprint", first.peer.layout_fingerprint, peer.layout_fingerprint),
    ):
        if expected != actual:
            return _refusal(name, expected, actual, _DIFFERS[name])
    return None


_DIFFERS = {
    "model_fingerprint": "serve the same model folder everywhere",
    "block_size": "start it with the same --block-size",
    "dtype": "start all workers with the same --dtype; auto is what each processor does fastest",
    "layout_fingerprint": "its version of FlowPath may be another one",
}


def check_gateway(members: Members, sender: PeerKey, hello: GatewayHello) -> HelloRefused | None:
    """Return the refusal of a gateway whose model is not the workers', or None."""
    if (hello.gateway_id, hello.epoch) != sender:
        return _refusal("gateway_id", sender[0], hello.gateway_id, "hello names another process")
    if members.worker_named(hello.gateway_id) is not None:
        return _refusal("gateway_id", "a free name", hello.gateway_id, "a worker has this name")
    first = next(iter(members.workers.values()), None)
    if first is None or first.hello.model_fingerprint == hello.model_fingerprint:
        return None
    return _refusal(
        "model_fingerprint",
        first.hello.model_fingerprint,
        hello.model_fingerprint,
        f"worker {first.peer.worker_id} serves another model",
    )


def check_name(
    holder: WorkerRecord | GatewayRecord,
    process: Process,
    limits: ControllerLimits,
    now: float,
) -> HelloRefused | None:
    """Return the refusal of a process whose name another living one holds, or None.

    The same process in a new epoch, and the successor of a silent one, take the name over. A
    holder whose process is known to be gone is no member any more.
    """
    if holder.process == process or now - holder.last_seen > limits.death_seconds:
        return None
    name, (host, pid) = holder.key[0], holder.process
    kind, field = (
        ("worker", "worker_id")
        if isinstance(holder, WorkerRecord)
        else (
            "gateway",
            "gateway_id",
        )
    )
    return HelloRefused(
        field=field,
        expected="a free name",
        actual=name,
        message=f"the name {name} is taken by {host_name(host)} pid {pid}; "
        f"give this {kind} another one with --worker-id",
        retry_seconds=limits.death_seconds,
    )


def _check_gateways(members: Members, hello: WorkerHello) -> HelloRefused | None:
    gateway = next(iter(members.gateways.values()), None)
    if gateway is None or gateway.hello.model_fingerprint == hello.model_fingerprint:
        return None
    return _refusal(
        "model_fingerprint",
        gateway.hello.model_fingerprint,
        hello.model_fingerprint,
        f"gateway {gateway.hello.gateway_id} serves another model",
    )


def _refusal(field: str, expected: str, actual: str, why: str) -> HelloRefused:
    message = f"{field} is {actual}, the cluster's is {expected}: {why}"
    return HelloRefused(
        field=field, expected=expected, actual=actual, message=message, retry_seconds=0.0
    )
