"""Elasticity: the controller says which workers load asks for, and a scaler starts and stops them.

A scaler says hello on the admin channel every second, with its budget and the workers that it
keeps, and the controller sends ``StartWorker`` and ``StopWorker``. Which worker, when, and that one
of each role stays is the controller's to decide; the budget is kept here too.
"""

import asyncio
import os
import re
from collections.abc import Callable
from typing import Protocol

import structlog

from common.config.host import host_id
from common.config.settings import Settings
from common.ids import WorkerId
from common.messages.admin import (
    AdminRefused,
    ControllerToCli,
    ScalerHello,
    StartWorker,
    StopWorker,
)
from common.messages.fields import Role
from common.transport.sockets import new_context
from services.cli.admin import AdminLink, admin_link
from services.cli.supervisor.plan import plan_worker
from services.cli.supervisor.supervisor import Supervisor

HELLO_SECONDS = 1.0
WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
"""A worker's name becomes a file's, and an argument."""

log = structlog.get_logger()


class Scaler(Protocol):
    """Starts and stops workers somewhere; the controller tells them apart by ``backend``."""

    backend: str

    def running(self) -> tuple[WorkerId, ...]:
        """Return every worker that it keeps, one that is ending until it has ended."""
        ...

    def start(self, worker_id: WorkerId, role: Role) -> str | None:
        """Start a worker, at once and without waiting for it; return why not, or None.

        The caller knows that the name is none of ``running``.
        """
        ...

    def stop(self, worker_id: WorkerId) -> None:
        """Let a worker of ``running`` end in order, for good. Idempotent."""
        ...


class ProcessScaler:
    """Workers as processes of this host beside those that the supervisor started."""

    backend = "process"

    def __init__(self, supervisor: Supervisor, *, is_combined: bool) -> None:
        """``is_combined`` says that every worker of the cluster does both roles."""
        self._supervisor = supervisor
        self._is_combined = is_combined

    def running(self) -> tuple[WorkerId, ...]:
        """Return every worker of this host, however it was started."""
        return tuple(WorkerId(name) for name in self._supervisor.worker_names)

    def start(self, worker_id: WorkerId, role: Role) -> str | None:
        """Start a process; it is started again when it fails, until it fails for good."""
        if not WORKER_NAME.fullmatch(worker_id):
            return "it is no name for a worker"
        if (role is Role.COMBINED) is not self._is_combined:
            return f"no worker of this cluster is started as {role}"
        if not self._supervisor.try_add(plan_worker(worker_id, role, is_elastic=True)):
            return "the cluster is stopping, or another process has its name"
        return None

    def stop(self, worker_id: WorkerId) -> None:
        """Send SIGTERM, and SIGKILL where that is not enough."""
        self._supervisor.remove(worker_id)


class ScalerLink:
    """Speaks for a scaler with the controller of this host, whether it is there or not yet."""

    def __init__(self, settings: Settings, scaler: Scaler, tell: Callable[[str], None]) -> None:
        """``tell`` gets one line for the operator per worker that is started or stopped."""
        self._settings = settings
        self._scaler = scaler
        self._tell = tell
        self._ending: set[WorkerId] = set()
        self._last_refusal = ""

    async def run(self) -> None:
        """Say hello and carry out what is asked, until cancelled."""
        context = new_context()
        try:
            link = admin_link(context, self._settings, f"scaler-{os.getpid()}")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat(link))
                async for received in link.received():
                    if self._carry_out(received.message):
                        self._hello(link)
        finally:
            context.destroy(linger=0)

    async def _beat(self, link: AdminLink) -> None:
        while True:
            self._hello(link)
            await asyncio.sleep(HELLO_SECONDS)

    def _hello(self, link: AdminLink) -> None:
        running = self._scaler.running()
        self._ending.intersection_update(running)
        hello = ScalerHello(
            backend=self._scaler.backend,
            host=host_id(),
            max_workers=self._settings.max_workers,
            running=running,
        )
        if not link.try_send(hello, "scaler"):
            log.debug("scaler_hello_unsent", cause="the controller takes none now")

    def _carry_out(self, order: ControllerToCli) -> bool:
        """Do what the controller asks for; tell whether the workers that run have changed."""
        match order:
            case StartWorker(worker_id=worker_id, role=role):
                return self._start(worker_id, role)
            case StopWorker(worker_id=worker_id):
                return self._stop(worker_id)
            case AdminRefused(message=message) if message != self._last_refusal:
                self._last_refusal = message
                log.warning("scaler_refused", cause="controller", reason=message)
        return False

    def _start(self, worker_id: WorkerId, role: Role) -> bool:
        running = self._scaler.running()
        if worker_id in running and worker_id not in self._ending:
            return False  # said again
        reason: str | None
        if worker_id in running:
            reason = "one of its name is ending"
        elif len(running) >= self._settings.max_workers:
            reason = f"{len(running)} workers run and max_workers is {self._settings.max_workers}"
        else:
            reason = self._scaler.start(worker_id, role)
        if reason is not None:
            log.warning("worker_not_added", cause="StartWorker", worker=worker_id, reason=reason)
            return False
        self._tell(f"starting {worker_id} under load ({role})")
        log.info("worker_added", cause="StartWorker", worker=worker_id, role=role)
        return True

    def _stop(self, worker_id: WorkerId) -> bool:
        if worker_id in self._ending or worker_id not in self._scaler.running():
            return False  # said again
        self._ending.add(worker_id)
        self._scaler.stop(worker_id)
        self._tell(f"stopping {worker_id}: load is low")
        log.info("worker_removed", cause="StopWorker", worker=worker_id)
        return True
