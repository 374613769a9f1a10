"""What one placement costs the controller: ``python -m benchmarks.placement``.

Each of the measured placements is one request from its frames to the chosen workers: decode the
message, hash the prompt, walk the prefix index, choose, and note on both chosen workers what was
assigned to them. A heartbeat of one worker comes after every ``HEARTBEAT_EVERY`` placements, and is
measured with them. Prompts are random; half of them have a cached prefix on one to three workers,
the rest of the index is blocks of other prompts.

``--plot`` draws the cost against workers and index size into ``docs/images/placement_cost.svg``.
"""

import argparse
import gc
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter_ns

import numpy as np

from benchmarks.report import Cell, print_table, write_results
from common.ids import Epoch, RequestId, WorkerId
from common.kv.prefix_cache import PrefixCache
from common.messages.codec import Codec, Envelope
from common.messages.control import GatewayToController, SubmitRequest
from common.messages.fields import Role
from common.sampling import SamplingParams
from services.controller.policy.cluster_view import ClusterView
from services.controller.policy.placement import num_blocks_needed
from services.controller.policy.policies import Policy, make_policy
from services.controller.policy.prefix_index import PrefixIndex
from services.controller.policy.views import Incarnation, Pairing, RequestView, WorkerView

BLOCK_SIZE = 64
NUM_PROMPTS = 1000
HEARTBEAT_EVERY = 4
"""144 workers of five heartbeats a second, beside 3 000 placements a second."""
POLICIES = ("round_robin", "random", "least_loaded", "power_of_two", "prefix_aware", "flowkv")
WORKERS = ((1, 1), (4, 8), (16, 32), (48, 96), (96, 192))
INDEX_BLOCKS = (10_000, 100_000, 1_000_000)
TARGETS = {8192: (2000, 2.0), 512: (5000, 1.0)}
"""By prompt tokens: placements per second at least, p99 in milliseconds at most."""
PLOT = Path(__file__).parents[1] / "docs" / "images" / "placement_cost.svg"


@dataclass(frozen=True, slots=True)
class Case:
    """One row: who places requests of how many tokens, on which cluster."""

    policy: str
    num_tokens: int
    num_prefill: int
    num_decode: int
    num_index_blocks: int

    @property
    def is_target(self) -> bool:
        """Whether the targets are for this case."""
        return (self.policy, self.num_prefill, self.num_decode, self.num_index_blocks) == (
            "flowkv",
            48,
            96,
            1_000_000,
        )


def _workers(case: Case, dice: Random) -> list[WorkerView]:
    """Return a cluster in service, all pairs of which work."""
    names = [(f"prefill-{n}", Role.PREFILL) for n in range(case.num_prefill)]
    names += [(f"decode-{n}", Role.DECODE) for n in range(case.num_decode)]
    keys = [(WorkerId(name), Epoch(1)) for name, _ in names]
    pairings = dict.fromkeys(keys[case.num_prefill :], Pairing.WORKS)
    return [
        WorkerView(
            *key,
            role,
            dice.randrange(8192) if role is Role.PREFILL else 0,
            16384,
            dice.randrange(8192),
            pairings if role is Role.PREFILL else {},
            num_decoding=dice.randrange(64) if role is Role.DECODE else 0,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            block_bytes=8 * 2**20,
            prefill_rate=dice.uniform(15_000, 25_000),
            decode_step_seconds=dice.uniform(0.01, 0.04),
            decode_rate=dice.uniform(1000, 3000),
            link_rates={other: dice.uniform(1e10, 5e10) for other in pairings},
        )
        for key, (_, role) in zip(keys, names, strict=True)
    ]


