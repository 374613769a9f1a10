"""Runs every benchmark for a CPU, those named, or one with its options.

``python -m benchmarks [NAME ...]`` or ``python -m benchmarks NAME --option ...``
"""

import importlib
import sys
import time
from collections.abc import Callable

BENCHMARKS = (
    "copies_per_transfer",
    "handoff_copy",
    "transfer_peers",
    "engine",
    "handoff_latency",
    "gateway_load",
    "load_aware",
    "chats",
    "placement",
    "hot_replicas",
    "dualpath_scheduling",
    "storage_paths",
    "stored_prefix",
    "layerwise",
)
"""Modules of this folder; each has ``main(argv) -> int``, which is 0 when its targets are met."""

ALONE = (
    *("store", "store_codec", "kept_blocks"),
    *("cuda_engine", "cuda_serving", "cuda_store", "cuda_stored_prefix", "cuda_layerwise"),
    *("cuda_fragments", "nccl_pair", "rdma_pair", "two_gpu_model"),
)
"""Those that run only when they are named: some want a disk, most a GPU or two."""


def main(argv: list[str]) -> int:
    known = (*BENCHMARKS, *ALONE)
    if len(argv) > 1 and argv[0] in known and argv[1].startswith("-"):
        alone: Callable[[list[str]], int] = importlib.import_module(f"benchmarks.{argv[0]}").main
        return alone(argv[1:])
    if {"-h", "--help"} & set(argv):
        print(f"{__doc__}\n\nWithout names: {', '.join(BENCHMARKS)}")
        print(f"Others: {', '.join(ALONE)}\nOptions of one: NAME --help")
        return 0
    unknown = set(argv) - set(known)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return 2
    names = [name for name in known if (name in argv if argv else name in BENCHMARKS)]
    missed: list[str] = []
    for number, name in enumerate(names, start=1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        start = time.monotonic()
        run: Callable[[list[str]], int] = importlib.import_module(f"benchmarks.{name}").main
        if run([]) != 0:
            missed.append(name)
        print(f"[{number}/{len(names)}] {name}: {time.monotonic() - start:.1f} s\n", flush=True)
    print(f"targets missed: {', '.join(missed)}" if missed else "all targets are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
