"""Real workers around one store, with controller and gateway played by a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from common.ids import RequestId
from common.messages.control import RequestFinished
from common.messages.fields import PhaseName, PhaseRecord, Role
from common.sampling import SamplingParams
from common.storage.file_store import FileStore
from tests.support.board import HarnessError
from tests.support.gated_store import GatedStore
from tests.support.running_worker import IDENTITY, LAYOUT, RunningWorker, WorkerOptions
from tests.support.stored_blocks import FLUSH_SECONDS, open_file_store
from tests.support.worker_harness import Harness, expected, harness

GREEDY = SamplingParams(seed=1, max_tokens=5, temperature=0)
SIZE = LAYOUT.block_size
PROMPT = tuple(range(100, 196))
"""Twelve whole blocks; the last is always computed, for its last token is."""
NUM_LOADED = len(PROMPT) - SIZE
LONGER = (*PROMPT, *range(30))
BLOCK_BYTES = LAYOUT.block_bytes
DEFAULT = WorkerOptions()


@dataclass
class Played:
    """A cluster and a folder, of which every worker opens a store of its own."""

    cluster: Harness
    folder: Path
    stores: list[FileStore]

    def open_store(self, num_queued: int = 64) -> GatedStore:
        """Open the folder once more."""
        store = open_file_store(self.folder, identity=IDENTITY, num_queued=num_queued)
        self.stores.append(store)
        return GatedStore(store, self.cluster.board)

    def flush(self) -> None:
        """Wait until every store has written what it took. HarnessError when that is late."""
        if not all(store.flush(FLUSH_SECONDS) for store in self.stores):
            raise HarnessError("a store did not write in time")

    async def start(
        self,
        name: str,
        role: Role = Role.PREFILL,
        options: WorkerOptions = DEFAULT,
    ) -> tuple[RunningWorker, GatedStore]:
        """Start a worker with a store of its own, whatever else ``options`` say."""
        store = self.open_store()
        with_store = replace(options, store=store)
        return await self.cluster.start_worker(name, role, with_store), store

    async def fill(self, prompt: tuple[int, ...] = PROMPT, request: str = "stored") -> None:
        """Let a worker compute a prompt, and wait until its blocks are stored."""
        writer, _ = await self.start(f"writer of {request}")
        self.cluster.place(request, prompt, GREEDY, prefill=f"writer of {request}", decode=None)
        await self.cluster.answer(request)
        await writer.idle()
        self.flush()

    def place(self, prompt: tuple[int, ...] = PROMPT, request: str = "r") -> None:
        """Let ``reader`` serve a prompt of which the store has all whole blocks."""
        num_stored = len(prompt) // SIZE * SIZE
        self.cluster.place(
            request, prompt, GREEDY, prefill="reader", decode=None, num_stored_tokens=num_stored
        )

    async def answered(self, prompt: tuple[int, ...] = PROMPT, request: str = "r") -> None:
        """Wait for the answer of ``reader``; HarnessError where it is another one."""
        answer = (await self.cluster.answer(request)).token_ids(0)
        if answer != expected(prompt, GREEDY):
            raise HarnessError(f"{request}: {answer} is not what the prompt gives")
        await self.cluster.heard("reader", RequestFinished, request)

    def phase(self, name: PhaseName, request: str = "r") -> PhaseRecord:
        """Return a request's phase of this name; HarnessError unless there is exactly one."""
        found = [p for p in self.cluster.streams[RequestId(request)].phases if p.name is name]
        if len(found) != 1:
            raise HarnessError(f"{request} has {len(found)} phases {name}")
        return found[0]


@asynccontextmanager
async def playing(tmp_path: Path) -> AsyncIterator[Played]:
    """Play around a folder that is empty at first."""
    stores: list[FileStore] = []
    try:
        async with harness(tmp_path) as cluster:
            yield Played(cluster, tmp_path / "store", stores)
    finally:
        for store in stores:
            store.close()


def value(worker: RunningWorker, sample: str, **labels: str) -> float:
    """Return a sample of a worker's metrics, without ``flowpath_``; 0 where there is none."""
    worker.hybrid.heartbeat()  # what the store has counted is taken with one
    registry = worker.hybrid.metrics.registry
    return registry.get_sample_value(f"flowpath_{sample}", labels) or 0.0


def num_computed(worker: RunningWorker, num_requests: int = 1) -> int:
    """Return how many prompt tokens a worker has computed."""
    num_drawn_later = num_requests * (GREEDY.max_tokens - 1)
    return int(value(worker, "engine_step_tokens_sum")) - num_drawn_later
