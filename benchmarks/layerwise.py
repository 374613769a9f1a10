"""Prefill layer by layer beside prefill in the pool, with the default model on the CPU.

For each prompt length both engines compute it in chunks, in turn; medians. Logits are compared
through the drawn tokens and the pools, to the last bit. ``--plot`` draws one chunk's loads,
computations and stores into ``docs/images/layerwise.svg``.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch

from benchmarks.report import Cell, print_table, write_results
from common.config.load import load_settings
from common.engine.cpu_engine import CpuEngine
from common.engine.dtype import load_model_layout
from common.engine.interface import SampleSpec, StepRow
from common.engine.layerwise.cpu import LayerwiseCpuEngine
from common.engine.layerwise.stream import Span, SpanKind, ring_layout
from common.models.config import ModelConfig
from common.models.default_model import ensure_default_model
from common.sampling import SampledToken, SamplingParams

BLOCK_SIZE = 64
CHUNK_TOKENS = 512
LENGTHS = (512, 2048, 4096)
MAX_SHARE = 3
"""Most layers' worth of K and V that the device may hold."""
PLOT = Path(__file__).parents[1] / "docs" / "images" / "layerwise.svg"
LANES = {
    SpanKind.LOAD: ("#1f77b4", "pool to ring"),
    SpanKind.COMPUTE: ("#2ca02c", "attention"),
    SpanKind.STORE: ("#d62728", "ring to pool"),
}
GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0, num_logprobs=5)


class Executes(Protocol):
    """An engine, one step at a time."""

    def execute(self, rows: Sequence[StepRow]) -> list[tuple[SampledToken, ...]]:
        """Compute a step."""
        ...


def prefill(
    engine: Executes,
    prompt: list[int],
    block_size: int = BLOCK_SIZE,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[float, SampledToken]:
    """Compute a prompt in chunks; return the seconds and the first token."""
    table = range(-(-len(prompt) // block_size))
    began = perf_counter()
    drawn: list[tuple[SampledToken, ...]] = []
    for start in range(0, len(prompt), chunk_tokens):
        chunk = prompt[start : start + chunk_tokens]
        is_last = start + len(chunk) == len(prompt)
        samples = (SampleSpec(GREEDY, 0, prompt, ()),) if is_last else ()
        drawn = engine.execute([StepRow(chunk, start, table, samples)])
    return perf_counter() - began, drawn[0][0]


def measure(num_threads: int, turns: int) -> tuple[list[dict[str, Cell]], list[Span]]:
    """Return a row for each length, and what was done in the last chunk of the longest prompt."""
    folder = ensure_default_model(load_settings().settings.cache_dir / "models", print)
    config = ModelConfig.load(folder)
    layout = load_model_layout(config, "float32", BLOCK_SIZE)
    num_blocks = -(-max(LENGTHS) // BLOCK_SIZE)
    pools = [torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8) for _ in range(2)]
    spans: list[Span] = []
    whole = CpuEngine(folder, layout, pools[0], num_threads)
    ring = LayerwiseCpuEngine(
        *(folder, layout, pools[1], num_threads), num_places=num_blocks, tell=spans.append
    )
    rows: list[dict[str, Cell]] = []
    with closing(ring):
        for length in LENGTHS:
            random = torch.Generator().manual_seed(length)
            prompt = torch.randint(3, config.vocab_size, (length,), generator=random).tolist()
            ring.peak_places = 0
            seconds: tuple[list[float], list[float]] = ([], [])
            for _ in range(turns):
                spans.clear()
                found = [prefill(engine, prompt) for engine in (whole, ring)]
                for each, (taken, _) in zip(seconds, found, strict=True):
                    each.append(taken)
            moving = sum(s.end - s.begin for s in spans if s.kind is not SpanKind.COMPUTE)
            in_pool = -(-length // BLOCK_SIZE) * layout.block_bytes
            in_ring = ring.peak_places * ring_layout(layout).block_bytes
            in_time = [statistics.median(each) for each in seconds]
            rows.append(
                {
                    "tokens": length,
                    "pool s": round(in_time[0], 3),
                    "ring s": round(in_time[1], 3),
                    "time": round(in_time[1] / in_time[0], 3),
                    "moved s": round(moving, 3),
                    "pool MiB": round(in_pool / 2**20, 1),
                    "ring MiB": round(in_ring / 2**20, 1),
                    "layers held": round(in_ring / in_pool * config.num_layers, 2),
                    "equal": found[0][1] == found[1][1] and torch.equal(*pools),
                    "met": in_ring <= MAX_SHARE / config.num_layers * in_pool,
                }
            )
    num_steps = -(-max(LENGTHS) // CHUNK_TOKENS)
    return rows, sorted(spans, key=lambda span: span.begin)[-(len(spans) // num_steps) :]


def plot(spans: list[Span]) -> str:
    """Draw one chunk's spans in three lanes over its time, as SVG."""
    first, last = min(s.begin for s in spans), max(s.end for s in spans)
    scale = 600 / (last - first)
    parts: list[str] = []
    for place, (color, label) in enumerate(LANES.values()):
        y = 40 + 40 * place
        parts.append(f'<text x="100" y="{y + 16}" text-anchor="end" fill="{color}">{label}</text>')
    for span in spans:
        place = list(LANES).index(span.kind)
        color = LANES[span.kind][0]
        x, width = 110 + scale * (span.begin - first), max(0.5, scale * (span.end - span.begin))
        parts.append(
            f'<rect x="{x:.1f}" y="{40 + 40 * place}" width="{width:.1f}" height="24" '
            f'fill="{color}" fill-opacity="{0.5 + 0.4 * (span.layer % 2)}"/>'
        )
    for share in (0.0, 0.5, 1.0):
        x, milliseconds = 110 + 600 * share, 1000 * (last - first) * share
        parts.append(f'<path d="M{x} 34V160" stroke="#bbb" stroke-dasharray="2 3"/>')
        parts.append(f'<text x="{x}" y="176" text-anchor="middle">{milliseconds:.0f} ms</text>')
    title = "One chunk, layer by layer; the MLP is in the gaps"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 190" font-family="sans-serif" '
        f'font-size="11"><rect width="740" height="190" fill="white"/><text x="370" y="20" '
        f'text-anchor="middle">{title}</text>{"".join(parts)}</svg>\n'
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="of each length")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--plot", action="store_true", help=f"draw {PLOT.name}")
    args = parser.parse_args(argv)
    rows, spans = measure(args.threads, args.turns)
    print_table(rows)
    print(f"kept in benchmarks/results/{write_results('layerwise', argv, rows).name}")
    if args.plot:
        PLOT.write_text(plot(spans), encoding="utf-8")
    return 0 if all(row["met"] is True and row["equal"] is True for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
