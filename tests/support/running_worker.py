"""A ``HybridWorker`` with a ``FakeEngine`` over real sockets, in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from common.config.host import host_id
from common.engine.fake_engine import FakeEngine
from common.engine.interface import StepRow
from common.ids import WorkerId, new_epoch
from common.kv.blocks import BlockManager
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages.codec import Codec
from common.messages.control import ControllerToWorker, WorkerHello, WorkerToController
from common.messages.fields import ExportedPool, PeerInfo, Role
from common.messages.handoff import DecodeToPrefill, PrefillToDecode
from common.messages.tokens import WorkerToGateway
from common.models.config import ModelConfig
from common.scheduler.local import LocalScheduler
from common.scheduler.steps import SchedulerLimits
from common.scheduler.swap import SwapSpace
from common.storage.codec_fp8 import FP8, Fp8Codec
from common.storage.codec_stage import CodecStage
from common.storage.host_tier import HostTier
from common.storage.interface import BlockStore, NoStore, StoreIdentity
from common.traffic.shared_link import SharedLink
from common.transfer.backend import LinkRate, PeerLink, TransferBackend, WriteReport
from common.transfer.local import LocalBackend
from common.transport.channels import CONTROL, HANDOFF, TOKENS
from common.transport.sockets import Context, DealerLink, Identity, RouterHub
from common.worker.compaction import Compactor
from common.worker.control import ControlLink
from common.worker.emitter import TokenEmitter
from common.worker.host_blocks import open_host_blocks
from common.worker.host_memory import HostMemory
from common.worker.inbound import InboundHandoffs
from common.worker.outbound import OutboundHandoffs
from common.worker.own_role import OwnRole
from common.worker.parts import Channels, WorkerParts
from common.worker.setup import HandoffSetup
from common.worker.store_access import StoreAccess
from common.worker.store_buffer import StoreBuffer
from common.worker.store_paths import PlacedTier
from common.worker.stored_blocks import StoredBlocks
from common.worker.transports import open_transports
from common.worker.worker import HybridWorker
from common.worker.worker_store import WorkerStore
from tests.support.board import Board, Gate

VOCAB_SIZE = 30_000
MODEL = "0123456789abcdef"
LAYOUT = KVLayout(num_layers=2, block_size=8, num_kv_heads=1, head_dim=4, dtype="float32")


IDENTITY = StoreIdentity(MODEL, LAYOUT.fingerprint(), LAYOUT.dtype, LAYOUT.block_bytes)

DEATH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker finds around it."""

    context: Context
    board: Board
    folder: Path
    control_endpoint: str


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker is made. ``after_write`` is told the target blocks of every write."""

    num_blocks: int = 64
    lease_seconds: float = 5.0
    max_num_batched_tokens: int = 32
    growth_tokens: int = 16
    quota_seconds: float = 0.0
    transport: str = "shm"
    max_in_flight: int = 1
    num_host_blocks: int = 0
    slow_down: float = 1.0
    after_write: Callable[[Sequence[int]], None] | None = None
    store: BlockStore | None = None
    is_keeping: bool = True
    """Whether what is computed is written to the store."""
    is_compacting: bool = False
    """Whether the pool is tidied in idle time."""
    to_preload: tuple[tuple[int, ...], ...] = ()
    """Prompts that are loaded at the start."""
    num_tier_blocks: int = 0
    """Of the host tier before the store; 0 for none."""
    num_buffer_blocks: int = 0
    """Of the buffer between store and pool; 0 for none."""
    is_prefetching: bool = True
    """Whether prefixes without room are brought into the tier, where there is one."""
    model: ModelConfig | None = None
    """Whose operations are counted, whatever is computed."""


class RunningWorker:
    """A ``HybridWorker`` with its channels. ``steps`` and ``writes`` are gates, open at first."""

    def __init__(
        self, surroundings: Surroundings, name: str, role: Role, options: WorkerOptions
    ) -> None:
        self.name = name
        self.steps = Gate(surroundings.board)
        self.writes = Gate(surroundings.board)
        self.pool = KVPool(options.num_blocks, LAYOUT.block_bytes)
        self.blocks = BlockManager(options.num_blocks, LAYOUT.block_size, 1, MODEL, None)
        self._host_blocks = open_host_blocks(
            self.pool, options.num_host_blocks * LAYOUT.block_bytes
        )
        self.copier = ThreadPoolExecutor(1, f"{name} copy")
        self._engine_thread = ThreadPoolExecutor(1, f"{name} engine")
        self.worker_store = self._open_store(options)
        self.store = StoreAccess(self.worker_store, SharedLink(0))
        self._stored = (
            None
            if options.store is None
            else StoredBlocks(
                self.store,
                self.blocks,
                LAYOUT.block_size,
                options.to_preload,
                is_prefetching=options.is_prefetching,
            )
        )
        self._transports = open_transports(self.pool, options.lease_seconds, options.transport, "")
        self._around = surroundings
        self._role = role
        self._options = options
        self._ended = asyncio.Event()
        engine = FakeEngine(
            LAYOUT,
            self.pool.buffer,
            VOCAB_SIZE,
            self._pace,
            max_in_flight=options.max_in_flight,
        )
        limits = SchedulerLimits(
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=16,
            block_size=LAYOUT.block_size,
            growth_tokens=options.growth_tokens,
            quota_seconds=options.quota_seconds,
        )
        own_pool = LocalBackend(self.pool).open_peer(self.pool.handle())
        self.hybrid = HybridWorker(
            WorkerParts(
                worker_id=WorkerId(name),
                engine=engine,
                engine_thread=self._engine_thread,
                blocks=self.blocks,
                scheduler=LocalScheduler(
                    self.blocks,
                    limits,
                    SwapSpace(self._host_blocks.num_slots),
                    is_keeping=options.store is not None and options.is_keeping,
                ),
                own_pool=own_pool,
                host_blocks=self._host_blocks,
                lease_seconds=options.lease_seconds,
                slow_down=options.slow_down,
                stored=self._stored,
                compactor=Compactor(self.blocks, own_pool, LAYOUT.block_bytes)
                if options.is_compacting
                else None,
                model=options.model,
            )
        )

    def _open_store(self, options: WorkerOptions) -> WorkerStore:
        size, tier, buffer = LAYOUT.block_bytes, None, None
        self._memories: list[HostMemory] = []
        if options.num_tier_blocks:
            memory = HostMemory(self.pool, options.num_tier_blocks * size, "tier")
            tier = PlacedTier(HostTier(memory.buffer, size), memory)
            self._memories.append(memory)
        if options.num_buffer_blocks:
            memory = HostMemory(self.pool, options.num_buffer_blocks * size, "buffer")
            buffer = StoreBuffer(memory)
            self._memories.append(memory)
        store = options.store or NoStore(IDENTITY)
        stage = CodecStage(Fp8Codec(LAYOUT)) if store.identity.codec == FP8 else None
        return WorkerStore(store, self.pool, tier, buffer, stage)

    def _pace(self, rows: Sequence[StepRow]) -> None:
        self.steps.pass_through()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve as long as the block; its end is abrupt, as a death is."""
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve())
                try:
                    yield
                finally:
                    self.steps.open()
                    self.writes.open()
                    self._ended.set()
                    await serving
        finally:
            self._engine_thread.shutdown(wait=True)
            self.copier.shutdown(wait=True)
            self.store.close()
            self._transports.close()
            self._host_blocks.close()
            for memory in self._memories:
                memory.close()
            self.pool.close()

    async def _serve(self) -> None:
        context = self._around.context
        identity = Identity(self.name, new_epoch())
        hub: RouterHub[DecodeToPrefill, PrefillToDecode] = RouterHub(
            context,
            HANDOFF,
            f"ipc://{self._around.folder}/{self.name}",
            identity,
            Codec(DecodeToPrefill),
            Codec(PrefillToDecode),
        )
        info = peer_info(self.name, self._role, identity, hub.endpoint, self._transports.names)
        hello = WorkerHello(
            peer=info,
            model_fingerprint=MODEL,
            model_name="fake",
            max_model_len=4096,
            num_blocks=self.pool.num_blocks,
            block_size=LAYOUT.block_size,
            block_bytes=LAYOUT.block_bytes,
            max_num_batched_tokens=512,
            max_num_seqs=64,
            has_store=self._stored is not None,
        )
        own = OwnRole(identity, hello)
        link: DealerLink[WorkerToController, ControllerToWorker] = DealerLink(
            context,
            CONTROL,
            self._around.control_endpoint,
            identity,
            Codec(WorkerToController),
            Codec(ControllerToWorker),
        )
        worker = self.hybrid
        codec: Codec[WorkerToGateway] = Codec(WorkerToGateway)
        emitter = TokenEmitter(
            lambda endpoint: DealerLink.to_peer(context, TOKENS, endpoint, identity, codec, codec)
        )
        async with asyncio.TaskGroup() as tasks:
            setup = HandoffSetup(
                tasks=tasks,
                copier=self.copier,
                pool=self.pool,
                exports=self._transports.exports,
                own=own,
                model_fingerprint=MODEL,
                lease_seconds=self._options.lease_seconds,
                block_size=LAYOUT.block_size,
                growth_tokens=self._options.growth_tokens,
            )
            control = ControlLink(link, own, worker.news, worker.on_order, DEATH_SECONDS)
            inbound = InboundHandoffs(
                setup,
                hub,
                self.blocks,
                worker.requests.why_refuse_reservation,
                worker.requests.on_taken_over,
                worker.requests.on_dropped,
                worker.requests.prefixes.ended,
            )
            outbound = OutboundHandoffs(
                setup,
                {
                    name: _MeddledBackend(backend, self.writes, self._options.after_write)
                    for name, backend in self._transports.backends.items()
                },
                lambda endpoint: handoff_link(context, endpoint, identity),
                worker.requests.on_handoff_ended,
            )
            worker.attach(Channels(control, emitter, inbound, outbound, own))
            running = [
                tasks.create_task(work)
                for work in (
                    control.receive(),
                    control.beat(),
                    inbound.serve(),
                    worker.run_steps(),
                    worker.tick(),
                    worker.serve_store(),
                )
            ]
            await self._ended.wait()
            link.close()
            emitter.close(0.0)
            outbound.close()
            hub.close()
            for task in running:
                task.cancel()

    @property
    def is_copying(self) -> bool:
        """Whether a write or a verification waits for the copy thread."""
        return self.copier._work_queue.qsize() > 0

    async def idle(self) -> None:
        """Wait until nothing runs and no block is held but for the cache; then check the books."""

        def is_idle() -> bool:
            counts = self.blocks.counts()
            return not (self.hybrid.is_busy or counts.referenced or counts.in_transfer)

        await self._around.board.wait_for(
            f"{self.name} is idle: {self.blocks.counts()}, busy {self.hybrid.is_busy}", is_idle
        )
        self.blocks.validate()


