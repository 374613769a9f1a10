"""Time to the first token of stored prompts on a GPU: ``python -m benchmarks.cuda_stored_prefix``.

A model of Llama-3.1-8B's shape with random bfloat16 weights, served by one combined worker or by a
prefill and a decode worker on one GPU, whose pools hold one prompt and little more. In every round
a new prompt is computed; when all of it is in the store a longer one takes its place in the pool;
then the first comes again with some new words. ``host tier``: its blocks are in page-locked memory
of the worker. ``storage``: they are in files of ``--folder`` alone. Every answer's usage and the
workers' logs must say so. Beside it, in the same run, a plain copy of as many bytes to the GPU.

Exits with 1 where something else was computed or loaded than meant.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import torch

from benchmarks.cuda_store import layout_of
from benchmarks.dummy_model import SHAPES, write_dummy_model
from benchmarks.report import Cell, print_table, write_results
from benchmarks.served_cluster import ServedCluster, served
from benchmarks.stored_prefix import Asked, ask_for
from benchmarks.streamed import model_of

NAME = "cuda_stored_prefix"
BLOCK_TOKENS = 16
NUM_TOKENS = 10_240
NUM_NEW_TOKENS = 64
NUM_MORE_TOKENS, NUM_SPARE_TOKENS = 256, 384
"""By how much the prompt between is longer, and the pool larger, than the ones compared."""
MAX_LEFT_TOKENS = NUM_SPARE_TOKENS - NUM_MORE_TOKENS + BLOCK_TOKENS
NUM_TIER_PROMPTS = 3
TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.05
LAYOUTS = {"combined": ("--combined",), "split": ("--prefill", "1", "--decode", "1")}
SOURCES = ("host tier", "storage")


@dataclass(frozen=True, slots=True)
class Found:
    """What one cluster answered, and whether all of it came from where it should."""

    computed: list[Asked]
    loaded: list[Asked]
    is_right: bool


def copy_seconds(num_bytes: int, turns: int) -> float:
    """Return the least seconds of a plain copy from page-locked memory to the GPU."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    taken = []
    for _ in range(turns):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)


