"""How many contiguous copies one request's KV needs, between two pools that have lived.

Both sides know nothing of each other: each allocates as it can, and the aligned runs that both
have in common are the copies (FlowKV 1.4).
"""

import argparse
import sys
from dataclasses import dataclass
from statistics import median

import flowpath_native

from benchmarks.churn import NUM_OPERATIONS, Workload, churned_pool
from benchmarks.report import Cell, print_table, write_results
from common.kv.runs import contiguous_ratio

NUM_PROBES = 200
NUM_PAIRS = 3
MAX_COPIES = {Workload.WHOLE: (1, 1), Workload.CACHED: (5, 12), Workload.SINGLE: (5, 12)}
"""The targets: copies at the median, and at most."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies and contiguous ratio of each probed transfer of one workload and policy."""

    copies: list[int]
    ratios: list[float]

    @property
    def p50(self) -> float:
        """Copies of the median transfer."""
        return median(self.copies)

    @property
    def maximum(self) -> int:
        """Copies of the worst transfer."""
        return max(self.copies)


def measure(workload: Workload, num_pairs: int = NUM_PAIRS) -> tuple[Copies, Copies]:
    """Return the transfers of ``num_pairs`` pairs of pools: by segments, and by free lists."""
    segments, free_lists = Copies([], []), Copies([], [])
    for pair in range(num_pairs):
        sender = churned_pool(workload, seed=2 * pair)
        receiver = churned_pool(workload, seed=2 * pair + 1)
        for _ in range(NUM_PROBES):
            here, there = sender.probe(), receiver.probe()
            for found, src, dst in (
                (segments, here.segments, there.segments),
                (free_lists, here.free_list, there.free_list),
            ):
                found.copies.append(len(flowpath_native.align(src, dst)))
                found.ratios.append(contiguous_ratio(dst))
            # Requests go on coming and going between two transfers.
            for _ in range(8):
                sender.operate()
                receiver.operate()
    return segments, free_lists


def is_met(workload: Workload, found: Copies) -> bool:
    """Tell whether the target of the workload is met."""
    p50, maximum = MAX_COPIES[workload]
    return found.p50 <= p50 and found.maximum <= maximum


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    rows: list[dict[str, Cell]] = []
    has_met_all = True
    for workload in Workload:
        print(f"{workload}: {2 * NUM_PAIRS} pools, {NUM_OPERATIONS} operations each", flush=True)
        segments, free_lists = measure(workload)
        has_met_all = has_met_all and is_met(workload, segments)
        p50, maximum = MAX_COPIES[workload]
        rows += [
            {
                "workload": str(workload),
                "allocator": name,
                "copies p50": found.p50,
                "copies p99": sorted(found.copies)[len(found.copies) * 99 // 100],
                "copies max": found.maximum,
                "contiguous ratio": round(sum(found.ratios) / len(found.ratios), 3),
                "target p50/max": f"{p50}/{maximum}" if name == "segments" else "-",
                "met": is_met(workload, found) if name == "segments" else "-",
            }
            for name, found in (("segments", segments), ("free list", free_lists))
        ]
    print_table(rows)
    print(f"kept in benchmarks/results/{write_results('copies_per_transfer', argv, rows).name}")
    return 0 if has_met_all else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
