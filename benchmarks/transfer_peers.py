"""One request's KV between two processes: our ``shm`` and ``tcp`` beside NIXL's, by turns.

256 MiB are written as one run and as 1 024 scattered fragments of 256 KiB, and beside them go the
bare limits: a memcpy into another process's memory and a plain TCP stream between the same two
processes. All ways take turns in random order; medians count. Ours compute a checksum of each
block, NIXL computes none.

NIXL is no dependency of the project. Put it into an environment of its own and name it::

    python3 -m venv /tmp/nixl
    /tmp/nixl/bin/pip install --index-url https://download.pytorch.org/whl/cpu torch
    /tmp/nixl/bin/pip install numpy nixl-cu12
    python -m benchmarks.transfer_peers --nixl /tmp/nixl/bin/python

Torch comes first and in its CPU build, or NIXL pulls several GB of CUDA. Without ``--nixl`` our
transports are compared with the bare limits alone.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import structlog

from benchmarks.report import Cell, print_table, write_results
from common.ids import TransferId
from common.kv.pool import KVPool, PeerPool
from common.messages.fields import PoolHandle, TcpPoolHandle
from common.transfer.shm import ShmBackend
from common.transfer.tcp import TcpBackend
from common.transfer.tcp_export import TcpExport

ROOT = Path(__file__).parents[1]
NUM_FRAGMENTS = 1024
FRAGMENT_BYTES = 256 * 1024
NUM_BYTES = NUM_FRAGMENTS * FRAGMENT_BYTES
STALL_SECONDS = 20.0
TRANSFER = TransferId("tr-benchmark")
MIN_TCP_SHARE = 0.8
CASES = {"one run": 1, "1024 fragments": NUM_FRAGMENTS}
Write = Callable[[], float]


# ---- the second process --------------------------------------------------------------------------


def own_pool() -> None:
    """Own a pool that may be written over shared memory, ``tcp`` and a plain socket."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    pool = filled_pool()
    export = TcpExport(pool, STALL_SECONDS)
    token = export.grant(TRANSFER, range(NUM_FRAGMENTS))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        memory, network = pool.handle(), export.handle()
        told = [
            [memory.pid, memory.fd, memory.nonce.hex()],
            [network.port, network.secret.hex(), token.hex()],
            listener.getsockname()[1],
        ]
        print(json.dumps(told), flush=True)
        plain, _ = listener.accept()
    thread = threading.Thread(target=receive_plain, args=(plain, pool.buffer), daemon=True)
    thread.start()
    sys.stdin.read()
    export.close()


def receive_plain(sock: socket.socket, memory: memoryview) -> None:
    """Fill the memory over and over, and say so each time."""
    while True:
        num_bytes = 0
        while num_bytes < NUM_BYTES:
            received = sock.recv_into(memory[num_bytes:NUM_BYTES])
            if received == 0:
                return
            num_bytes += received
        sock.sendall(b"\0")


def filled_pool() -> KVPool:
    pool = KVPool(NUM_FRAGMENTS, FRAGMENT_BYTES)
    numbers = np.frombuffer(pool.buffer, dtype=np.uint64)
    numbers[:] = np.random.default_rng(0).integers(0, 2**63, numbers.size, dtype=np.uint64)
    return pool


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
def our_ways() -> Iterator[dict[tuple[str, str], Write]]:
    """Yield the ways into a pool of a second process of ours, by (way, case)."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transfer_peers", "--own-pool"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        memory, network, plain_port = json.loads(owner.stdout.readline())
        sizes = {
            "num_blocks": NUM_FRAGMENTS,
            "block_bytes": FRAGMENT_BYTES,
            "num_bytes": NUM_BYTES,
        }
        mapped = PoolHandle(
            kind="memfd", pid=memory[0], fd=memory[1], nonce=bytes.fromhex(memory[2]), **sizes
        )
        served = TcpPoolHandle(
            kind="tcp",
            host="127.0.0.1",
            port=network[0],
            secret=bytes.fromhex(network[1]),
            **sizes,
        )
        token = bytes.fromhex(network[2])
        source = filled_pool()
        with socket.create_connection(("127.0.0.1", plain_port)) as plain:
            shm, tcp = ShmBackend(source).open_peer(mapped), TcpBackend(source, STALL_SECONDS)
            link = tcp.open_peer(served)
            ways = bare_ways(source, PeerPool.open(mapped), plain)
            for case, num_fragments in CASES.items():
                pairs = block_pairs(num_fragments)
                ways["shm", case] = timed(partial(shm.write, *pairs))
                ways["tcp", case] = timed(partial(link.write, *pairs, token))
            yield ways
            link.close()
            shm.close()
        owner.communicate()


def bare_ways(source: KVPool, peer: PeerPool, plain: socket.socket) -> dict[tuple[str, str], Write]:
    target = np.frombuffer(peer.buffer, dtype=np.uint8)
    own = np.frombuffer(source.buffer, dtype=np.uint8)

    def stream() -> None:
        plain.sendall(source.buffer)
        assert plain.recv(1) == b"\0", "the second process is gone"

    return {
        ("bare memcpy", "one run"): timed(lambda: np.copyto(target, own)),
        ("bare stream", "one run"): timed(stream),
    }


@contextmanager
def nixl_ways(python: str, way: str, tls: str | None) -> Iterator[dict[tuple[str, str], Write]]:
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
                [python, str(ROOT / "benchmarks" / "nixl_agent.py"), name, str(NUM_BYTES)],
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
        for own, peer in (("shm", "NIXL, shared memory"), ("tcp", "NIXL, tcp")):
            if (peer, case) in medians:
                ratio = medians[peer, case] / medians[own, case]
                found.append((f"{own}, {case}, of {peer}", ratio, 1.0))
    return found


def main(argv: list[str]) -> int:
    if argv == ["--own-pool"]:
        own_pool()
        return 0
    parser = argparse.ArgumentParser(prog="benchmarks.transfer_peers")
    parser.add_argument("--nixl", metavar="PYTHON", help="interpreter of an environment with NIXL")
    parser.add_argument("--turns", type=int, default=15, help="turns that count (15)")
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        ways = stack.enter_context(our_ways())
        if arguments.nixl:
            for way, tls in (("NIXL, shared memory", None), ("NIXL, tcp", "tcp")):
                ways |= stack.enter_context(nixl_ways(arguments.nixl, way, tls))
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
    print(f"kept in benchmarks/results/{write_results('transfer_peers', argv, rows).name}")
    return 0 if all(ratio >= target for _, ratio, target in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
