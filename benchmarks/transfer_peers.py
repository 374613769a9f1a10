"""One request's KV between two processes: our ``shm``, ``tcp`` and ``rdma`` beside NIXL, by turns.

256 MiB are written as one run and as 1 024 scattered fragments of 256 KiB, and beside them go the
bare limits: a memcpy into another process's memory and a plain TCP stream between the same two
processes. All ways take turns in random order; medians count. Ours compute a checksum of each
block, NIXL computes none.

``rdma`` is measured where NIXL is installed beside the project (``pip install '.[rdma]'``).
NIXL alone is measured in any environment that has it; put it into one of its own and name it::

    python3 -m venv /tmp/nixl
    /tmp/nixl/bin/pip install --index-url https://download.pytorch.org/whl/cpu torch
    /tmp/nixl/bin/pip install numpy nixl-cu12
    python -m benchmarks.transfer_peers --nixl /tmp/nixl/bin/python

Torch comes first and in its CPU build, or NIXL pulls several GB of CUDA. Without ``--nixl`` our
transports are compared with the bare limits alone. ``--namespaces`` puts the two processes into
network namespaces that are joined by a virtual Ethernet cable, as two hosts are (as root).
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.report import Cell, print_table, write_results
from common.kv.pool import PeerPool
from common.transfer.bench_peer import STALL_SECONDS, bench_peer, filled_pool, open_bench_rdma
from common.transfer.shm import ShmBackend
from common.transfer.tcp import TcpBackend
from tests.support.two_hosts import two_hosts, why_no_hosts

ROOT = Path(__file__).parents[1]
NUM_FRAGMENTS = 1024
FRAGMENT_BYTES = 256 * 1024
NUM_BYTES = NUM_FRAGMENTS * FRAGMENT_BYTES
MIN_TCP_SHARE = 0.8
MIN_RDMA_SHARE = 0.6
"""Of NIXL alone, which reads no byte once more for a checksum."""
CASES = {"one run": 1, "1024 fragments": NUM_FRAGMENTS}
Write = Callable[[], float]


# ---- ways to write -------------------------------------------------------------------------------


def timed(write: Callable[[], object]) -> Write:
    def run() -> float:
        start = time.perf_counter()
        write()
        return time.perf_counter() - start

    return run


def block_pairs(num_fragments: int) -> tuple[list[int], list[int]]:
    """Return what each case moves: adjacent blocks, or blocks without any order."""
    if num_fragments == 1:
        return list(range(NUM_FRAGMENTS)), list(range(NUM_FRAGMENTS))
    blocks = range(NUM_FRAGMENTS)
    return (
        random.Random(1).sample(blocks, NUM_FRAGMENTS),
        random.Random(2).sample(blocks, NUM_FRAGMENTS),
    )


@contextmanager
def our_ways(host: str, launcher: Sequence[str]) -> Iterator[dict[tuple[str, str], Write]]:
    """Yield the ways into a pool of a second process of ours, by (way, case)."""
    with bench_peer(NUM_FRAGMENTS, FRAGMENT_BYTES, host=host, launcher=launcher) as peer:
        source = filled_pool(NUM_FRAGMENTS, FRAGMENT_BYTES)
        mapped = PeerPool.open(peer.memory)
        target = np.frombuffer(mapped.buffer, dtype=np.uint8)
        own = np.frombuffer(source.buffer, dtype=np.uint8)
        shm = ShmBackend(source).open_peer(peer.memory)
        tcp = TcpBackend(source, STALL_SECONDS).open_peer(peer.network)
        ways: dict[tuple[str, str], Write] = {
            ("bare memcpy", "one run"): timed(lambda: np.copyto(target, own)),
            ("bare stream", "one run"): timed(lambda: peer.stream(source.buffer)),
        }
        for case, num_fragments in CASES.items():
            pairs = block_pairs(num_fragments)
            ways["shm", case] = timed(partial(shm.write, *pairs))
            ways["tcp", case] = timed(partial(tcp.write, *pairs, peer.token))
        if peer.rdma is not None:
            own_rdma, backend = open_bench_rdma(source)
            rdma = backend.open_peer(peer.rdma)
            for case, num_fragments in CASES.items():
                pairs = block_pairs(num_fragments)
                ways["rdma", case] = timed(partial(rdma.write, *pairs, peer.token))
        yield ways
        if peer.rdma is not None:
            rdma.close()
            own_rdma.close()
        tcp.close()
        shm.close()


@contextmanager
def nixl_ways(
    python: str, way: str, tls: str | None, launcher: Sequence[str]
) -> Iterator[dict[tuple[str, str], Write]]:
    """Yield NIXL's ways between two processes of its own; ``tls`` limits its transports.

    Its threads poll without a rest, so both processes stand still while others have their turn.
    """
    environment = {**os.environ, "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
    if tls is not None:
        environment["UCX_TLS"] = tls
    with ExitStack() as stack:
        sides: list[subprocess.Popen[str]] = []
        told: list[object] = []
        for name in ("target", "initiator"):
            side = subprocess.Popen(
                [
                    *(launcher if name == "target" else ()),
                    python,
                    str(ROOT / "benchmarks" / "nixl_agent.py"),
                    name,
                    str(NUM_BYTES),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            stack.enter_context(side)
            stack.callback(side.kill)
            sides.append(side)
            told.append(next_answer(side))
        say(sides[0], [None, 0])
        say(sides[1], told[0])

        def write(num_fragments: int) -> float:
            signal_all(sides, signal.SIGCONT)
            for _ in range(2):  # the first one wakes its threads
                say(sides[1], num_fragments)
                seconds = next_answer(sides[1])
            signal_all(sides, signal.SIGSTOP)
            assert isinstance(seconds, float), f"NIXL says {seconds}"
            return seconds

        yield {(way, case): partial(write, count) for case, count in CASES.items()}


def signal_all(sides: list[subprocess.Popen[str]], number: signal.Signals) -> None:
    for side in sides:
        side.send_signal(number)


def say(side: subprocess.Popen[str], value: object) -> None:
    assert side.stdin is not None
    side.stdin.write(json.dumps(value) + "\n")
    side.stdin.flush()


def next_answer(side: subprocess.Popen[str]) -> object:
    """Return the next line of JSON; NIXL's own lines are passed over."""
    assert side.stdout is not None
    for line in side.stdout:
        with suppress(ValueError):
            answer: object = json.loads(line)
            return answer
    raise RuntimeError("NIXL ended; run benchmarks/nixl_agent.py by hand to see why")


