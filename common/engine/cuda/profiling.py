"""Which kernels a piece of work spends its time in."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

NAME_LENGTH = 90


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel."""

    name: str
    launches: int
    seconds: float


def profile_kernels(work: Callable[[], object]) -> list[KernelTime]:
    """Run ``work`` and return the device's time in each kernel, the longest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    found = [
        KernelTime(event.key[:NAME_LENGTH], event.count, event.self_device_time_total / 1e6)
        for event in profiler.key_averages()
        if event.device_type.name == "CUDA" and event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda kernel: -kernel.seconds)
