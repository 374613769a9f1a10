"""What one burst on two GPUs comes to where only steps take time: ``benchmarks.two_gpu_model``.

A model of the steps that ``benchmarks.cuda_engine`` measured, and of nothing else: handoffs and
moves take no time, and steps of prompts and decodes as long as both apart. It is no bound of every
schedule. Prompts are computed at the measured rate of their length; a decode step costs the plane
through the measured ones (``DecodeCost``) and the host's time between two steps. Three ways to
share the work:

* ``apart``: one GPU computes prompts, the other one decodes.
* ``helped``: the one that decodes computes prompts too, in chunks as often as its steps keep within
  the SLA on average, or within 5/4 of what decodes alone take. Running decodes are split evenly
  once the last prompt is computed.
* ``alike``: each GPU computes prompts in whole chunks and decodes what it computed.
"""

import argparse
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.cuda_serving import WORKLOADS, Workload
from benchmarks.report import RESULTS, Cell, print_table, write_results
from common.scheduler.decode_cost import DecodeCost
from common.scheduler.rates import SLOWEST_SHARE

CHUNK_TOKENS = 4096
MIN_CHUNK_TOKENS = 1024
WAYS = ("apart", "helped", "alike")


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of a prompt token, by the prompt's length, and of a decode step."""

    prompt_token: dict[int, float]
    decode: DecodeCost
    host: float


@dataclass(slots=True)
class Stream:
    """A request: prompt tokens left to compute, tokens drawn, and when it drew its first."""

    num_left: int
    num_drawn: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0


@dataclass(slots=True)
class Gpu:
    """Its clock, what it decodes, and how far its steps are ahead of their SLA."""

    now: float = 0.0
    running: list[Stream] = field(default_factory=list)
    credit: float = 0.0