def serve_options(
    layout: str, source: str, shape: str, folder: Path, num_tokens: int, block_bytes: int
) -> list[str]:
    """Return the options of ``flowpath serve``; ``folder`` has the model and gets the store."""
    longest = num_tokens + NUM_NEW_TOKENS + NUM_MORE_TOKENS + BLOCK_TOKENS
    num_pool_blocks = (num_tokens + NUM_NEW_TOKENS + NUM_SPARE_TOKENS) // BLOCK_TOKENS + 1
    num_prompt_blocks = -(-longest // BLOCK_TOKENS)
    tier_bytes = NUM_TIER_PROMPTS * num_prompt_blocks * block_bytes if source == SOURCES[0] else 0
    # The queue takes whole prompts: a disk need not keep up with a GPU for a moment.
    queue = 2 * num_prompt_blocks * block_bytes
    return [
        *("--model", str(folder / "model"), "--load-format", "dummy", "--dtype", "bfloat16"),
        *("--device", "cuda", "--max-model-len", str(longest)),
        *("--block-size", str(BLOCK_TOKENS), "--kv-bytes", str(num_pool_blocks * block_bytes)),
        *("--roles", "manual", *LAYOUTS[layout], "--store-load", "always"),
        *("--store", f"file:{folder}/store?capacity=48GiB&queue={queue}"),
        *("--host-tier-bytes", str(tier_bytes)),
    ]


async def _rounds(
    cluster: ServedCluster, store: Path, source: str, num_tokens: int, rounds: int, vocab_size: int
) -> Found:
    numbers = random.Random(1)

    def words(count: int) -> list[int]:
        return [numbers.randrange(100, vocab_size) for _ in range(count)]

    computed, loaded, num_from_storage = [], [], []
    num_stored = 0

    async def ask_anew(prompt: list[int]) -> Asked:
        """Ask for a prompt that nobody knows, and wait until the store has its whole blocks."""
        nonlocal num_stored
        asked = await ask_for(client, model, prompt)
        num_stored += len(prompt) // BLOCK_TOKENS
        await asyncio.to_thread(_until_stored, store, num_stored)
        return asked

    async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_SECONDS) as client:
        model = await model_of(client)
        await ask_anew(words(num_tokens))
        for number in range(rounds):
            prompt = words(num_tokens)
            computed.append(await ask_anew(prompt + words(NUM_NEW_TOKENS)))
            await ask_anew(words(num_tokens + NUM_NEW_TOKENS + NUM_MORE_TOKENS))
            loaded.append(await ask_for(client, model, prompt + words(NUM_NEW_TOKENS)))
            num_stored += NUM_NEW_TOKENS // BLOCK_TOKENS
            await asyncio.to_thread(_until_stored, store, num_stored)
            num_from_storage.append(_latest_load(cluster.log_dir))
            print(
                f"  {cluster.name} {number + 1}/{rounds}: computed"
                f" {1e3 * computed[-1].seconds:.1f} ms, loaded {1e3 * loaded[-1].seconds:.1f} ms",
                flush=True,
            )
    num_cached = num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    num_left = [num_cached - asked.num_loaded_tokens for asked in loaded]
    is_right = all(0 <= left <= MAX_LEFT_TOKENS for left in num_left)
    is_right &= all(asked.num_cached_tokens == num_cached for asked in loaded)
    is_right &= all(asked.num_cached_tokens == 0 for asked in computed)
    is_right &= all(
        blocks == (0 if source == SOURCES[0] else asked.num_loaded_tokens // BLOCK_TOKENS)
        for blocks, asked in zip(num_from_storage, loaded, strict=True)
    )
    return Found(computed, loaded, is_right)


def _until_stored(store: Path, num_blocks: int) -> None:
    """Wait until so many blocks are in the store. TimeoutError where they do not come."""
    deadline, never = time.monotonic() + TIMEOUT_SECONDS, threading.Event()
    while sum(1 for path in store.glob("*/??/*") if "-" in path.name) < num_blocks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{num_blocks} blocks did not come into the store")
        never.wait(POLL_SECONDS)


def _latest_load(log_dir: Path) -> int:
    """Return how many blocks of the latest load came from storage, by the workers' logs."""
    loads = [
        json.loads(line)
        for path in log_dir.glob("*.jsonl")
        for line in path.read_text().splitlines()
        if '"prefix_loaded"' in line
    ]
    latest = max(loads, key=lambda load: str(load["ts"]))
    return int(latest["num_storage_blocks"])


def main(argv: list[str]) -> int:
    """Compare; 0 when every ledger is right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", help="where the store lies; a temporary folder by default")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=SOURCES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--name", default=NAME, help="name of the file of results")
    parser.add_argument("serve", nargs="*", help="more options of flowpath serve, after --")
    arguments = parser.parse_args(argv)
    shape = "llama-8b"
    vocab_size = SHAPES[shape]["vocab_size"]
    assert isinstance(vocab_size, int), "the vocabulary is counted"
    block_bytes = layout_of(BLOCK_TOKENS).block_bytes
    num_bytes = arguments.tokens // BLOCK_TOKENS * block_bytes
    limit = copy_seconds(num_bytes, arguments.rounds)
    print(f"a plain copy of {num_bytes / 1e9:.2f} GB: {1e3 * limit:.1f} ms", flush=True)
    rows: list[dict[str, Cell]] = []
    for layout in arguments.layouts:
        for source in arguments.sources:
            with tempfile.TemporaryDirectory(prefix="fp-store-", dir=arguments.folder) as root:
                folder = Path(root)
                write_dummy_model(folder / "model", shape)
                options = serve_options(
                    layout, source, shape, folder, arguments.tokens, block_bytes
                )
                with served(f"{layout}, {source}", [*options, *arguments.serve]) as cluster:
                    found = asyncio.run(
                        _rounds(
                            *(cluster, folder / "store", source),
                            *(arguments.tokens, arguments.rounds, vocab_size),
                        )
                    )
            computed = median(asked.seconds for asked in found.computed)
            loaded = median(asked.seconds for asked in found.loaded)
            load = median(asked.load_seconds for asked in found.loaded)
            rows.append(
                {
                    "layout": layout,
                    "from": source,
                    "computed TTFT p50 ms": round(1e3 * computed, 1),
                    "loaded TTFT p50 ms": round(1e3 * loaded, 1),
                    "load p50 ms": round(1e3 * load, 1),
                    "plain copy ms": round(1e3 * limit, 1),
                    "loaded / computed": round(loaded / computed, 3),
                    "copy / load": round(limit / load, 3),
                    "loaded by": found.loaded[-1].loaded_by,
                    "ledgers right": found.is_right,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    print_table(rows)
    print(f"kept as {write_results(NAME, argv, rows, name=arguments.name)}")
    return 0 if all(row["ledgers right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
