"""What one placement costs the controller: ``python -m benchmarks.placement``.

The controller's core is alone, as its shell drives it. One placement is one request from its
frames to the effects that place it: decode the message, hash the prompt, walk the prefix index,
choose, and keep the record. Encoding what is then sent is timed beside it. Between placements,
and not timed, an earlier request ends and its workers send heartbeats with another load. Times
are taken by the clock and, as "core", of this thread alone: what others on the machine add is the
difference.

Prompts are random; half of them have a cached prefix on up to four workers, the rest of the index
is blocks of other prompts. ``--plot`` draws cost against workers and index size into
``docs/images/placement_cost.svg``.
"""

import argparse
import gc
import resource
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter_ns, thread_time_ns

import numpy as np

from benchmarks.report import Cell, print_table, write_results
from common.ids import Epoch, GatewayId, RequestId, WorkerId
from common.kv.prefix_cache import PrefixCache
from common.messages.admin import RoleControl
from common.messages.codec import Codec, Envelope, Received
from common.messages.control import (
    DecodeStarted,
    GatewayHello,
    Heartbeat,
    KVIndexEvents,
    RequestFinished,
    SubmitRequest,
    WorkerHello,
)
from common.messages.fields import (
    KVCounts,
    Mode,
    PairStatus,
    PeerInfo,
    Role,
    WorkerLoad,
    WorkerRates,
)
from common.sampling import SamplingParams
from services.controller.core import ControllerCore
from services.controller.effects import Effect, FromPeer, MessageReceived, PeerKey, Send, ToPeer
from services.controller.limits import ControllerLimits

BLOCK_SIZE = 64
NUM_PROMPTS = 1000
NUM_WARM = 200
NUM_OPEN = 100
NUM_BLOCKS = 16384
FINGERPRINT = "0123456789abcdef"
GATEWAY = "gateway-0"
HOST = "host"
POLICIES = (
    *("round_robin", "random", "least_loaded", "power_of_two", "prefix_aware", "flowkv"),
    "dualpath",
)
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