# ---- comparison ----------------------------------------------------------------------------------


def measure(ways: dict[tuple[str, str], Write], num_turns: int) -> dict[tuple[str, str], float]:
    """Return the median seconds of each way; the first turn, which connects, does not count."""
    order = random.Random(0)
    taken: dict[tuple[str, str], list[float]] = {name: [] for name in ways}
    for turn in range(num_turns + 1):
        for name in order.sample(list(ways), len(ways)):
            seconds = ways[name]()
            if turn:
                taken[name].append(seconds)
        print(f"turn {turn} of {num_turns}", file=sys.stderr, flush=True)
    return {name: median(values) for name, values in taken.items()}


def verdicts(medians: dict[tuple[str, str], float]) -> list[tuple[str, float, float]]:
    """Return each target: what it says, the ratio reached and the one asked for."""
    found: list[tuple[str, float, float]] = []
    for case in CASES:
        stream, tcp = medians["bare stream", "one run"], medians["tcp", case]
        found.append((f"tcp, {case}, of a bare stream", stream / tcp, MIN_TCP_SHARE))
        for own, peer, target in (
            ("shm", "NIXL, shared memory", 1.0),
            ("tcp", "NIXL, tcp", 1.0),
            ("rdma", "NIXL, shared memory", MIN_RDMA_SHARE),
        ):
            if (peer, case) in medians and (own, case) in medians:
                ratio = medians[peer, case] / medians[own, case]
                found.append((f"{own}, {case}, of {peer}", ratio, target))
    return found


def run_between_namespaces(argv: list[str]) -> int:
    """Run the whole benchmark once more on one of two hosts, its peers on the other."""
    if (why := why_no_hosts()) is not None:
        print(f"this machine cannot play two hosts: {why}", file=sys.stderr)
        return 2
    with two_hosts() as cable:
        peer = ("--peer", cable.b.address, json.dumps(cable.b.inside()))
        again = (sys.executable, "-m", "benchmarks.transfer_peers", *argv, *peer)
        return subprocess.run(cable.a.inside(*again), check=False).returncode


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.transfer_peers")
    parser.add_argument("--nixl", metavar="PYTHON", help="interpreter of an environment with NIXL")
    parser.add_argument("--turns", type=int, default=15, help="turns that count (15)")
    parser.add_argument("--namespaces", action="store_true", help="two network namespaces")
    parser.add_argument("--peer", nargs=2, metavar=("HOST", "LAUNCHER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.namespaces and arguments.peer is None:
        return run_between_namespaces(argv)
    host, launcher = arguments.peer or ("127.0.0.1", "[]")
    with ExitStack() as stack:
        ways = stack.enter_context(our_ways(host, json.loads(launcher)))
        if arguments.nixl:
            for way, tls in (("NIXL, shared memory", None), ("NIXL, tcp", "tcp")):
                ways |= stack.enter_context(
                    nixl_ways(arguments.nixl, way, tls, json.loads(launcher))
                )
        medians = measure(ways, arguments.turns)
    rows: list[dict[str, Cell]] = [
        {
            "way": way,
            "case": case,
            "ms": round(seconds * 1e3, 2),
            "GB/s": round(NUM_BYTES / seconds / 1e9, 2),
        }
        for (way, case), seconds in sorted(medians.items())
    ]
    print_table(rows)
    found = verdicts(medians)
    for what, ratio, target in found:
        print(f"{what}: {ratio:.2f} (target {target:g})")
    name = "transfer_peers_namespaces" if arguments.namespaces else "transfer_peers"
    path = write_results("transfer_peers", argv, rows, name=name)
    print(f"kept in benchmarks/results/{path.name}")
    return 0 if all(ratio >= target for _, ratio, target in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
