"""The controller's shell: sockets, clock and log around the core; it decides nothing."""

import asyncio
import time
from collections import deque

import structlog

from common.config.processes import ProcessWatch
from common.config.settings import Settings
from common.errors import RemoteProtocolError
from common.ids import new_epoch
from common.messages.admin import (
    CliToController,
    ControllerToCli,
    GetStatus,
)
from common.messages.codec import Codec, Received
from common.messages.control import (
    ControllerToGateway,
    ControllerToWorker,
    GatewayHello,
    GatewayToController,
    RequestFailed,
    RequestPlaced,
    RequestRefused,
    WorkerHello,
    WorkerToController,
)
from common.telemetry.exposition import metrics_served
from common.telemetry.metrics import ControllerMetrics
from common.transport.addresses import load_keys
from common.transport.channels import ADMIN, CONTROL
from common.transport.sockets import Identity, RouterHub, new_context
from services.controller.core import ControllerCore
from services.controller.effects import (
    Answer,
    CoreEvent,
    FromPeer,
    KeepOrders,
    MessageReceived,
    Note,
    OrderReceived,
    Send,
    SendFailed,
    Tick,
    ToPeer,
)
from services.controller.limits import ControllerLimits
from services.controller.orders_file import OrdersFile
from services.controller.snapshot import Snapshots
from services.controller.standing_orders import NO_ORDERS
from services.controller.status import status_report

TICK_SECONDS = 0.1

log = structlog.get_logger()


class ControllerServer:
    """One controller with its sockets bound in ``run_dir``; made inside the running loop.

    Raises ConfigError when a socket cannot be bound.
    """

    def __init__(self, settings: Settings, host: str) -> None:
        self._orders_file = OrdersFile(settings.run_dir)
        kept = self._orders_file.read()
        self.core = ControllerCore(ControllerLimits.of(settings), host, time.monotonic(), kept)
        self.metrics = ControllerMetrics()
        self._snapshots = Snapshots(self.metrics)
        self._metrics_port = settings.metrics_port("controller")
        self._watch = ProcessWatch()
        self._stopped = asyncio.Event()
        self._context = new_context(load_keys(settings))
        identity = Identity("controller", new_epoch())
        self._control = RouterHub[ToPeer, FromPeer](
            self._context,
            CONTROL,
            settings.control_address,
            identity,
            Codec(ControllerToWorker | ControllerToGateway),
            Codec(WorkerToController | GatewayToController),
        )
        self._admin = RouterHub[ControllerToCli, CliToController](
            self._context,
            ADMIN,
            settings.admin_endpoint,
            identity,
            Codec(ControllerToCli),
            Codec(CliToController),
        )

    def stop(self) -> None:
        """Let ``serve`` return."""
        self._stopped.set()

    async def serve(self) -> None:
        """Work until ``stop``; then close the sockets and remove their files."""
        log.info("controller_started", cause="start")
        if self._control.endpoint.startswith("tcp://"):
            log.info("joinable", controller=self._control.endpoint)
        try:
            with metrics_served(self.metrics.registry, self._metrics_port):
                await self._serve()
        finally:
            self._close()
            self._context.destroy(linger=0)
            log.info("controller_stopped", cause="stop")

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive_control())
            tasks.create_task(self._receive_admin())
            tasks.create_task(self._tick())
            await self._stopped.wait()
            self._close()
            if not self.core.members.workers:  # the cluster has ended, and its orders with it
                self._orders_file.write(NO_ORDERS)

    def _close(self) -> None:
        self._control.close()
        self._admin.close()

    async def _receive_control(self) -> None:
        async for received in self._control.received():
            envelope = received.envelope
            is_hello = isinstance(received.message, WorkerHello | GatewayHello)
            if is_hello and not self.core.members.is_member((envelope.sender, envelope.epoch)):
                self._look_at_processes()  # a name is free once its holder's process is gone
            self._handle(MessageReceived(received))

    async def _receive_admin(self) -> None:
        def refuse(peer: bytes, error: RemoteProtocolError) -> None:
            log.warning("admin_refused", cause=repr(peer), reason=str(error))

        async for received in self._admin.received(refuse):
            self._answer(received)

    def _answer(self, received: Received[CliToController]) -> None:
        envelope, order = received.envelope, received.message
        sender, cause = (
            (envelope.sender, envelope.epoch),
            f"{type(order).__name__} {envelope.sender}",
        )
        if isinstance(order, GetStatus):
            self._tell(Answer(sender, status_report(self.core, time.monotonic()), cause))
        else:
            self._handle(OrderReceived(sender, order, cause))

    def _tell(self, answer: Answer) -> None:
        if not self._admin.try_send(answer.peer, answer.message, answer.cause):
            log.info("admin_left", cause=answer.cause)

    async def _tick(self) -> None:
        while not self._stopped.is_set():
            self._look_at_processes()
            if self._metrics_port is not None:
                report = status_report(self.core, time.monotonic())
                self._snapshots.take(report, self.core.book.count_phases())
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._stopped.wait()
            except TimeoutError:
                continue

    def _look_at_processes(self) -> None:
        self._handle(Tick(self._watch.gone_of(self.core.members.local_pids())))

    def _handle(self, event: CoreEvent) -> None:
        """Hand one event to the core and carry its effects out, those of their failures too."""
        events: deque[CoreEvent] = deque([event])
        while events:
            for effect in self.core.handle(events.popleft(), time.monotonic()):
                match effect:
                    case Note():
                        _write(effect)
                        self._count_note(effect)
                    case Answer():
                        self._tell(effect)
                    case KeepOrders(orders):
                        self._orders_file.write(orders)
                    case Send(peer, message, cause, payload):
                        self._count(message)
                        if not self._control.try_send(peer, message, cause, payload):
                            events.append(SendFailed(effect))

    def _count(self, message: ToPeer) -> None:
        match message:
            case RequestPlaced():
                self.metrics.placements.inc()
            case RequestRefused():
                self.metrics.refusals.labels(message.code).inc()
            case RequestFailed():
                self.metrics.failures.labels(message.code).inc()
            case _:
                return

    def _count_note(self, note: Note) -> None:
        match note.event:
            case "role_switched":
                self.metrics.role_switches.inc()
            case "migration_started" | "migration_failed":
                self.metrics.migrations.labels(note.event.removeprefix("migration_")).inc()
            case "replica_ordered" | "replica_held" | "replica_failed":
                self.metrics.replicas.labels(note.event.removeprefix("replica_")).inc()
            case "worker_asked_for" | "worker_stopped":
                self.metrics.scale_events.labels(note.event.removeprefix("worker_")).inc()
            case _:
                return


def _write(note: Note) -> None:
    facts = dict(note.facts)
    if note.request_id is not None:
        facts = {"request_id": note.request_id, **facts}
    log.log(_LEVELS[note.level], note.event, cause=note.cause, **facts)


_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
