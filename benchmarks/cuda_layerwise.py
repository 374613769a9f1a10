"""Prefill layer by layer on a GPU beside that in the pool: ``python -m benchmarks.cuda_layerwise``.

Llama-3.1-8B's shape with random bfloat16 weights. One engine has its pool on the GPU, the other a
ring of two layers there and its pool in page-locked host memory. Both compute each prompt in
chunks, by turns; medians. First tokens and the bytes of both pools are compared. ``--plot`` draws
the last chunk's loads, computations and stores, by the device's clock, into
``docs/images/layerwise_cuda.svg``.
"""

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median

import torch

from benchmarks.dummy_model import write_dummy_model
from benchmarks.layerwise import MAX_SHARE, PLOT, plot, prefill
from benchmarks.report import Cell, print_table, write_results
from common.engine.cuda.engine import CudaEngine
from common.engine.cuda.model import CudaModel
from common.engine.layerwise.cuda import LayerwiseCudaEngine
from common.engine.layerwise.stream import Span, SpanKind, ring_layout
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.models.config import ModelConfig

BLOCK_SIZE = 16
CHUNK_TOKENS = 4096
LENGTHS = (4096, 10_240, 32_768)
MAX_SEQS = 8


def measure(device: torch.device, turns: int) -> tuple[list[dict[str, Cell]], list[Span]]:
    """Return a row for each length, and the spans of the longest prompt's last chunk."""
    with tempfile.TemporaryDirectory() as folder:
        write_dummy_model(Path(folder), "llama-8b")
        config = ModelConfig.load(Path(folder))
        model = CudaModel.load(config, "bfloat16", device, "dummy")
    layout = KVLayout(
        config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, "bfloat16"
    )
    num_blocks = max(LENGTHS) // BLOCK_SIZE
    on_gpu = torch.zeros((num_blocks + 1) * layout.block_bytes, dtype=torch.uint8, device=device)
    on_host = KVPool(num_blocks, layout.block_bytes)
    spans: list[Span] = []
    whole = CudaEngine(
        *(model, layout, on_gpu, num_blocks),
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=MAX_SEQS,
        use_graphs=False,
    )
    ring = LayerwiseCudaEngine(
        *(model, layout, on_host.buffer),
        num_places=num_blocks,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=MAX_SEQS,
        tell_span=spans.append,
    )
    rows: list[dict[str, Cell]] = []
    with closing(ring):
        for length in LENGTHS:
            random = torch.Generator().manual_seed(length)
            prompt = torch.randint(3, config.vocab_size, (length,), generator=random).tolist()
            ring.peak_places = 0
            seconds: tuple[list[float], list[float]] = ([], [])
            for turn in range(turns + 1):
                spans.clear()
                found = [
                    prefill(engine, prompt, BLOCK_SIZE, CHUNK_TOKENS) for engine in (whole, ring)
                ]
                if turn:  # the first one warms up
                    for each, (taken, _) in zip(seconds, found, strict=True):
                        each.append(taken)
            in_pool = length // BLOCK_SIZE * layout.block_bytes
            in_ring = ring.peak_places * ring_layout(layout).block_bytes
            written = torch.frombuffer(on_host.buffer, dtype=torch.uint8)[:in_pool]
            in_time = [median(taken) for taken in seconds]
            moved = [sum(s.num_bytes for s in spans if s.kind is kind) for kind in SpanKind]
            rows.append(
                {
                    "tokens": length,
                    "pool ms": round(1e3 * in_time[0], 1),
                    "ring ms": round(1e3 * in_time[1], 1),
                    "time": round(in_time[1] / in_time[0], 3),
                    "loaded GB": round(moved[0] / 1e9, 2),
                    "stored GB": round(moved[2] / 1e9, 2),
                    "pool MiB": round(in_pool / 2**20, 1),
                    "ring MiB": round(in_ring / 2**20, 1),
                    "layers held": round(in_ring / in_pool * config.num_layers, 2),
                    "equal": found[0][1].token_id == found[1][1].token_id
                    and torch.equal(on_gpu[:in_pool].cpu(), written),
                    "met": in_ring <= MAX_SHARE / config.num_layers * in_pool,
                }
            )
            print(rows[-1], flush=True)
    num_steps = -(-max(LENGTHS) // CHUNK_TOKENS)
    return rows, sorted(spans, key=lambda span: span.begin)[-(len(spans) // num_steps) :]


def main(argv: list[str]) -> int:
    """Measure; 0 where all bytes are equal and the ring is as small as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="of each length")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--plot", action="store_true", help="draw the last chunk")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    torch.cuda.set_device(device)
    rows, spans = measure(device, options.turns)
    print_table(rows)
    print(f"kept in benchmarks/results/{write_results('cuda_layerwise', argv, rows).name}")
    if options.plot:
        PLOT.with_name("layerwise_cuda.svg").write_text(plot(spans), encoding="utf-8")
    return 0 if all(row["met"] is True and row["equal"] is True for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
