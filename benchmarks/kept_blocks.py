"""What it costs a decode on a CPU that its blocks are written to a store: ``store_writes``.

The default model decodes several sequences in step. Each time all have filled a block, these are
offered to a store in a folder or, every other time, are not; the steps until the next block is full
are timed. So both take turns on a machine that is never quiet. Medians of a step, of the time and
of the processor's time of all threads, with the writing.
"""

import argparse
import secrets
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from benchmarks.report import Cell, print_table, write_results
from common.config.load import load_settings
from common.engine.cpu_engine import CpuEngine
from common.engine.dtype import load_model_layout
from common.engine.interface import SampleSpec, StepRow
from common.kv.blocks import PublishedBlocks
from common.kv.pool import KVPool
from common.models.config import ModelConfig
from common.models.default_model import ensure_default_model
from common.sampling import SamplingParams
from common.storage.file_store import FileStore
from common.storage.interface import StoreIdentity
from common.storage.linked_store import LinkedStore
from common.storage.store_url import FileOptions
from common.traffic.shared_link import SharedLink
from common.worker.worker_store import WorkerStore

BLOCK_TOKENS = 16
QUEUE_BYTES = 256 * 2**20
QUEUE_DEPTH = 32
GREEDY = SamplingParams(seed=0, max_tokens=1_000_000, temperature=0.0)


class Decode:
    """Sequences that decode in step, each in blocks of its own."""

    def __init__(self, folder: Path, dtype: str, threads: int, num_rows: int, num_rounds: int):
        self.layout = load_model_layout(ModelConfig.load(folder), dtype, BLOCK_TOKENS)
        self._blocks_each = num_rounds + 1
        self.pool = KVPool(num_rows * self._blocks_each, self.layout.block_bytes)
        self._engine = CpuEngine(folder, self.layout, self.pool.buffer, threads)
        self._outputs: list[list[int]] = [[] for _ in range(num_rows)]
        self.num_tokens = 0
        self._run([list(range(100, 100 + BLOCK_TOKENS))] * num_rows)

    def fill_block(self) -> list[float]:
        """Decode until every sequence has filled one more block; return each step's seconds."""
        seconds = []
        for _ in range(BLOCK_TOKENS):
            began = time.perf_counter()
            self._run([[output[-1]] for output in self._outputs])
            seconds.append(time.perf_counter() - began)
        return seconds

    def filled(self) -> list[PublishedBlocks]:
        """Return the block that each sequence has filled last, under a new name."""
        last = self.num_tokens // BLOCK_TOKENS - 1
        ids = (row * self._blocks_each + last for row in range(len(self._outputs)))
        return [PublishedBlocks("o", (each,), (secrets.token_bytes(16),), ()) for each in ids]

    def _run(self, inputs: list[list[int]]) -> None:
        rows = [
            StepRow(
                tokens,
                self.num_tokens,
                range(row * self._blocks_each, (row + 1) * self._blocks_each),
                (SampleSpec(GREEDY, 0, (), output),),
            )
            for row, (tokens, output) in enumerate(zip(inputs, self._outputs, strict=True))
        ]
        for output, drawn in zip(self._outputs, self._engine.execute(rows), strict=True):
            output.append(drawn[0].token_id)
        self.num_tokens += len(inputs[0])


def measure(decode: Decode, store: WorkerStore, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step, by whether blocks were being kept meanwhile.

    ``processor off`` and ``processor on`` are each round's share of a step, with its writing.
    """
    path = store.open_path(LinkedStore(store.storage, SharedLink(0)))
    names = ("off", "on", "processor off", "processor on")
    steps: dict[str, list[float]] = {name: [] for name in names}

    def keep(blocks: list[PublishedBlocks]) -> int:
        return sum(path.write(held) for held in blocks)

    with ThreadPoolExecutor(1) as copier:
        for turn in range(num_rounds):
            is_kept = turn % 2 == 1
            name = "on" if is_kept else "off"
            began = time.process_time()
            copying: Future[int] | None = copier.submit(keep, decode.filled()) if is_kept else None
            steps[name] += decode.fill_block()
            if copying is not None and copying.result():
                raise RuntimeError("the store has dropped blocks")
            store.storage.flush(60.0)  # the next turn begins without this one's
            steps[f"processor {name}"].append((time.process_time() - began) / BLOCK_TOKENS)
    return steps


def main(argv: list[str]) -> int:
    """Measure, print and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", help="where the store lies; a temporary folder by default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(argv)
    model = ensure_default_model(load_settings().settings.cache_dir / "models", print)
    rows: list[dict[str, Cell]] = []
    for num_rows in options.rows:
        decode = Decode(model, options.dtype, options.threads, num_rows, options.rounds)
        identity = StoreIdentity("b", "b", options.dtype, decode.layout.block_bytes)
        with tempfile.TemporaryDirectory(prefix="fp-store-", dir=options.folder) as folder:
            file_options = FileOptions(2**40, QUEUE_BYTES, QUEUE_DEPTH)
            store = WorkerStore(FileStore(Path(folder), identity, file_options), decode.pool)
            steps = measure(decode, store, options.rounds)
            store.close()
        medians = {name: statistics.median(seconds) for name, seconds in steps.items()}
        rows.append(
            {
                "rows": num_rows,
                "block KiB": decode.layout.block_bytes // 1024,
                "blocks a step": num_rows / BLOCK_TOKENS,
                "steps": len(steps["on"]),
                **{f"ms {name}": round(median * 1e3, 2) for name, median in medians.items()},
                "on / off": round(medians["on"] / medians["off"], 3),
                "processor on / off": round(medians["processor on"] / medians["processor off"], 3),
            }
        )
    print_table(rows)
    print(f"kept as {write_results('kept_blocks', argv, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
