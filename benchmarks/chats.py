"""Chats of many turns under each placement policy: ``python -m benchmarks chats``.

Two prefill and two decode workers for each policy, side by side on the same cores, each loaded in
turn with the same chats: a turn's prompt is all that was said before and some new words, so that a
worker which computed the turn before has most of it cached. Medians of the turns' time to the first
token are compared, within this one run. What each handoff moved is checked against the log: exactly
the blocks that the decode side did not have.
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
from common.telemetry.story import LogEntry, read_log_folder

POLICIES = ("round_robin", "prefix_aware", "flowkv")
MIN_GAIN = 1.5
TIMEOUT_SECONDS = 300.0
WORDS = (
    *("river", "stone", "winter", "window", "garden", "letter"),
    *("morning", "train", "island", "forest", "question", "answer"),
)


def _words(source: random.Random, count: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(count))


async def _turn(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> tuple[float, str]:
    """Ask, and return the seconds to the first token and the answer."""
    body = {
        "model": await model_of(client),
        "messages": messages,
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = await ask_streamed(client, "/v1/chat/completions", body)
    return answer.first_seconds, answer.text


async def _chat(cluster: ServedCluster, seed: int, num_turns: int, num_words: int) -> list[float]:
    """Hold one chat; return the seconds to the first token of every turn but the first."""
    source = random.Random(seed)
    messages = [{"role": "system", "content": _words(source, 4 * num_words)}]
    taken: list[float] = []
    async with httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_SECONDS) as client:
        for _ in range(num_turns):
            messages.append({"role": "user", "content": _words(source, num_words)})
            seconds, text = await _turn(client, messages)
            messages.append({"role": "assistant", "content": text})
            taken.append(seconds)
    return taken[1:]


async def _chats(
    cluster: ServedCluster, seed: int, num_chats: int, num_turns: int, num_words: int
) -> list[float]:
    seeds = [1000 * seed + number for number in range(num_chats)]
    held = await asyncio.gather(*(_chat(cluster, s, num_turns, num_words) for s in seeds))
    return [seconds for chat in held for seconds in chat]


def moved_wrongly(cluster: ServedCluster) -> tuple[int, int, int]:
    """Return how many handoffs there were, how many moved other bytes than the missing blocks,
    and the bytes moved in all, by the cluster's logs."""
    block_bytes = 0
    num_missing: dict[str, int] = {}
    moved: dict[str, int] = {}
    for entry in read_log_folder(cluster.log_dir):
        transfer = str(entry.fact("transfer_id"))
        if entry.event == "worker_built":
            block_bytes = _count(entry, "block_bytes")
        elif entry.event == "reserved":
            num_missing[transfer] = _count(entry, "num_blocks") - _count(entry, "num_cached_blocks")
        elif entry.event == "handoff_ended" and entry.fact("outcome") == "HandedOver":
            moved[transfer] = _count(entry, "num_bytes")
    num_wrong = sum(
        num_bytes != num_missing[transfer] * block_bytes for transfer, num_bytes in moved.items()
    )
    return len(moved), num_wrong, sum(moved.values())


def _count(entry: LogEntry, name: str) -> int:
    count = entry.fact(name)
    assert isinstance(count, int), (entry.event, name)
    return count


def main(argv: list[str]) -> int:
    """Hold the chats and compare the policies; 0 when every target is met."""
    parser = argparse.ArgumentParser(prog="benchmarks chats")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--words", type=int, default=100)
    arguments = parser.parse_args(argv)
    taken: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    rows: list[dict[str, Cell]] = []
    with ExitStack() as stack:
        options = ("--prefill", "2", "--decode", "2", "--threads", "1", "--kv-bytes", "512MiB")
        clusters = [
            stack.enter_context(served(policy, (*options, "--policy", policy)))
            for policy in POLICIES
        ]
        for number in range(arguments.rounds):
            for cluster in clusters:
                found = asyncio.run(
                    _chats(cluster, number, arguments.chats, arguments.turns, arguments.words)
                )
                taken[cluster.name].append(median(found))
                print(
                    f"  round {number + 1}/{arguments.rounds} {cluster.name}: TTFT p50 "
                    f"{1e3 * median(found):.0f} ms",
                    flush=True,
                )
        for cluster in clusters:
            num_handoffs, num_wrong, num_bytes = moved_wrongly(cluster)
            rows.append(
                {
                    "policy": cluster.name,
                    "TTFT p50": 1e3 * median(taken[cluster.name]),
                    "handoffs": num_handoffs,
                    "wrong": num_wrong,
                    "MB moved": num_bytes / 1e6,
                }
            )
    base = median(taken["round_robin"])
    is_met = all(row["wrong"] == 0 for row in rows)
    print_table(rows)
    for policy in POLICIES[1:]:
        gain = base / median(taken[policy])
        is_met &= gain >= MIN_GAIN
        print(f"round_robin / {policy}: {gain:.2f} (target {MIN_GAIN:g})")
        rows.append({"policy": f"round_robin / {policy}", "TTFT p50": gain})
    print(f"kept in benchmarks/results/{write_results('chats', argv, rows).name}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
