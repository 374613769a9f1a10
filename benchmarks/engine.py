"""The CPU engine beside transformers' ``generate``: same model, type, threads and run.

Prints decode tokens/s at several batch sizes after a short prompt, prefill tokens/s of a long one,
ratios to transformers, and the share of the limit that memory bandwidth sets for decoding. The two
sides take turns, and every figure is a median, because a shared machine is never quiet.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import Cell, write_results
from common.engine.cpu_engine import CpuEngine
from common.engine.dtype import TORCH_DTYPES, load_model_layout
from common.engine.interface import SampleSpec, StepRow
from common.models.config import ModelConfig
from common.models.default_model import ensure_default_model
from common.sampling import SamplingParams

BLOCK_SIZE = 64
PROMPT_TOKENS = 64
PREFILL_TOKENS = 1024
BATCHES = (1, 4, 8)
DECODE_TARGET = 1.8
PREFILL_TARGETS = {"float32": 1.3, "bfloat16": 1.0}
GREEDY = SamplingParams(seed=0, max_tokens=1_000_000, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """One comparison, in tokens per second; ``limit_share`` is of the bandwidth limit."""

    name: str
    dtype: str
    threads: int
    engine: float
    transformers: float
    target: float
    limit_share: float | None

    @property
    def ratio(self) -> float:
        """How many times as fast the engine is."""
        return self.engine / self.transformers

    @property
    def is_met(self) -> bool:
        """Whether the ratio reaches the target."""
        return self.ratio >= self.target

    def row(self) -> dict[str, Cell]:
        """Return the figure as a row of results; tokens per second, shares of 1."""
        share = {} if self.limit_share is None else {"limit_share": self.limit_share}
        return {
            "name": self.name,
            "dtype": self.dtype,
            "threads": self.threads,
            "engine": self.engine,
            "transformers": self.transformers,
            "ratio": self.ratio,
            "target": self.target,
            "is_met": self.is_met,
            **share,
        }

    def line(self) -> str:
        """Return the figure as one line of text."""
        share = "" if self.limit_share is None else f"  {self.limit_share:5.0%} of limit"
        return (
            f"{self.dtype:8} {self.threads}t {self.name:12} engine {self.engine:8.1f}  "
            f"transformers {self.transformers:8.1f}  {self.ratio:5.2f}x "
            f"(target {self.target}x: {'met' if self.is_met else 'MISSED'}){share}"
        )


def read_bandwidth() -> float:
    """Return bytes/s of summing 512 MiB, the best of five."""
    data = torch.ones(128 * 2**20)
    return data.nbytes / min(_seconds(data.sum) for _ in range(5))


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


class EngineSide:
    """Our engine over a pool that holds the largest case."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        config = ModelConfig.load(folder)
        layout = load_model_layout(config, dtype, BLOCK_SIZE)
        self._blocks_each = PREFILL_TOKENS // BLOCK_SIZE
        num_blocks = self._blocks_each * max(BATCHES)
        self._engine = CpuEngine(
            folder, layout, torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8), threads
        )

    def _row(self, index: int, token_ids: list[int], start: int, output: list[int]) -> StepRow:
        first = index * self._blocks_each
        table = range(first, first + self._blocks_each)
        return StepRow(token_ids, start, table, (SampleSpec(GREEDY, 0, (), output),))

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds until the first token."""
        return _seconds(lambda: self._engine.execute([self._row(0, prompt, 0, [])]))

    def decode(self, prompts: list[list[int]], num_new: int) -> float:
        """Return the seconds of the steps after the first token."""
        outputs: list[list[int]] = [[] for _ in prompts]
        rows = [self._row(i, prompt, 0, []) for i, prompt in enumerate(prompts)]
        self._advance(rows, outputs)
        begin = time.perf_counter()
        for step in range(num_new - 1):
            rows = [
                self._row(i, [output[-1]], len(prompts[i]) + step, output)
                for i, output in enumerate(outputs)
            ]
            self._advance(rows, outputs)
        return time.perf_counter() - begin

    def _advance(self, rows: list[StepRow], outputs: list[list[int]]) -> None:
        for output, tokens in zip(outputs, self._engine.execute(rows), strict=True):
            output.append(tokens[0].token_id)


class TransformersSide:
    """The same model under ``generate``."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype])
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def _generate(self, prompts: list[list[int]], num_new: int) -> float:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        return _seconds(
            lambda: self._model.generate(
                ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False
            )
        )

    def prefill(self, prompt: list[int]) -> float:
        """Return the seconds until the first token."""
        return self._generate([prompt], 1)

    def decode(self, prompts: list[list[int]], num_new: int) -> float:
        """Return the seconds of the steps after the first token."""
        return self._generate(prompts, num_new) - self._generate(prompts, 1)


def compare(folder: Path, dtype: str, threads: int, repeats: int, num_new: int) -> list[Figure]:
    torch.set_num_threads(threads)
    ours, theirs = EngineSide(folder, dtype, threads), TransformersSide(folder, dtype)
    weights = (folder / "model.safetensors").stat().st_size * TORCH_DTYPES[dtype].itemsize // 4
    ids = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(100, 40_000, (length,), generator=ids).tolist()

    figures = []
    for batch in BATCHES:
        prompts = [prompt(PROMPT_TOKENS) for _ in range(batch)]
        ours.decode(prompts, 4)
        theirs.decode(prompts, 4)
        rates: list[tuple[float, float, float]] = []
        for _ in range(repeats):
            tokens = batch * (num_new - 1)
            rates.append(
                (
                    tokens / ours.decode(prompts, num_new),
                    tokens / theirs.decode(prompts, num_new),
                    read_bandwidth() / weights * batch,
                )
            )
        engine, reference, limit = (statistics.median(c) for c in zip(*rates, strict=True))
        name, share = f"decode B={batch}", engine / limit
        figures.append(Figure(name, dtype, threads, engine, reference, DECODE_TARGET, share))
        print(figures[-1].line(), flush=True)
    long = prompt(PREFILL_TOKENS)
    ours.prefill(long)
    theirs.prefill(long)
    pairs = [(ours.prefill(long), theirs.prefill(long)) for _ in range(repeats)]
    engine, reference = (PREFILL_TOKENS / statistics.median(c) for c in zip(*pairs, strict=True))
    target = PREFILL_TARGETS[dtype]
    figures.append(
        Figure(f"prefill {PREFILL_TOKENS}", dtype, threads, engine, reference, target, None)
    )
    print(figures[-1].line(), flush=True)
    return figures


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder (default: the default model)")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(TORCH_DTYPES), default=list(TORCH_DTYPES)
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=24)
    options = parser.parse_args(argv)
    folder = options.model or ensure_default_model(report=lambda line: print(line, file=sys.stderr))
    figures = [
        figure
        for dtype in options.dtypes
        for threads in options.threads
        for figure in compare(folder, dtype, threads, options.repeats, options.new_tokens)
    ]
    path = write_results("engine", argv, [figure.row() for figure in figures])
    print(f"written to {path}")
    return 0 if all(figure.is_met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
