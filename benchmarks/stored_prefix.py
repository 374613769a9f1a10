"""Time to the first token of a stored prefix beside computing it: ``python -m benchmarks
stored_prefix``.

One prefill and one decode worker whose pools hold one such prompt and little more. In every round a
new prompt is computed, a longer one takes its place in the pools, and the first comes again with
some new words, so that all of it but these comes from the store, except for a few blocks at most
that were left in the pool: every answer's ledger must say so. The first and the third are compared
within this one run.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from dataclasses import dataclass
from statistics import median

import httpx

from benchmarks.report import Cell, print_table, write_results
from benchmarks.served_cluster import served
from benchmarks.streamed import ask_streamed, model_of

BLOCK_SIZE = 64
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
"""Of the default model's KV in bfloat16."""
NUM_NEW_TOKENS = 64
NUM_MORE_TOKENS, NUM_SPARE_TOKENS = 4 * BLOCK_SIZE, 6 * BLOCK_SIZE
"""By how much the prompt between is longer, and the pool larger, than the ones compared."""
MAX_LEFT_TOKENS = NUM_SPARE_TOKENS - NUM_MORE_TOKENS
MAX_RATIO = 0.25
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer: seconds to its first token, and what of the prompt was loaded and how."""

    seconds: float
    num_cached_tokens: int
    num_loaded_tokens: int
    load_seconds: float
    loaded_by: str


async def ask_for(client: httpx.AsyncClient, model: str, prompt: list[int]) -> Asked:
    """Ask for two tokens after a prompt."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "x_phases": True,
    }
    answer = await ask_streamed(client, "/v1/completions", body)
    usage = answer.usage
    loads = [phase for phase in usage["x_phases"] if phase["name"] == "load"]
    return Asked(
        answer.first_seconds,
        usage["prompt_tokens_details"]["cached_tokens"],
        sum(phase["num_tokens"] for phase in loads),
        sum(phase["seconds"] for phase in loads),
        ", ".join(phase["worker"] for phase in loads),
    )


async def _rounds(url: str, num_tokens: int, rounds: int) -> tuple[list[Asked], list[Asked]]:
    """Return what was computed and what was loaded."""
    source = random.Random(1)

    def words(count: int) -> list[int]:
        return [source.randrange(100, 4096) for _ in range(count)]

    computed, loaded = [], []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS) as client:
        model = await model_of(client)
        await ask_for(client, model, words(num_tokens))  # rates are measured by it
        for number in range(rounds):
            prompt = words(num_tokens)
            computed.append(await ask_for(client, model, prompt + words(NUM_NEW_TOKENS)))
            await ask_for(client, model, words(num_tokens + NUM_NEW_TOKENS + NUM_MORE_TOKENS))
            loaded.append(await ask_for(client, model, prompt + words(NUM_NEW_TOKENS)))
            print(
                f"  round {number + 1}/{rounds}: computed {1e3 * computed[-1].seconds:.0f} ms, "
                f"loaded {1e3 * loaded[-1].seconds:.0f} ms",
                flush=True,
            )
    return computed, loaded


def main(argv: list[str]) -> int:
    """Compare; 0 when the target is met and every ledger is right."""
    parser = argparse.ArgumentParser(prog="benchmarks stored_prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=63 * BLOCK_SIZE)
    arguments = parser.parse_args(argv)
    num_cached = arguments.tokens // BLOCK_SIZE * BLOCK_SIZE
    kv_bytes = TOKEN_BYTES * (arguments.tokens + NUM_NEW_TOKENS + NUM_SPARE_TOKENS)
    with tempfile.TemporaryDirectory(prefix="fp-store-") as folder:
        options = (
            *("--prefill", "1", "--decode", "1", "--dtype", "bfloat16"),
            *("--block-size", str(BLOCK_SIZE), "--kv-bytes", str(kv_bytes)),
            *("--roles", "manual", "--store", f"file:{folder}"),
        )
        with served("stored", options) as cluster:
            computed, loaded = asyncio.run(_rounds(cluster.url, arguments.tokens, arguments.rounds))
    num_left = [num_cached - asked.num_loaded_tokens for asked in loaded]
    is_right = all(0 <= left <= MAX_LEFT_TOKENS for left in num_left)
    is_right &= all(asked.num_cached_tokens == num_cached for asked in loaded)
    is_right &= all(asked.num_cached_tokens == 0 for asked in computed)
    ratio = median(a.seconds for a in loaded) / median(a.seconds for a in computed)
    rows: list[dict[str, Cell]] = [
        {
            "prompts": name,
            "TTFT p50 ms": 1e3 * median(asked.seconds for asked in found),
            "load p50 ms": 1e3 * median(asked.load_seconds for asked in found),
            "loaded tokens": median(asked.num_loaded_tokens for asked in found),
            "by": found[-1].loaded_by or "-",
        }
        for name, found in (("computed", computed), ("loaded", loaded))
    ]
    print_table(rows)
    print(f"loaded / computed: {ratio:.3f} (target {MAX_RATIO}); ledgers right: {is_right}")
    rows.append({"prompts": "loaded / computed", "ratio": ratio, "ledgers right": is_right})
    print(f"kept in benchmarks/results/{write_results('stored_prefix', argv, rows).name}")
    return 0 if is_right and ratio <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
