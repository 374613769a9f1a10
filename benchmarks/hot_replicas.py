"""Bursts that share one hot prefix: ``python -m benchmarks hot_replicas``.

Two clusters of two prefill workers and one decode worker run side by side on the same cores:
``hot_replicas`` 0, where a worker without the prefix has it copied when a request is placed there,
and 2, where it was copied ahead of need. In every round each gets, in turn, a few requests one by
one that begin alike, a moment of rest, and then a burst that begins so, too. Medians of the rounds
are compared, within this one run.
"""

import argparse
import asyncio
import random
import sys
from contextlib import ExitStack
from statistics import median

import httpx

from benchmarks.report import Cell, print_table, write_results
from benchmarks.served_cluster import ServedCluster, served
from benchmarks.streamed import ask_streamed, model_of
from common.telemetry.story import read_log_folder

TIMEOUT_SECONDS = 300.0
NUM_HEATING = 6
REST_SECONDS = 1.5
NUM_TAIL_TOKENS = 64
MAX_RATIO = 1.1
"""Copies ahead of need may cost nothing; less than this is noise."""


async def _first_token(client: httpx.AsyncClient, model: str, prompt: list[int]) -> float:
    """Return the seconds to the first token."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    return (await ask_streamed(client, "/v1/completions", body)).first_seconds


async def _round(
    cluster: ServedCluster, seed: int, num_shared_tokens: int, num_requests: int
) -> list[float]:
    """Heat a prefix that is new, rest, and return the times of a burst that begins with it."""
    source = random.Random(seed)
    shared = [source.randrange(100, 4096) for _ in range(num_shared_tokens)]

    def prompt() -> list[int]:
        return [*shared, *(source.randrange(100, 4096) for _ in range(NUM_TAIL_TOKENS))]

    async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_SECONDS) as client:
        model = await model_of(client)
        for _ in range(NUM_HEATING):
            await _first_token(client, model, prompt())
        await asyncio.sleep(REST_SECONDS)
        burst = [_first_token(client, model, prompt()) for _ in range(num_requests)]
        return list(await asyncio.gather(*burst))


def main(argv: list[str]) -> int:
    """Send the bursts and compare; 0 when copies ahead of need slow nothing down."""
    parser = argparse.ArgumentParser(prog="benchmarks hot_replicas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--shared-tokens", type=int, default=1024)
    arguments = parser.parse_args(argv)
    taken: dict[str, list[list[float]]] = {"0": [], "2": []}
    rows: list[dict[str, Cell]] = []
    with ExitStack() as stack:
        options = ("--prefill", "2", "--decode", "1", "--threads", "1", "--kv-bytes", "512MiB")
        clusters = [
            stack.enter_context(served(count, (*options, "--hot-replicas", count)))
            for count in taken
        ]
        for number in range(arguments.rounds):
            for cluster in clusters:
                found = asyncio.run(
                    _round(cluster, number, arguments.shared_tokens, arguments.requests)
                )
                taken[cluster.name].append(found)
                print(
                    f"  round {number + 1}/{arguments.rounds} hot_replicas {cluster.name}: "
                    f"TTFT p50 {1e3 * median(found):.0f} ms, max {1e3 * max(found):.0f} ms",
                    flush=True,
                )
        for cluster in clusters:
            events = [entry.event for entry in read_log_folder(cluster.log_dir)]
            rows.append(
                {
                    "hot_replicas": int(cluster.name),
                    "TTFT p50 ms": 1e3 * median(median(found) for found in taken[cluster.name]),
                    "TTFT max ms": 1e3 * median(max(found) for found in taken[cluster.name]),
                    "ordered": events.count("replica_ordered"),
                    "held": events.count("replica_held"),
                }
            )
    print_table(rows)
    without, ahead = (median(median(found) for found in taken[name]) for name in ("0", "2"))
    ratio, is_met = ahead / without, ahead <= MAX_RATIO * without
    print(f"TTFT p50 with 2 / with 0: {ratio:.2f} (at most {MAX_RATIO:g})")
    rows.append({"what": "TTFT p50, 2 / 0", "ratio": ratio, "is_met": is_met})
    print(f"kept in benchmarks/results/{write_results('hot_replicas', argv, rows).name}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
