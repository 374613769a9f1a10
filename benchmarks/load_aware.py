"""Workers that do each other's work beside fixed ones: ``python -m benchmarks load_aware``.

Three clusters of two workers run side by side on the same cores, and get every load in turn, one at
a time: ``fixed`` (one prefill, one decode worker, roles by hand), ``auto`` (the same with roles by
load) and ``combined`` (two workers that do both). All take steps of the same token budget. Medians
of the turns are compared, within this one run:

``burst``   32 prompts of 1 024 tokens at once, 32 tokens of output
``tail``    24 prompts of 128 tokens at once, 256 tokens of output: mostly decoding
``steady``  prompts of 512 tokens at a Poisson rate, 60 % of what ``combined`` reaches in a burst,
            64 tokens of output
"""

import argparse
import sys
from contextlib import ExitStack
from statistics import median

from benchmarks.report import Cell, print_table, write_results
from benchmarks.served_cluster import LoadResult, ServedCluster, bench_serve, served

LAYOUTS = {
    "fixed": ("--prefill", "1", "--decode", "1", "--roles", "manual"),
    "auto": ("--prefill", "1", "--decode", "1", "--roles", "auto"),
    "combined": ("--combined", "--combined-workers", "2"),
}
BUDGET = "512"
SHARE_OF_CAPACITY = 0.6
MIN_BURST_GAIN, MAX_STEADY_TPOT, MIN_STEADY_RATE = 1.3, 0.5, 0.95
MIN_TAIL_GAIN = 1.2
Turns = dict[str, list[LoadResult]]


def burst(clusters: list[ServedCluster], turns: int, num_requests: int) -> Turns:
    """Give each cluster all prompts at once, in turn."""
    return _take_turns(
        clusters,
        turns,
        *("--input-tokens", "1024", "--output-tokens", "32"),
        *("--requests", str(num_requests), "--burst", str(num_requests), "--warmup", "1"),
    )


def long_answers(clusters: list[ServedCluster], turns: int, num_requests: int) -> Turns:
    """Give each cluster short prompts with long answers at once, in turn."""
    return _take_turns(
        clusters,
        turns,
        *("--input-tokens", "128", "--output-tokens", "256"),
        *("--requests", str(num_requests), "--burst", str(num_requests), "--warmup", "1"),
    )


def steady(clusters: list[ServedCluster], turns: int, num_requests: int, rate: float) -> Turns:
    """Give each cluster the same arrivals at ``rate`` requests/s, in turn."""
    return _take_turns(
        clusters,
        turns,
        *("--input-tokens", "512", "--output-tokens", "64"),
        *("--requests", str(num_requests), "--rate", f"{rate:.3f}", "--warmup", "1"),
    )


def capacity(cluster: ServedCluster, num_requests: int) -> float:
    """Return the requests/s of a burst of the steady load's requests."""
    result = bench_serve(
        cluster,
        *("--input-tokens", "512", "--output-tokens", "64", "--seed", "7"),
        *("--requests", str(num_requests), "--burst", str(num_requests), "--warmup", "1"),
    )
    return result.requests_per_second


def _take_turns(clusters: list[ServedCluster], turns: int, *load: str) -> Turns:
    results: Turns = {cluster.name: [] for cluster in clusters}
    for turn in range(turns):
        for cluster in clusters:
            result = bench_serve(cluster, *load, "--seed", str(1000 + turn))
            results[cluster.name].append(result)
            print(
                f"  turn {turn + 1}/{turns} {cluster.name}: {result.seconds:.1f} s, "
                f"{result.num_failed} failed, TPOT p99 {result.latency('TPOT', 'p99'):.0f} ms",
                flush=True,
            )
    return results


def _rows(load: str, results: Turns) -> list[dict[str, Cell]]:
    return [
        {
            "load": load,
            "layout": name,
            "seconds": median(r.seconds for r in taken),
            "req/s": median(r.requests_per_second for r in taken),
            "failed": sum(r.num_failed for r in taken),
            "TTFT p50": median(r.latency("TTFT", "p50") for r in taken),
            "TTFT p99": median(r.latency("TTFT", "p99") for r in taken),
            "TPOT p50": median(r.latency("TPOT", "p50") for r in taken),
            "TPOT p99": median(r.latency("TPOT", "p99") for r in taken),
        }
        for name, taken in results.items()
    ]


def main(argv: list[str]) -> int:
    """Run the loads and compare; 0 when every target is met."""
    parser = argparse.ArgumentParser(prog="benchmarks load_aware")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--loads", default="burst,tail,steady")
    parser.add_argument("--burst-requests", type=int, default=32)
    parser.add_argument("--tail-requests", type=int, default=24)
    parser.add_argument("--steady-requests", type=int, default=24)
    arguments = parser.parse_args(argv)
    rows: list[dict[str, Cell]] = []
    ratios: list[tuple[str, float, float, bool]] = []
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(served(name, (*options, "--max-num-batched-tokens", BUDGET)))
            for name, options in LAYOUTS.items()
        ]
        if "burst" in arguments.loads:
            found = burst(clusters, arguments.turns, arguments.burst_requests)
            made = _rows("burst", found)
            rows += made
            of = {row["layout"]: row for row in made}
            gain = _ratio(of["fixed"], of["auto"], "seconds")
            tail = _ratio(of["auto"], of["combined"], "TPOT p99")
            ratios += [
                ("burst: time of fixed / auto", gain, MIN_BURST_GAIN, gain >= MIN_BURST_GAIN),
                ("burst: TPOT p99 of auto / combined", tail, 1.0, tail <= 1.0),
            ]
        if "tail" in arguments.loads:
            found = long_answers(clusters, arguments.turns, arguments.tail_requests)
            made = _rows("tail", found)
            rows += made
            of = {row["layout"]: row for row in made}
            gain = _ratio(of["fixed"], of["auto"], "seconds")
            is_met = gain >= MIN_TAIL_GAIN
            ratios.append(("tail: time of fixed / auto", gain, MIN_TAIL_GAIN, is_met))
        if "steady" in arguments.loads:
            rate = SHARE_OF_CAPACITY * capacity(clusters[-1], arguments.steady_requests)
            found = steady(clusters, arguments.turns, arguments.steady_requests, rate)
            made = _rows(f"steady {rate:.2f}/s", found)
            rows += made
            of = {row["layout"]: row for row in made}
            tail = _ratio(of["auto"], of["combined"], "TPOT p99")
            best = max(_ratio(of[name], of["auto"], "req/s") for name in ("fixed", "combined"))
            ratios += [
                ("steady: TPOT p99 of auto / combined", tail, MAX_STEADY_TPOT, tail <= 0.5),
                ("steady: req/s of auto / best fixed", 1 / best, MIN_STEADY_RATE, best <= 1 / 0.95),
            ]
    print_table(rows)
    for what, ratio, target, is_met in ratios:
        print(f"{what}: {ratio:.2f} (target {target:g}){'' if is_met else '  MISSED'}")
        rows.append({"load": what, "ratio": ratio, "target": target, "is_met": is_met})
    print(f"kept in benchmarks/results/{write_results('load_aware', argv, rows).name}")
    return 0 if all(is_met for *_, is_met in ratios) else 1


def _ratio(first: dict[str, Cell], second: dict[str, Cell], column: str) -> float:
    a, b = first[column], second[column]
    assert isinstance(a, float), column
    assert isinstance(b, float), column
    return a / b


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
