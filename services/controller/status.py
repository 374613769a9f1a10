"""What the operator is told about the cluster."""

from common.messages.admin import GatewayStatus, StatusReport, WorkerStatus
from services.controller.core import ControllerCore


def status_report(core: ControllerCore, now: float) -> StatusReport:
    """Return the cluster at this moment, workers and gateways by name."""
    own = core.own_time.at(now)
    is_ready, reason = core.readiness(own)
    workers = sorted(core.members.workers.values(), key=lambda worker: worker.peer.worker_id)
    gateways = sorted(core.members.gateways.values(), key=lambda gateway: gateway.hello.gateway_id)
    first = workers[0].hello if workers else None
    return StatusReport(
        is_ready=is_ready,
        reason=reason,
        model_name=first.model_name if first else "",
        model_fingerprint=first.model_fingerprint if first else "",
        uptime_seconds=max(0.0, now - core.started_at),
        num_requests=len(core.book.requests),
        policy=core.policy,
        role_control=core.roles.control,
        scenario=core.elasticity.scenario,
        workers=tuple(
            WorkerStatus(
                id=worker.peer.worker_id,
                pid=worker.peer.pid,
                host=worker.peer.host,
                epoch=worker.peer.epoch,
                role=worker.held_role,
                state=worker.state,
                heartbeat_age_seconds=max(0.0, own - worker.last_seen),
                kv=worker.kv,
                load=worker.load,
                pairs=worker.pairs,
                mode=worker.mode,
                rates=worker.rates,
                is_switching=worker.held_role is not worker.role,
                totals=worker.totals,
            )
            for worker in workers
        ),
        gateways=tuple(
            GatewayStatus(
                id=gateway.hello.gateway_id,
                pid=gateway.hello.pid,
                host=gateway.hello.host,
                url=gateway.hello.url,
                num_streams=gateway.num_streams,
                is_draining=gateway.is_draining,
            )
            for gateway in gateways
        ),
    )
