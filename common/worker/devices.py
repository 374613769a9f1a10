"""Which device a worker computes on, and how much of a GPU's memory is its own. Pure."""

from dataclasses import dataclass

from common.config.settings import Settings
from common.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """A worker's GPU, and how many workers of the cluster share it on this host.

    A worker of several tensor-parallel ranks has ``num_ranks`` GPUs, from ``device_index`` on.
    """

    device_index: int
    num_workers: int
    num_ranks: int = 1

    @property
    def device_indices(self) -> tuple[int, ...]:
        """The GPU of each rank."""
        return tuple(range(self.device_index, self.device_index + self.num_ranks))


def place_worker(settings: Settings, worker_id: str, num_gpus: int) -> GpuPlace | None:
    """Return the worker's GPUs, or None for the CPU.

    Workers take the GPUs in turn, as many each as it has ranks, in the order of
    ``Settings.process_names``; as many as ``max_workers`` may share them. ConfigError when a GPU is
    asked for that is not there.
    """
    if settings.device == "cpu" or (settings.device == "auto" and num_gpus == 0):
        return None
    if num_gpus == 0:
        raise ConfigError(
            f"device {settings.device}: torch sees no GPU; check the driver, CUDA_VISIBLE_DEVICES"
            " and that torch is a CUDA build, or set device to cpu"
        )
    workers = [name for name in settings.process_names if _is_worker(name)]
    num_ranks = settings.tensor_parallel
    _, _, wanted = settings.device.partition(":")
    if int(wanted or 0) + num_ranks > num_gpus:
        raise ConfigError(
            f"device {settings.device} with tensor_parallel {num_ranks}: there are {num_gpus} GPUs,"
            " from cuda:0"
        )
    if wanted:
        return GpuPlace(int(wanted), max(1, len(workers), settings.max_workers), num_ranks)
    num_places = num_gpus // num_ranks
    number = worker_id.rpartition("-")[2]
    turn = int(number) if number.isdigit() else 0
    num_workers = 1
    if worker_id in workers or settings.max_workers:
        # One that is added under load comes after those of the start, which leave room for it.
        turn = workers.index(worker_id) if worker_id in workers else len(workers) + turn
        num_in_all = max(len(workers), settings.max_workers)
        num_workers = max(1, len(range(turn % num_places, num_in_all, num_places)))
    return GpuPlace(turn % num_places * num_ranks, num_workers, num_ranks)


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