def read_speeds(path: Path, host_seconds: float) -> Speeds:
    """Fit the model to a file of ``benchmarks.cuda_engine``."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    prompts = {r["context"]: r["steady_ms"] / 1e3 for r in rows if r["kind"] == "prefill"}
    decodes = [r for r in rows if r["kind"] == "decode"]
    batches = np.array([(1, r["batch"], r["batch"] * r["context"]) for r in decodes], dtype=float)
    seconds = np.array([r["steady_ms"] / 1e3 for r in decodes])
    # Relative errors count: short steps are as many as long ones.
    plane, *_ = np.linalg.lstsq(batches / seconds[:, None], np.ones(len(seconds)), rcond=None)
    cost = DecodeCost(*(max(0.0, float(each)) for each in plane))
    return Speeds({n: taken / n for n, taken in prompts.items()}, cost, host_seconds)


class Burst:
    """One burst on two GPUs, step by step."""

    def __init__(
        self, speeds: Speeds, workload: Workload, num_output: int, way: str, sla: float
    ) -> None:
        self._speeds, self._way, self._sla = speeds, way, sla
        self._token_seconds = speeds.prompt_token[workload.num_tokens]
        self._num_prompt, self._num_output = workload.num_tokens, num_output
        self._requests = [Stream(workload.num_tokens) for _ in range(workload.num_requests)]
        self._waiting = deque(self._requests)
        self._gpus = (Gpu(), Gpu())

    def run(self) -> list[Stream]:
        """Run to the end; return the requests."""
        while any(not request.ended_at for request in self._requests):
            gpu = min(self._gpus, key=lambda each: each.now)
            if not self._step(gpu):
                other = max(each.now for each in self._gpus)
                gpu.now = max(gpu.now + 1e-3, other)
        return self._requests

    def _step(self, gpu: Gpu) -> bool:
        """Compute one step; False where there is nothing to do."""
        decoding = [each for each in gpu.running if each.first_at <= gpu.now]
        alone = self._alone(decoding)
        chunk = self._chunk(gpu, alone)
        if not decoding and not chunk:
            return False
        done, used = self._compute(chunk)
        seconds = alone + used * self._token_seconds + (0 if decoding else self._speeds.host)
        if decoding:
            target = self._target(alone)
            gpu.credit = min(target, gpu.credit + target - seconds)
        gpu.now += seconds
        for each in decoding:
            each.num_drawn += 1
            if each.num_drawn == self._num_output:
                each.ended_at = gpu.now
                gpu.running.remove(each)
        for each in done:
            each.first_at, each.num_drawn = gpu.now, 1
            place = gpu if self._way == "alike" else self._gpus[1]
            place.running.append(each)
        if done and not self._waiting and self._way == "helped":
            self._split()
        return True

    def _alone(self, decoding: Sequence[Stream]) -> float:
        if not decoding:
            return 0.0
        num_tokens = sum(self._num_prompt + each.num_drawn for each in decoding)
        return self._speeds.decode.at(len(decoding), num_tokens) + self._speeds.host

    def _target(self, alone: float) -> float:
        return max(self._sla, SLOWEST_SHARE * alone)

    def _chunk(self, gpu: Gpu, alone: float) -> int:
        if not self._waiting or (self._way == "apart" and gpu is self._gpus[1]):
            return 0
        if not alone or self._way == "alike":
            return CHUNK_TOKENS
        if gpu.credit < 0:
            return 0
        return max(MIN_CHUNK_TOKENS, int(self._target(alone) / self._token_seconds))

    def _compute(self, num_tokens: int) -> tuple[list[Stream], int]:
        done: list[Stream] = []
        left = num_tokens
        while left and self._waiting:
            taken = min(left, self._waiting[0].num_left)
            self._waiting[0].num_left -= taken
            left -= taken
            if not self._waiting[0].num_left:
                done.append(self._waiting.popleft())
        return done, num_tokens - left

    def _split(self) -> None:
        decoding = sorted(
            (each for gpu in self._gpus for each in gpu.running), key=lambda each: each.num_drawn
        )
        for gpu, share in zip(self._gpus, (decoding[0::2], decoding[1::2]), strict=True):
            gpu.running = list(share)


def measure(
    speeds: Speeds, workload: Workload, num_output: int, way: str, sla: float
) -> dict[str, Cell]:
    """Run one burst and return what a client would see."""
    requests = Burst(speeds, workload, num_output, way, sla).run()
    each = sorted((r.ended_at - r.first_at) / (num_output - 1) for r in requests)
    return {
        "workload": workload.name,
        "way": way,
        "SLA ms": round(1e3 * sla) if way == "helped" else "",
        "req/s": round(len(requests) / max(r.ended_at for r in requests), 2),
        "TPOT p50": round(1e3 * float(np.percentile(each, 50)), 1),
        "TPOT p99": round(1e3 * float(np.percentile(each, 99)), 1),
    }


def main(argv: list[str]) -> int:
    """Print and keep what the model says."""
    parser = argparse.ArgumentParser(prog="benchmarks.two_gpu_model")
    parser.add_argument("--engine", type=Path, help="a file of benchmarks.cuda_engine")
    parser.add_argument("--host-ms", type=float, default=0.7, help="the host's time a step")
    parser.add_argument("--slas-ms", default="15,18,20,30,50")
    parser.add_argument("--output", type=int, default=256)
    arguments = parser.parse_args(argv)
    path = arguments.engine or max(RESULTS.glob("cuda_engine-*.json"))
    speeds = read_speeds(path, arguments.host_ms / 1e3)
    print(f"{path.name}: {speeds.decode}")
    slas = [float(each) / 1e3 for each in arguments.slas_ms.split(",")]
    rows = [
        measure(speeds, workload, arguments.output, way, sla)
        for workload in WORKLOADS
        for way in WAYS
        for sla in (slas if way == "helped" else slas[:1])
    ]
    print_table(rows)
    print(f"kept in {write_results('two_gpu_model', argv, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