class Rig:
    """A core with a cluster in service, all pairs of which work."""

    def __init__(self, case: Case) -> None:
        limits = ControllerLimits(policy=case.policy, role_control=RoleControl.AUTO)
        self.core = ControllerCore(limits, HOST, 0.0)
        self.now = 0.0
        self._dice = Random(1)
        self._incoming: Codec[FromPeer] = Codec(FromPeer)
        self._outgoing: Codec[ToPeer] = Codec(ToPeer)
        self._hasher = PrefixCache(BLOCK_SIZE, FINGERPRINT)
        names = [(f"prefill-{n}", Role.PREFILL) for n in range(case.num_prefill)]
        names += [(f"decode-{n}", Role.DECODE) for n in range(case.num_decode)]
        self.workers = [name for name, _ in names]
        for number, (name, role) in enumerate(names):
            self.say(name, _hello(name, role, number))
        self.say(GATEWAY, _gateway_hello())
        self._pairs = tuple(
            PairStatus(
                worker_id=WorkerId(name),
                epoch=Epoch(1),
                transport="nccl",
                reason="",
                bytes_per_second=self._dice.uniform(1e10, 5e10),
            )
            for name, role in names
            if role is Role.DECODE
        )
        self._rates = {name: self._draw_rates() for name in self.workers}
        for name in self.workers:
            self.beat((name, Epoch(1)))

    def say(self, sender: str, message: FromPeer, payload: tuple[bytes, ...] = ()) -> list[Effect]:
        """Let a peer say something."""
        self.now += 1e-4
        received = Received(Envelope(sender, Epoch(1), 0, 1, "bench"), message, payload)
        return self.core.handle(MessageReceived(received), self.now)

    def hashes(self, prompt: bytes) -> list[bytes]:
        """Return the hash of each whole block of a prompt."""
        return list(self._hasher.chain(None, np.frombuffer(prompt, np.int32)))

    def beat(self, key: PeerKey) -> None:
        """Let a worker tell another load."""
        is_prefill = key[0].startswith("prefill")
        referenced = self._dice.randrange(NUM_BLOCKS // 2)
        load = WorkerLoad(
            num_waiting=0,
            num_prefilling=0,
            num_sending=0,
            num_receiving=0,
            num_decoding=0 if is_prefill else self._dice.randrange(64),
            uncomputed_tokens=self._dice.randrange(8192) if is_prefill else 0,
            num_steps=1,
        )
        free = NUM_BLOCKS - referenced
        counts = KVCounts(
            total=NUM_BLOCKS,
            free=free,
            referenced=referenced,
            cached=0,
            in_transfer=0,
            largest_free_run=free,
        )
        beat = Heartbeat(
            kv=counts,
            load=load,
            is_draining=False,
            is_quarantined=False,
            pairs=self._pairs if is_prefill else (),
            mode=Mode.BALANCED,
            rates=self._rates[key[0]],
            index_sequence=1,
            num_orders=self.core.members.workers[key].num_orders,
        )
        self.say(key[0], beat)

    def place(self, frames: list[bytes]) -> list[Effect]:
        """Take in the request in these frames."""
        self.now += 1e-4
        return self.core.handle(MessageReceived(self._incoming.decode(frames)), self.now)

    def encode(self, effects: list[Effect]) -> None:
        """Encode what is to be sent."""
        for effect in effects:
            if isinstance(effect, Send):
                envelope = Envelope("controller", Epoch(1), 0, 1, effect.cause)
                self._outgoing.encode(envelope, effect.message, effect.payload)

    def end(self, request_id: RequestId) -> None:
        """Let the request decode and finish, and its workers tell another load."""
        record = self.core.book.requests[request_id]
        prefill, decode = record.prefill, record.decode
        if prefill is None or decode is None:
            raise RuntimeError("a cluster with room placed nothing")
        if prefill != decode:
            self.say(decode[0], DecodeStarted(request_id=request_id))
            self.beat(prefill)
        self.say(decode[0], RequestFinished(request_id=request_id, was_cancelled=False))
        self.beat(decode)

    def fill(self, chains: list[list[bytes]], size: int) -> None:
        """Give the workers ``size`` blocks, prefixes of every second chain among them."""
        dice, keys = Random(2), self.workers
        held: dict[str, list[bytes]] = {key: [] for key in keys}
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
            self.say(key, KVIndexEvents(sequence=1, is_snapshot=True), (added, b""))

    def _draw_rates(self) -> WorkerRates:
        return WorkerRates(
            prefill_tokens_per_second=self._dice.uniform(15_000, 25_000),
            decode_step_seconds=self._dice.uniform(0.01, 0.04),
            decode_tokens_per_second=self._dice.uniform(1000, 3000),
        )


def _hello(name: str, role: Role, number: int) -> WorkerHello:
    peer = PeerInfo(
        worker_id=WorkerId(name),
        epoch=Epoch(1),
        role=role,
        pid=number + 1,
        host=HOST,
        handoff_endpoint=f"ipc:///tmp/{name}",
        dtype="bfloat16",
        layout_fingerprint=FINGERPRINT,
        transports=("nccl",),
    )
    return WorkerHello(
        peer=peer,
        model_fingerprint=FINGERPRINT,
        model_name="model",
        max_model_len=131072,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        block_bytes=8 * 2**20,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
    )


def _gateway_hello() -> GatewayHello:
    return GatewayHello(
        gateway_id=GatewayId(GATEWAY),
        epoch=Epoch(1),
        pid=10_000,
        host=HOST,
        tokens_endpoint="ipc:///tmp/tokens",
        model_fingerprint=FINGERPRINT,
        url="http://127.0.0.1:1",
    )


def measure(case: Case, num_placements: int) -> dict[str, Cell]:
    """Return the row of one case."""
    rig = Rig(case)
    tokens = np.random.default_rng(1)
    prompts = [
        tokens.integers(0, 50_000, case.num_tokens, dtype=np.int32).tobytes()
        for _ in range(NUM_PROMPTS)
    ]
    requests = [_frames(number, prompt) for number, prompt in enumerate(prompts)]
    chains = [rig.hashes(prompt) for prompt in prompts]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rig.fill(chains, case.num_index_blocks)
    index_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    gc.collect()
    gc.freeze()
    walls: list[int] = []
    cores: list[int] = []
    encoding = 0
    open_requests: deque[RequestId] = deque()
    for number in range(NUM_WARM + num_placements):
        request_id, frames = requests[number % NUM_PROMPTS]
        wall, core = perf_counter_ns(), thread_time_ns()
        effects = rig.place(frames)
        placed = thread_time_ns()
        cores.append(placed - core)
        walls.append(perf_counter_ns() - wall)
        rig.encode(effects)
        encoding += thread_time_ns() - placed
        open_requests.append(request_id)
        if len(open_requests) > NUM_OPEN:
            rig.end(open_requests.popleft())
    gc.unfreeze()
    seconds = sum(cores[NUM_WARM:]) / 1e9
    walls, cores = sorted(walls[NUM_WARM:]), sorted(cores[NUM_WARM:])
    middle, last = num_placements // 2, num_placements * 99 // 100
    row: dict[str, Cell] = {
        "policy": case.policy,
        "prompt tokens": case.num_tokens,
        "workers": f"{case.num_prefill}P{case.num_decode}D",
        "index blocks": rig.core.prefixes.index.num_blocks,
        "placements/core-s": round(num_placements / seconds),
        "p50 ms": round(walls[middle] / 1e6, 4),
        "p99 ms": round(walls[last] / 1e6, 4),
        "core p50 ms": round(cores[middle] / 1e6, 4),
        "core p99 ms": round(cores[last] / 1e6, 4),
        "encoding us": round(encoding / 1e3 / (NUM_WARM + num_placements)),
        # Later cases take memory that earlier ones gave back.
        "index MiB": round(index_mib) if case == cases()[0] else "-",
        "met": "-",
    }
    if case.is_target:
        least_rate, most_p99 = TARGETS[case.num_tokens]
        is_fast = num_placements / seconds >= least_rate
        row["met"] = is_fast and walls[last] / 1e6 < most_p99
    return row


def _frames(number: int, prompt: bytes) -> tuple[RequestId, list[bytes]]:
    message = SubmitRequest(
        request_id=RequestId(f"req-{number:016x}"),
        params=SamplingParams(seed=number, max_tokens=256, eos_token_ids=(2,)),
        num_prompt_tokens=len(prompt) // 4,
    )
    codec: Codec[FromPeer] = Codec(FromPeer)
    envelope = Envelope(GATEWAY, Epoch(1), 0, number, message.request_id)
    return message.request_id, codec.encode(envelope, message, (prompt,))


def cases() -> list[Case]:
    """Return the targets, then all policies, then the sweeps over workers and index size."""
    found = [Case("flowkv", num_tokens, 48, 96, 1_000_000) for num_tokens in TARGETS]
    found += [Case(policy, 8192, 48, 96, 1_000_000) for policy in POLICIES]
    for num_tokens in TARGETS:
        found += [Case("flowkv", num_tokens, p, d, 1_000_000) for p, d in WORKERS]
        found += [Case("flowkv", num_tokens, 48, 96, size) for size in INDEX_BLOCKS]
    return list(dict.fromkeys(found))


def plot(rows: list[dict[str, Cell]]) -> str:
    """Draw the median core time against workers and against index size, as SVG."""
    chosen = [row for row in rows if row["policy"] == "flowkv"]
    by_workers = [row for row in chosen if int(row["index blocks"]) > 900_000]
    by_workers.sort(key=lambda row: sum(map(int, str(row["workers"])[:-1].split("P"))))
    by_blocks = [row for row in chosen if row["workers"] == "48P96D"]
    by_blocks.sort(key=lambda row: int(row["index blocks"]))
    body = _panel(
        60, "µs of one core per placement, by workers", by_workers, lambda row: str(row["workers"])
    )
    body += _panel(
        400,
        "µs of one core per placement, by blocks in the index",
        by_blocks,
        lambda row: f"{row['index blocks']:,}",
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 300" font-family="sans-serif" '
        'font-size="11"><rect width="720" height="300" fill="white"/>' + body + "</svg>\n"
    )


def _panel(
    left: int, title: str, rows: list[dict[str, Cell]], label: Callable[[dict[str, Cell]], str]
) -> str:
    """Return one chart, 260 wide: a line for each prompt length over evenly spaced cases."""
    cost = {id(row): 1000 * float(row["core p50 ms"]) for row in rows}
    top = 100 * (int(max(cost.values()) / 100) + 1)
    parts = [f'<text x="{left + 130}" y="20" text-anchor="middle">{title}</text>']
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
            print(f"{case.policy} {case.num_tokens}: {rows[-1]['core p50 ms']} ms", flush=True)
    print_table(rows)
    if args.only_targets:
        return 0 if all(row["met"] is True for row in rows) else 1
    print(f"kept in benchmarks/results/{write_results('placement', argv, rows).name}")
    if args.plot:
        PLOT.write_text(plot(rows), encoding="utf-8")
    return 0 if all(row["met"] in (True, "-") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
