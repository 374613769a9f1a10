"""A worker's process: from settings to a running worker, and in order back to nothing."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import structlog
import uvloop

from common.config.folders import prepare_run_dir
from common.config.host import host_id
from common.config.preload_file import Prompts
from common.config.settings import Settings
from common.engine.failure import EngineBroken
from common.errors import ConfigError, ErrorCode
from common.ids import WorkerId, new_epoch
from common.kv.blocks import BlockManager
from common.kv.journal import AllocOp, JournalWriter
from common.messages.codec import Codec
from common.messages.control import ControllerToWorker, WorkerHello, WorkerToController
from common.messages.fields import PeerInfo, Role
from common.messages.handoff import DecodeToPrefill, PrefillToDecode
from common.messages.tokens import WorkerToGateway
from common.scheduler.local import LocalScheduler
from common.scheduler.modes import Triggers
from common.scheduler.steps import SchedulerLimits
from common.scheduler.swap import SwapSpace
from common.telemetry.exposition import metrics_served
from common.telemetry.logging import configure_logging
from common.traffic.shared_link import SharedLink
from common.transfer.limited import limit_backends
from common.transfer.local import LocalBackend
from common.transport.addresses import check_network, controller_endpoint, load_keys
from common.transport.channels import CONTROL, HANDOFF, TOKENS
from common.transport.sockets import Context, DealerLink, Identity, RouterHub, new_context
from common.worker.compaction import Compactor
from common.worker.control import ControlLink, WasFenced
from common.worker.emitter import TokenEmitter
from common.worker.inbound import InboundHandoffs
from common.worker.machine import Machine, build_machine
from common.worker.outbound import OutboundHandoffs
from common.worker.own_role import OwnRole
from common.worker.parts import Channels, WorkerParts
from common.worker.preload import prompts_to_preload
from common.worker.setup import HandoffSetup
from common.worker.store_access import StoreAccess
from common.worker.store_setup import worker_store
from common.worker.stored_blocks import StoredBlocks
from common.worker.transports import Transports, open_transports
from common.worker.worker import HybridWorker
from common.worker.worker_store import WorkerStore

log = structlog.get_logger()

GROWTH_BLOCKS = 4
"""Blocks for output that an admission asks for beside the prompt; more comes one by one."""

JOURNAL_MAX_BYTES = 256 * 1024 * 1024
LAST_WORDS_SECONDS = 0.5
STEP_END_SECONDS = 5.0
"""How long a worker that ends waits for its last step where the engine can be broken off."""
MAX_SEGMENT_SHARE = 16
"""SEGMENT_MIN_SIZE is capped at this fraction of a small pool (1 / 16)."""


def run(settings: Settings, role: Role, worker_id: str) -> int:
    """Serve as one worker until SIGTERM or SIGINT; return the exit code.

    It is 1 where the engine broke. ConfigError when settings, model or memory do not allow it, or
    the controller refuses us.
    """
    file = configure_logging(
        worker_id, settings.log_dir, settings.log_level, to_stderr=settings.log_stderr
    )
    try:
        prepare_run_dir(settings.run_dir)
        check_network(settings)
        settings.refuse_without_store()
        to_preload = prompts_to_preload(settings)
        with (
            closing(build_machine(settings, worker_id, role)) as machine,
            worker_store(settings, machine) as store,
        ):
            gc.freeze()
            while True:
                incarnation = _Incarnation(
                    settings, role, WorkerId(worker_id), machine, store, to_preload
                )
                if not uvloop.run(incarnation.live()):
                    return 0
                role = incarnation.role
    except ConfigError as error:
        log.error("cannot_serve", reason=str(error))  # told, not traced
        raise
    except EngineBroken as error:
        # Whoever waits for this worker learns of its death, and goes on elsewhere.
        log.critical("cannot_go_on", reason=str(error))
        sys.stderr.write(f"flowpath {worker_id}: {error}\n")
        return 1
    finally:
        file.close()


def _is_idle(engine_thread: ThreadPoolExecutor) -> bool:
    """Wait for the step in flight, if there is one, for some time."""
    try:
        engine_thread.submit(lambda: None).result(STEP_END_SECONDS)
    except TimeoutError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Hands:
    """What an incarnation works with: threads for steps and copies, and its ways to peers."""

    engine_thread: ThreadPoolExecutor
    copier: ThreadPoolExecutor
    transports: Transports
    fabric: SharedLink
    store: StoreAccess | None


class _Incarnation:
    """One life of a worker in the cluster, with an epoch of its own.

    ``role`` is the one that it begins with, and after its end the one that it had last.
    """

    def __init__(
        self,
        settings: Settings,
        role: Role,
        worker_id: WorkerId,
        machine: Machine,
        store: WorkerStore | None,
        to_preload: Prompts,
    ) -> None:
        self._settings = settings
        self.role = role
        self._id = worker_id
        self._machine = machine
        self._store = store
        self._to_preload = to_preload
        self._identity = Identity(worker_id, new_epoch())
        self._stop = asyncio.Event()
        self._journal: JournalWriter | None = None

    async def live(self) -> bool:
        """Serve until told to stop (False) or fenced (True)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        context = new_context(load_keys(self._settings))
        engine_thread = ThreadPoolExecutor(1, "engine")
        copier = ThreadPoolExecutor(1, "copy")
        settings = self._settings
        transports = open_transports(
            self._machine.pool,
            settings.lease_seconds,
            settings.transport,
            settings.cluster_host,
            layout=self._machine.layout,
            is_mixed=settings.layer_ring > 0 and bool(self._machine.devices),
        )
        fabric = SharedLink(settings.emulated_fabric_bandwidth)
        store = self._store_access()
        is_fenced = False
        try:
            async with asyncio.TaskGroup() as tasks:
                hands = _Hands(engine_thread, copier, transports, fabric, store)
                await self._serve(tasks, context, hands)
        except* WasFenced as group:
            is_fenced = True
            log.warning("fenced", reason=str(group.exceptions[0]))
        except* _Stopped:
            log.info("stopped")
        except* (ConfigError, EngineBroken) as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        finally:
            # Steps and writes end before the pool can be used by another incarnation.
            fabric.lift()
            fabric.wait_idle(settings.lease_seconds)
            if not _is_idle(engine_thread):
                self._machine.give_up_step(f"a step does not end within {STEP_END_SECONDS:g} s")
            engine_thread.shutdown(wait=True)
            copier.shutdown(wait=True)
            if store is not None:
                store.close()
            transports.close()
            context.destroy(linger=int(LAST_WORDS_SECONDS * 1000))
            if self._journal is not None:
                self._journal.close()
        return is_fenced

    async def _serve(
        self,
        tasks: asyncio.TaskGroup,
        context: Context,
        hands: "_Hands",
    ) -> None:
        settings, machine = self._settings, self._machine
        hub: RouterHub[DecodeToPrefill, PrefillToDecode] = RouterHub(
            context,
            HANDOFF,
            self._handoff_endpoint(),
            self._identity,
            Codec(DecodeToPrefill),
            Codec(PrefillToDecode),
        )
        hello = self._hello(hub.endpoint, hands.transports.names)
        own = OwnRole(self._identity, hello)
        blocks = self._blocks(hello)
        limits = SchedulerLimits(
            max_num_batched_tokens=machine.max_num_batched_tokens,
            max_num_seqs=machine.max_num_seqs,
            block_size=settings.block_size,
            growth_tokens=GROWTH_BLOCKS * settings.block_size,
            quota_seconds=settings.compute_quota / 1000,
        )
        own_pool = LocalBackend(machine.pool).open_peer(machine.pool.handle())
        worker = HybridWorker(
            WorkerParts(
                worker_id=self._id,
                engine=machine.engine,
                engine_thread=hands.engine_thread,
                blocks=blocks,
                scheduler=self._scheduler(blocks, limits),
                stored=None
                if hands.store is None
                else StoredBlocks(
                    hands.store,
                    blocks,
                    settings.block_size,
                    self._to_preload,
                    is_prefetching=settings.store_prefetch,
                ),
                own_pool=own_pool,
                host_blocks=machine.host_blocks,
                lease_seconds=settings.lease_seconds,
                slow_down=settings.slow_down,
                compactor=Compactor(blocks, own_pool, machine.layout.block_bytes)
                if settings.defragment
                else None,
                why_broken=machine.why_broken,
                model=machine.config,
            )
        )
        setup = HandoffSetup(
            tasks=tasks,
            copier=hands.copier,
            pool=machine.pool,
            exports=hands.transports.exports,
            own=own,
            model_fingerprint=hello.model_fingerprint,
            lease_seconds=settings.lease_seconds,
            block_size=settings.block_size,
            growth_tokens=limits.growth_tokens,
        )
        link: DealerLink[WorkerToController, ControllerToWorker] = DealerLink(
            context,
            CONTROL,
            controller_endpoint(settings, context.keys),
            self._identity,
            Codec(WorkerToController),
            Codec(ControllerToWorker),
        )
        control = ControlLink(link, own, worker.news, worker.on_order, settings.death_seconds)
        emitter = TokenEmitter(self._connector(context))
        inbound = InboundHandoffs(
            setup,
            hub,
            blocks,
            worker.requests.why_refuse_reservation,
            worker.requests.on_taken_over,
            worker.requests.on_dropped,
            worker.requests.prefixes.ended,
        )
        outbound = OutboundHandoffs(
            setup,
            limit_backends(hands.transports.backends, hands.fabric),
            self._handoff_connector(context),
            worker.requests.on_handoff_ended,
        )
        worker.attach(Channels(control, emitter, inbound, outbound, own))
        with metrics_served(worker.metrics.registry, settings.metrics_port(self._id)):
            try:
                tasks.create_task(control.receive(), name="control")
                tasks.create_task(control.beat(), name="heartbeat")
                tasks.create_task(inbound.serve(), name="handoff")
                tasks.create_task(worker.run_steps(), name="steps")
                tasks.create_task(worker.tick(), name="tick")
                tasks.create_task(worker.serve_store(), name="store")
                await self._stop.wait()
                await worker.drain(settings.drain_seconds)
                worker.abandon(ErrorCode.SHUTTING_DOWN, f"{self._id} shut down")
                control.leave("shut down")
                emitter.close(LAST_WORDS_SECONDS)
                raise _Stopped
            finally:
                self.role = own.role
                link.close(LAST_WORDS_SECONDS)
                outbound.close()
                hub.close()

    def _hello(self, endpoint: str, transports: tuple[str, ...]) -> WorkerHello:
        machine = self._machine
        peer = PeerInfo(
            worker_id=self._id,
            epoch=self._identity.epoch,
            role=self.role,
            pid=os.getpid(),
            host=host_id(),
            handoff_endpoint=endpoint,
            dtype=machine.layout.element_dtype,
            layout_fingerprint=machine.layout.fingerprint(),
            transports=transports,
        )
        return WorkerHello(
            peer=peer,
            model_fingerprint=machine.model_fingerprint,
            model_name=self._settings.model_name,
            max_model_len=self._settings.max_model_len or machine.config.max_model_len,
            num_blocks=machine.pool.num_blocks,
            block_size=machine.layout.block_size,
            block_bytes=machine.layout.block_bytes,
            max_num_batched_tokens=machine.max_num_batched_tokens,
            max_num_seqs=machine.max_num_seqs,
            has_store=self._settings.has_store,
            devices=machine.devices,
        )

    def _store_access(self) -> StoreAccess | None:
        if self._store is None:
            return None
        return StoreAccess(self._store, SharedLink(self._settings.emulated_store_bandwidth))

    def _scheduler(self, blocks: BlockManager, limits: SchedulerLimits) -> LocalScheduler:
        settings = self._settings
        triggers = Triggers(
            prefill_threshold=settings.prefill_threshold,
            decode_sla_seconds=settings.decode_sla / 1000,
        )
        swap = SwapSpace(self._machine.host_blocks.num_slots)
        is_keeping = settings.has_store and settings.store_writes
        return LocalScheduler(blocks, limits, swap, triggers, is_keeping=is_keeping)

    def _blocks(self, hello: WorkerHello) -> BlockManager:
        journal: Callable[[AllocOp], None] | None = None
        if self._settings.debug_alloc:
            path = self._settings.log_dir / f"{self._id}.alloc.jsonl"
            self._journal = JournalWriter(path, JOURNAL_MAX_BYTES)
            journal = self._journal.write
        wanted = self._settings.segment_min_size // self._machine.layout.block_bytes
        capped = min(wanted, hello.num_blocks // MAX_SEGMENT_SHARE)
        return BlockManager(
            hello.num_blocks, hello.block_size, capped, hello.model_fingerprint, journal
        )

    def _handoff_endpoint(self) -> str:
        """Return an endpoint of this incarnation's own, after removing those of dead ones."""
        for stale in self._settings.run_dir.glob(f"{self._id}.*.handoff"):
            stale.unlink(missing_ok=True)
        name = f"{self._id}.{self._identity.epoch & 0xFFFFFFFF:08x}.handoff"
        return self._settings.socket_address(name)

    def _connector(
        self, context: Context
    ) -> Callable[[str], DealerLink[WorkerToGateway, WorkerToGateway]]:
        codec: Codec[WorkerToGateway] = Codec(WorkerToGateway)
        return lambda endpoint: DealerLink.to_peer(
            context, TOKENS, endpoint, self._identity, codec, codec
        )

    def _handoff_connector(
        self, context: Context
    ) -> Callable[[str], DealerLink[PrefillToDecode, DecodeToPrefill]]:
        outgoing: Codec[PrefillToDecode] = Codec(PrefillToDecode)
        incoming: Codec[DecodeToPrefill] = Codec(DecodeToPrefill)
        return lambda endpoint: DealerLink.to_peer(
            context, HANDOFF, endpoint, self._identity, outgoing, incoming
        )


class _Stopped(Exception):  # noqa: N818  # an outcome, not an error
    """The drain is over; every task ends."""