class _MeddledLink:
    """A link whose writes pass a gate, and after which somebody may damage what was written."""

    def __init__(
        self, link: PeerLink, gate: Gate, after_write: Callable[[Sequence[int]], None] | None
    ) -> None:
        self._link = link
        self._gate = gate
        self._after_write = after_write

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        self._gate.pass_through()
        report = self._link.write(pairs_src, pairs_dst, token)
        if self._after_write is not None:
            self._after_write(pairs_dst)
        return report

    def measure(self) -> LinkRate:
        return self._link.measure()

    def close(self) -> None:
        self._link.close()


class _MeddledBackend:
    def __init__(
        self,
        backend: TransferBackend,
        gate: Gate,
        after_write: Callable[[Sequence[int]], None] | None,
    ) -> None:
        self.name = backend.name
        self.is_networked = backend.is_networked
        self._backend = backend
        self._gate = gate
        self._after_write = after_write

    def open_peer(self, handle: ExportedPool) -> PeerLink:
        return _MeddledLink(self._backend.open_peer(handle), self._gate, self._after_write)


NO_PROCESS = 2**30
"""A process id that the kernel gives to nobody: such a peer, once buried, is dead for good."""


def peer_info(
    name: str,
    role: Role,
    identity: Identity,
    endpoint: str,
    transports: tuple[str, ...] = ("shm",),
    pid: int = NO_PROCESS,
) -> PeerInfo:
    """Return what a worker of this process tells of itself."""
    return PeerInfo(
        worker_id=WorkerId(name),
        epoch=identity.epoch,
        role=role,
        pid=pid,
        host=host_id(),
        handoff_endpoint=endpoint,
        dtype=LAYOUT.dtype,
        layout_fingerprint=LAYOUT.fingerprint(),
        transports=transports,
    )


def handoff_link(
    context: Context, endpoint: str, identity: Identity
) -> DealerLink[PrefillToDecode, DecodeToPrefill]:
    """Connect to a decode side."""
    return DealerLink.to_peer(
        context, HANDOFF, endpoint, identity, Codec(PrefillToDecode), Codec(DecodeToPrefill)
    )
