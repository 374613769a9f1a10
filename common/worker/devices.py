"""Which device a worker computes on, and how much of a GPU's memory is its own. Pure."""

from dataclasses import dataclass

from common.config.settings import Settings
from common.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """A GPU, and how many workers of the cluster share it on this host."""

    device_index: int
    num_workers: int


def place_worker(settings: Settings, worker_id: str, num_gpus: int) -> GpuPlace | None:
    """Return the worker's GPU, or None for the CPU.

    Workers take the GPUs in turn, in the order of ``Settings.process_names``. ConfigError when a
    GPU is asked for that is not there.
    """
    if settings.device == "cpu" or (settings.device == "auto" and num_gpus == 0):
        return None
    if num_gpus == 0:
        raise ConfigError(
            f"device {settings.device}: torch sees no GPU; check the driver, CUDA_VISIBLE_DEVICES"
            " and that torch is a CUDA build, or set device to cpu"
        )
    workers = [name for name in settings.process_names if _is_worker(name)]
    _, _, wanted = settings.device.partition(":")
    if wanted:
        if int(wanted) >= num_gpus:
            raise ConfigError(f"device {settings.device}: there are {num_gpus} GPUs, from cuda:0")
        return GpuPlace(int(wanted), max(1, len(workers)))
    if worker_id not in workers:  # started on its own, as one of several by its number
        number = worker_id.rpartition("-")[2]
        return GpuPlace(int(number) % num_gpus if number.isdigit() else 0, 1)
    index = workers.index(worker_id) % num_gpus
    return GpuPlace(index, len(range(index, len(workers), num_gpus)))


def gpu_pool_bytes(
    settings: Settings, place: GpuPlace, *, total_bytes: int, used_bytes: int, step_bytes: int
) -> int:
    """Return the size of a worker's KV pool on its GPU.

    Of the worker's share of ``total_bytes``, its weights (``used_bytes``) and what a step needs
    beside the pool (``step_bytes``) go off. ``kv_bytes``, where it is set, is taken as it is.
    ConfigError when nothing is left.
    """
    if settings.kv_bytes:
        return settings.kv_bytes
    share = int(total_bytes * settings.gpu_memory_fraction) // place.num_workers
    left = share - used_bytes - step_bytes
    if left <= 0:
        raise ConfigError(
            f"cuda:{place.device_index} leaves no memory for the KV pool: a share of"
            f" {share / _GIB:.1f} GiB (gpu_memory_fraction {settings.gpu_memory_fraction:g} of"
            f" {total_bytes / _GIB:.1f} GiB, for {place.num_workers} workers) holds weights of"
            f" {used_bytes / _GIB:.1f} GiB and {step_bytes / _GIB:.1f} GiB for a step; raise the"
            " fraction, lower max_num_batched_tokens, or use fewer workers a GPU"
        )
    return left


def _is_worker(name: str) -> bool:
    return not name.startswith(("controller", "gateway"))
