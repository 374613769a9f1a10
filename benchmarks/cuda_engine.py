"""The CUDA engine alone, in the shape of Llama-3.1-8B with random weights.

Prefills are one step each. ``alone`` is the time from launch to collect with nothing else to do;
``steady`` is the time of a step when the next is always launched before the last is collected, and
``host`` the part of it that the host spends in ``launch``. ``replay`` is a decode graph again and
again without a host. Milliseconds, medians.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.attention_variants import Setting, decode_variants, prefill_variants
from benchmarks.dummy_model import write_dummy_model
from benchmarks.report import Cell, print_table, write_results
from common.engine.cuda.engine import CudaEngine, CudaStep
from common.engine.cuda.kernels import pool_view
from common.engine.cuda.memory import activation_bytes
from common.engine.cuda.model import DTYPES, CudaModel
from common.engine.cuda.profiling import profile_kernels
from common.engine.interface import PendingToken, SampleSpec, StepRow
from common.kv.layout import KVLayout
from common.models.config import ModelConfig
from common.sampling import SamplingParams

BLOCK_SIZE = 64
NUM_BLOCKS = 5400
MAX_TOKENS = 10_240
MAX_SEQS = 256
PREFILLS = {1024: 25.0, 5120: 128.0, 10240: 270.0}
DECODES: dict[tuple[int, int], float | None] = {
    (1, 1024): 4.6,
    (1, 10240): None,
    (32, 1152): None,
    (64, 5200): None,
    (128, 1152): None,
    (256, 1152): 16.0,
}
NUM_PREFILLS = 7
NUM_DECODES = 60
NUM_REPLAYS = 20
SKIPPED_DECODES = 10
GREEDY = SamplingParams(seed=0, max_tokens=1_000_000, temperature=0.0)
SAMPLED = SamplingParams(seed=1, max_tokens=1_000_000, temperature=0.8, top_p=0.95)
TOP_KERNELS = 25


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine over a pool whose blocks are given out in random order."""

    engine: CudaEngine
    order: list[int]
    view: torch.Tensor

    def table(self, first_token: int, num_tokens: int) -> tuple[int, ...]:
        """Return blocks for ``num_tokens`` tokens, ``first_token`` tokens into the order."""
        first = -(-first_token // BLOCK_SIZE)
        return tuple(self.order[first : first + -(-num_tokens // BLOCK_SIZE)])


def build(device: torch.device, dtype: str, num_blocks: int, *, use_graphs: bool) -> Bench:
    """Return an engine with random weights over a pool of random numbers."""
    with tempfile.TemporaryDirectory() as folder:
        write_dummy_model(Path(folder), "llama-8b")
        config = ModelConfig.load(Path(folder))
        model = CudaModel.load(config, dtype, device, "dummy")
    layout = KVLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
    before = torch.cuda.memory_allocated()
    pool = torch.empty((num_blocks + 1) * layout.block_bytes, dtype=torch.uint8, device=device)
    view = pool_view(pool, layout)
    view.normal_()
    begin = time.monotonic()
    bound = activation_bytes(config, MAX_TOKENS, MAX_SEQS, dtype)
    engine = CudaEngine(
        model,
        layout,
        pool,
        num_blocks,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        use_graphs=use_graphs,
        tell=lambda line: print(f"{time.monotonic() - begin:7.1f} s  {line}", flush=True),
    )
    used = torch.cuda.memory_reserved() - before - pool.numel()
    print(f"engine memory {used / 2**30:.2f} GiB, bound {bound / 2**30:.2f} GiB", flush=True)
    order = np.random.default_rng(0).permutation(num_blocks).tolist()
    return Bench(engine, order, view)


def prefill_rows(bench: Bench, count: int) -> list[StepRow]:
    ids = np.random.default_rng(count).integers(0, 128_000, count).tolist()
    return [StepRow(tuple(ids), 0, bench.table(0, count), (SampleSpec(GREEDY, 0, (), ()),))]


def decode_rows(
    bench: Bench, batch: int, context: int, params: SamplingParams, at: int, pending: int | None
) -> list[StepRow]:
    """Return the rows of step ``at`` at a context that grows from ``context``."""
    room = context + NUM_DECODES + 1
    stride = -(-room // BLOCK_SIZE) * BLOCK_SIZE
    if batch * stride > len(bench.order) * BLOCK_SIZE:
        stride = -(-context // BLOCK_SIZE) * BLOCK_SIZE
        at = 0
        room = context
    return [
        StepRow(
            (7,),
            context - 1 + at,
            bench.table(row * stride, room),
            (SampleSpec(params, 0, (), (), at),),
            None if pending is None else PendingToken(pending, row),
        )
        for row in range(batch)
    ]


def _same(rows: Sequence[StepRow], _at: int, _pending: int | None) -> Sequence[StepRow]:
    return rows


def measure_alone(bench: Bench, rows: Sequence[StepRow], count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        bench.engine.execute(rows)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:]) * 1e3


def measure_steady(
    bench: Bench, make: Callable[[int, int | None], Sequence[StepRow]], count: int, skipped: int
) -> tuple[float, float]:
    """Return (milliseconds a step, milliseconds of the host in launch)."""
    engine = bench.engine
    flying: list[CudaStep] = []
    times, hosts = [], []
    last = time.perf_counter()
    for at in range(count):
        rows = make(at, flying[-1].number if flying else None)
        flying.append(engine.launch(rows))
        hosts.append(engine.last_launch_seconds)
        if len(flying) > 1:
            engine.collect(flying.pop(0))
            now = time.perf_counter()
            times.append(now - last)
            last = now
    engine.collect(flying.pop())
    return statistics.median(times[skipped:]) * 1e3, statistics.median(hosts[skipped:]) * 1e3


def bench_prefills(bench: Bench) -> list[dict[str, Cell]]:
    found: list[dict[str, Cell]] = []
    for count, target in PREFILLS.items():
        rows = prefill_rows(bench, count)
        alone = measure_alone(bench, rows, NUM_PREFILLS)
        steady, host = measure_steady(bench, partial(_same, rows), NUM_PREFILLS, 2)
        found.append(_row("prefill", 1, count, (alone, steady, host), target))
        found[-1]["replay_ms"] = ""
        print_table(found[-1:])
    return found


def bench_decodes(bench: Bench, params: SamplingParams, name: str) -> list[dict[str, Cell]]:
    found: list[dict[str, Cell]] = []
    for (batch, context), target in DECODES.items():
        rows = decode_rows(bench, batch, context, params, 0, None)
        alone = measure_alone(bench, rows, 20)
        steady, host = measure_steady(
            bench,
            partial(decode_rows, bench, batch, context, params),
            NUM_DECODES,
            SKIPPED_DECODES,
        )
        aim = target if params is GREEDY else None
        found.append(_row(name, batch, context, (alone, steady, host), aim))
        found[-1]["replay_ms"] = replay_ms(bench, batch) or ""
        print_table(found[-1:])
    return found


def replay_ms(bench: Bench, batch: int) -> float | None:
    """Return the device's time of the decode graph that ran last, again and again without a host.

    None without graphs.
    """
    graphs = bench.engine._runner._graphs  # noqa: SLF001 - what the engine itself does not offer
    if graphs is None:
        return None
    size = min(size for size in graphs._graphs if size >= batch)  # noqa: SLF001
    graph = graphs._graphs[size].graph  # noqa: SLF001
    # torch's own stubs leave events without types.
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    begin.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / NUM_REPLAYS


def _row(
    kind: str,
    batch: int,
    context: int,
    times: tuple[float, float, float],
    target: float | None,
) -> dict[str, Cell]:
    alone, steady, host = times
    return {
        "kind": kind,
        "batch": batch,
        "context": context,
        "alone_ms": alone,
        "steady_ms": steady,
        "host_ms": host,
        "target_ms": target or "",
        "is_met": target is None or steady <= target,
    }


def print_profiles(bench: Bench) -> None:
    works = {
        "prefill 10240": prefill_rows(bench, 10_240),
        "decode 1 x 1024": decode_rows(bench, 1, 1024, GREEDY, 0, None),
        "decode 256 x 1152": decode_rows(bench, 256, 1152, GREEDY, 0, None),
    }
    for name, rows in works.items():
        kernels = profile_kernels(partial(bench.engine.execute, rows))
        total = sum(kernel.seconds for kernel in kernels)
        print(f"\n{name}: {total * 1e3:.2f} ms on the device")
        for kernel in kernels[:TOP_KERNELS]:
            share = kernel.seconds / total
            print(
                f"{kernel.seconds * 1e3:9.3f} ms {share:6.1%} {kernel.launches:5d}  {kernel.name}"
            )


def bench_variants(bench: Bench, dtype: str) -> list[dict[str, Cell]]:
    config = bench.engine.config
    planes = [(bench.view[:, layer, 0], bench.view[:, layer, 1]) for layer in range(8)]
    shape = (config.num_heads, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
    setting = Setting(*shape, DTYPES[dtype], planes)
    rows = []
    for batch, context in DECODES:
        rows += decode_variants(setting, batch, context, seed=batch)
    for count in PREFILLS:
        rows += prefill_variants(setting, count, seed=count)
    print_table(rows)
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.cuda_engine", description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--num-blocks", type=int, default=NUM_BLOCKS)
    parser.add_argument("--no-graphs", action="store_true", help="enqueue decodes kernel by kernel")
    parser.add_argument("--sampled", action="store_true", help="decode with top-p beside greedy")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--attention-variants", action="store_true", help="time them all")
    parser.add_argument("--json", type=Path, help="write the results here instead")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing is measured")
        return 0
    device = torch.device("cuda", 0)
    bench = build(device, options.dtype, options.num_blocks, use_graphs=not options.no_graphs)
    with torch.inference_mode():
        rows = bench_prefills(bench) + bench_decodes(bench, GREEDY, "decode")
        if options.sampled:
            rows += bench_decodes(bench, SAMPLED, "decode, top-p")
        print_table(rows)
        if options.profile:
            print_profiles(bench)
        variants = bench_variants(bench, options.dtype) if options.attention_variants else []
    name = torch.cuda.get_device_name(device)
    kept = [{"device": name, "dtype": options.dtype, **row} for row in (*rows, *variants)]
    if options.json is None:
        print(write_results("cuda_engine", argv, kept))
    else:
        options.json.write_text(json.dumps(kept, indent=2) + "\n")
    return 0 if all(row["is_met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
