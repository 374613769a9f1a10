"""What a gateway adds to a token's way: ``python -m benchmarks.gateway_load``.

Real gateway processes; the cluster behind them and the clients before them are played by this
process, on the same machine. Streams get 10 tokens/s each, in bursts as engine steps send them.

``floor_p99_ms`` is the round trip to a ``cat`` at the same time: what the machine itself adds to
the way through one more process. ``gateway_queued`` is the share of the time in which a gateway
could run and had no core. Where either is high, others use the cores and the times say little.
"""

import argparse
import asyncio
import gc
import resource
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import psutil
import uvloop

from benchmarks.report import Cell, print_table, write_results
from tests.support.gateway_load import (
    GatewayRig,
    LeanStream,
    added_seconds,
    play_steadily,
    running_gateways,
)

TOKENS_PER_STREAM_SECOND = 10.0
MAX_P99_MILLISECONDS = 10.0
OPENING_AT_ONCE = 32
ENDING_SECONDS = 30.0
MIN_SHARE_OF_RATE = 0.97
PING_SECONDS = 0.01


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def _open_all(rig: GatewayRig, count: int, max_tokens: int) -> list[LeanStream]:
    streams: list[LeanStream] = []
    while len(streams) < count:
        size = min(OPENING_AT_ONCE, count - len(streams))
        streams += await asyncio.gather(*(rig.open_stream(max_tokens) for _ in range(size)))
        await rig.cluster.wait_for_streams(len(streams))
    return streams


async def measure(
    num_streams: int, burst: int, num_gateways: int, seconds: float
) -> dict[str, Cell]:
    """Run one load and return its row."""
    max_tokens = int(seconds * TOKENS_PER_STREAM_SECOND)
    rate = num_streams * TOKENS_PER_STREAM_SECOND
    with tempfile.TemporaryDirectory(prefix="fp-") as root:
        async with running_gateways(Path(root), num_gateways, log_level="warning") as rig:
            streams = await _open_all(rig, num_streams, max_tokens)
            processes = [psutil.Process(pid) for pid in rig.pids]
            own = psutil.Process()
            before = [_cpu_seconds(process) for process in (*processes, own)]
            queued = sum(_queued_seconds(pid) for pid in rig.pids)
            gc.collect()
            gc.disable()
            started = perf_counter()
            round_trips: list[float] = []
            async with asyncio.TaskGroup() as tasks:
                pinging = tasks.create_task(_ping_cat(round_trips))
                await play_steadily(rig.cluster, rate, burst, started + 10 * seconds)
                sent_seconds = perf_counter() - started
                async with asyncio.timeout(ENDING_SECONDS):
                    await asyncio.gather(*(stream.is_lost.wait() for stream in streams))
                pinging.cancel()
            wall = perf_counter() - started
            gc.enable()
            after = [_cpu_seconds(process) for process in (*processes, own)]
            queued = sum(_queued_seconds(pid) for pid in rig.pids) - queued
            delays = sorted(added_seconds(rig.cluster, streams))
    num_bad = sum(
        not stream.is_complete or len(stream.received_at) != max_tokens for stream in streams
    )
    cpu = [(end - begin) / wall for begin, end in zip(before, after, strict=True)]
    return {
        "gateways": num_gateways,
        "streams": num_streams,
        "burst": burst,
        "asked_tokens_s": round(rate),
        "sent_tokens_s": round(len(delays) / sent_seconds),
        "added_p50_ms": 1e3 * _quantile(delays, 0.5),
        "added_p99_ms": 1e3 * _quantile(delays, 0.99),
        "added_max_ms": 1e3 * delays[-1],
        "floor_p99_ms": 1e3 * _quantile(sorted(round_trips), 0.99),
        "gateway_cpu": round(sum(cpu[:-1]) / num_gateways, 3),
        "gateway_queued": round(queued / wall / num_gateways, 3),
        "gateway_us_per_token": round(1e6 * sum(cpu[:-1]) * wall / len(delays), 1),
        "generator_cpu": round(cpu[-1], 3),
        "failed_streams": num_bad,
    }


async def _ping_cat(round_trips: list[float]) -> None:
    """Measure round trips through a process that only copies, until cancelled."""
    cat = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert cat.stdin is not None
    assert cat.stdout is not None
    try:
        while True:
            begun = perf_counter()
            cat.stdin.write(b".")
            await cat.stdout.readexactly(1)
            round_trips.append(perf_counter() - begun)
            await asyncio.sleep(PING_SECONDS)
    finally:
        cat.kill()
        await cat.wait()


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _queued_seconds(pid: int) -> float:
    """Return how long a process's main thread has waited for a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_load")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--gateways", type=int, default=2, help="for the larger load")
    parser.add_argument("--only", choices=("small", "large"))
    args = parser.parse_args(argv)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    loads = {"small": (500, 64, 1), "large": (1100, 128, args.gateways)}
    rows = [
        uvloop.run(measure(*load, args.seconds))
        for name, load in loads.items()
        if args.only in (None, name)
    ]
    print_table(rows)
    print(f"kept in {write_results('gateway_load', argv, rows)}")
    is_met = all(
        row["failed_streams"] == 0
        and float(row["added_p99_ms"]) <= MAX_P99_MILLISECONDS
        and float(row["sent_tokens_s"]) >= MIN_SHARE_OF_RATE * float(row["asked_tokens_s"])
        for row in rows
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