class Controller:
    """The part of a controller that places: codec, hashing, index, view of the cluster, policy."""

    def __init__(self, case: Case, policy: Policy, views: list[WorkerView]) -> None:
        self.cluster = ClusterView(views)
        self.index = PrefixIndex()
        self._policy = policy
        self._hasher = PrefixCache(BLOCK_SIZE, "fingerprint")
        self._codec: Codec[GatewayToController] = Codec(GatewayToController)
        self._case = case

    def hashes(self, prompt: bytes) -> list[bytes]:
        """Return the hash of each whole block of a prompt."""
        return list(self._hasher.chain(None, np.frombuffer(prompt, np.int32)))

    def place(self, frames: list[bytes]) -> None:
        """Place the request in these frames, and note it."""
        received = self._codec.decode(frames)
        message = received.message
        if not isinstance(message, SubmitRequest):
            raise TypeError(f"{type(message).__name__} is no request")
        hashes = self.hashes(received.payload[0]) if self._policy.uses_prefixes else []
        num_blocks = num_blocks_needed(
            message.num_prompt_tokens, 1, message.params.num_left, BLOCK_SIZE
        )
        request = RequestView(
            message.num_prompt_tokens, num_blocks, BLOCK_SIZE, hits=self.index.hits(hashes)
        )
        placement = self._policy.choose(self.cluster, request)
        if placement is None:
            raise RuntimeError("a cluster with room refused a request")
        prefill = placement.prefill
        tokens = (prefill.uncomputed_tokens + message.num_prompt_tokens) % 16384
        self.cluster.update(replace(prefill, uncomputed_tokens=tokens))
        decode = self.cluster.get(placement.decode.key) or placement.decode
        used = (decode.used_blocks + num_blocks) % 12288
        self.cluster.update(replace(decode, used_blocks=used))


def _fill(
    index: PrefixIndex, keys: list[Incarnation], chains: list[list[bytes]], size: int
) -> None:
    """Give the workers ``size`` blocks, prefixes of every second chain among them."""
    dice = Random(2)
    held: dict[Incarnation, list[bytes]] = {key: [] for key in keys}
    num_left = size
    for hashes in chains[::2]:
        cached = hashes[: min(num_left, dice.randint(1, len(hashes)))]
        for key in dice.sample(keys, min(len(keys), dice.randint(1, 3))):
            held[key] += cached[: dice.randint(1, max(1, len(cached)))]
        held[dice.choice(keys)] += cached
        num_left -= len(cached)
    for number, key in enumerate(keys):
        share = num_left // len(keys) + (number < num_left % len(keys))
        added = b"".join(held[key]) + dice.randbytes(16 * share)
        index.apply(key, 1, added, b"", is_snapshot=True)


