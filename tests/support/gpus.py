"""Whether this machine can run what needs a GPU, and how much of it."""

import warnings


def num_gpus() -> int:
    """Count the GPUs that CuPy reaches here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy  # noqa: PLC0415
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def why_too_few(needed: int) -> str | None:
    """Return why tests that need so many GPUs cannot run here; None when they can."""
    found = num_gpus()
    return None if found >= needed else f"needs {needed} GPUs with CuPy, and there are {found}"
