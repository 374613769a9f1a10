"""Whether this machine can run the tests marked ``gpu``."""

import importlib.util
from functools import cache

import torch


@cache
def why_no_gpu(num_gpus: int = 1) -> str | None:
    """Say what is missing for tests on ``num_gpus`` GPUs, if anything."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.device_count() < num_gpus:
        return f"{num_gpus} GPUs are needed; there are {torch.cuda.device_count()}"
    for name in ("cupy", "flashinfer"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (extras cuda12 and cuda13)"
    return None