def measure(case: Case, num_placements: int) -> dict[str, Cell]:
    """Return the row of one case."""
    dice = Random(1)
    views = _workers(case, dice)
    controller = Controller(case, make_policy(case.policy), views)
    tokens = np.random.default_rng(1)
    prompts = [
        tokens.integers(0, 50_000, case.num_tokens, dtype=np.int32).tobytes()
        for _ in range(NUM_PROMPTS)
    ]
    frames = [_frames(number, prompt) for number, prompt in enumerate(prompts)]
    chains = [controller.hashes(prompt) for prompt in prompts]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _fill(controller.index, [view.key for view in views], chains, case.num_index_blocks)
    index_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    for number in range(50):
        controller.place(frames[-1 - number])
    gc.collect()
    gc.freeze()
    times = [0] * num_placements
    for number in range(num_placements):
        start = perf_counter_ns()
        controller.place(frames[number % NUM_PROMPTS])
        if number % HEARTBEAT_EVERY == 0:
            view = controller.cluster.get(views[number % len(views)].key)
            if view is not None:
                controller.cluster.update(replace(view, pairings=dict(view.pairings)))
        times[number] = perf_counter_ns() - start
    gc.unfreeze()
    total = sum(times) / 1e9
    times.sort()
    rate, p99 = num_placements / total, times[num_placements * 99 // 100] / 1e6
    row: dict[str, Cell] = {
        "policy": case.policy,
        "prompt tokens": case.num_tokens,
        "workers": f"{case.num_prefill}P{case.num_decode}D",
        "index blocks": controller.index.num_blocks,
        "placements/s": round(rate),
        "p50 ms": round(times[num_placements // 2] / 1e6, 4),
        "p99 ms": round(p99, 4),
        "index grew MiB": round(index_mib),
        "met": "-",
    }
    if case.is_target:
        least_rate, most_p99 = TARGETS[case.num_tokens]
        row["met"] = rate >= least_rate and p99 < most_p99
    return row


def _frames(number: int, prompt: bytes) -> list[bytes]:
    message = SubmitRequest(
        request_id=RequestId(f"req-{number:016x}"),
        params=SamplingParams(seed=number, max_tokens=256, eos_token_ids=(2,)),
        num_prompt_tokens=len(prompt) // 4,
    )
    codec: Codec[GatewayToController] = Codec(GatewayToController)
    envelope = Envelope("gateway-0", Epoch(1), 0, number, message.request_id)
    return codec.encode(envelope, message, (prompt,))


def cases() -> list[Case]:
    """Return the targets, then all policies, then the sweeps over workers and index size."""
    found = [Case("flowkv", num_tokens, 48, 96, 1_000_000) for num_tokens in TARGETS]
    found += [Case(policy, 8192, 48, 96, 1_000_000) for policy in POLICIES]
    for num_tokens in TARGETS:
        found += [Case("flowkv", num_tokens, p, d, 1_000_000) for p, d in WORKERS]
        found += [Case("flowkv", num_tokens, 48, 96, size) for size in INDEX_BLOCKS]
    return list(dict.fromkeys(found))


def plot(rows: list[dict[str, Cell]]) -> str:
    """Draw p50 in microseconds against workers and against index size, as SVG."""
    chosen = [row for row in rows if row["policy"] == "flowkv"]
    by_workers = [row for row in chosen if int(row["index blocks"]) > 900_000]
    by_blocks = [row for row in chosen if row["workers"] == "48P96D"]
    body = _panel(60, "workers", by_workers, lambda row: str(row["workers"]))
    body += _panel(400, "blocks in the index", by_blocks, lambda row: f"{row['index blocks']:,}")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 300" font-family="sans-serif" '
        'font-size="11"><rect width="720" height="300" fill="white"/>' + body + "</svg>\n"
    )


def _panel(
    left: int, title: str, rows: list[dict[str, Cell]], label: Callable[[dict[str, Cell]], str]
) -> str:
    """Return one chart, 260 wide: a line for each prompt length over evenly spaced cases."""
    cost = {id(row): 1000 * float(row["p50 ms"]) for row in rows}
    top = 100 * (int(max(cost.values()) / 100) + 1)
    parts = [
        f'<text x="{left + 130}" y="20" text-anchor="middle">µs per placement, by {title}</text>'
    ]
    for share in (0.0, 0.5, 1.0):
        y = 240 - 200 * share
        parts.append(f'<path d="M{left} {y}H{left + 260}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{top * share:.0f}</text>')
    for num_tokens, color in zip(TARGETS, ("#1f77b4", "#d62728"), strict=True):
        line = [row for row in rows if row["prompt tokens"] == num_tokens]
        places = [left + 20 + 220 * n / max(1, len(line) - 1) for n in range(len(line))]
        points = [(x, 240 - 200 * cost[id(row)] / top) for x, row in zip(places, line, strict=True)]
        path = " ".join(f"{x:.0f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        x, y = points[-1]
        parts.append(
            f'<text x="{x:.0f}" y="{y - 8:.0f}" text-anchor="end" fill="{color}">'
            f"{num_tokens} tokens</text>"
        )
        if num_tokens == next(iter(TARGETS)):
            parts += [
                f'<text x="{x:.0f}" y="258" text-anchor="middle">{label(row)}</text>'
                for x, row in zip(places, line, strict=True)
            ]
    return "".join(parts)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placements", type=int, default=5000, help="of each row")
    parser.add_argument("--only-targets", action="store_true", help="skip policies and sweeps")
    parser.add_argument("--plot", action="store_true", help=f"draw {PLOT.name}")
    args = parser.parse_args(argv)
    rows: list[dict[str, Cell]] = []
    for case in cases():
        if case.is_target or not args.only_targets:
            rows.append(measure(case, args.placements))
            print(f"{case.policy} {case.num_tokens}: {rows[-1]['p50 ms']} ms", flush=True)
    print_table(rows)
    if args.only_targets:
        return 0 if all(row["met"] is True for row in rows) else 1
    print(f"kept in benchmarks/results/{write_results('placement', argv, rows).name}")
    if args.plot:
        PLOT.write_text(plot(rows), encoding="utf-8")
    return 0 if all(row["met"] in (True, "-") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
