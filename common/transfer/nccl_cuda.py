"""Transport ``nccl`` on a CUDA device: NCCL's library, and streams and events of CuPy.

NCCL's own environment variables hold for everything that is not set here, such as which networks
it uses. NVLink multicast is turned off unless it was turned on by hand: sends and receives never
use it, and it takes memory.
"""

from collections.abc import Sequence

# CuPy has no types: its objects are Any throughout this file.
from typing import Any

from common.config.environment import environment
from common.cuda.driver import CudaDriver, CudaError
from common.cuda.nvml import nvlink_gigabytes_per_second
from common.errors import ConfigError
from common.kv.device_pool import DevicePool
from common.transfer.nccl import NcclBackend
from common.transfer.nccl_driver import Mark, Piece
from common.transfer.nccl_export import NcclExport
from common.transfer.nccl_library import NcclLibrary, nonblocking_config
from common.transfer.nccl_limit import CommunicatorLimit

MAX_CTAS = 16
"""Multiprocessors that one communicator may take while it moves bytes."""
PRIORITY = -1
"""Before the engine's work: both ranks must run at once for either to go on."""
BUS_BYTES = 64 * 1024 * 1024
_NOT_READY = 600


class _EventMark:
    """A recorded event."""

    def __init__(self, cupy: Any, event: Any) -> None:
        self._cupy = cupy
        self._event = event

    def is_done(self) -> bool:
        """Whether the device has come past the event; CudaError when the device has failed."""
        status = int(self._cupy.cuda.runtime.eventQuery(self._event.ptr))
        if status not in (0, _NOT_READY):
            raise CudaError(f"waiting for NCCL: CUDA error {status}")
        return status == 0


class _CudaCommunicator:
    """A communicator and its stream."""

    def __init__(
        self, driver: "CudaNcclDriver", unique_id: bytes, rank: int, max_ctas: int
    ) -> None:
        self._cupy = driver.cupy
        self._device = driver.device
        self._library = driver.library
        self._peer = 1 - rank
        self._cupy.cuda.runtime.setDevice(self._device)
        self._stream = self._cupy.cuda.Stream(non_blocking=True, priority=PRIORITY)
        self._communicator: int | None = self._library.begin_join(
            unique_id, rank, nonblocking_config(max_ctas)
        )

    def is_ready(self) -> bool:
        return self._library.is_ready(self._opened())

    def send(self, pieces: Sequence[Piece]) -> None:
        self._begin(pieces, is_send=True)

    def receive(self, pieces: Sequence[Piece]) -> None:
        self._begin(pieces, is_send=False)

    def mark(self) -> Mark:
        self._cupy.cuda.runtime.setDevice(self._device)
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return _EventMark(self._cupy, event)

    def abort(self) -> Mark:
        communicator, self._communicator = self._communicator, None
        self._cupy.cuda.runtime.setDevice(self._device)
        if communicator is not None:
            self._library.abort(communicator)
        return self.mark()

    def _begin(self, pieces: Sequence[Piece], *, is_send: bool) -> None:
        self._cupy.cuda.runtime.setDevice(self._device)
        self._library.begin_group(
            self._opened(), pieces, self._peer, stream=self._stream.ptr, is_send=is_send
        )

    def _opened(self) -> int:
        if self._communicator is None:
            raise CudaError("the communicator was aborted")
        return self._communicator


class _Scratch:
    def __init__(self, cuda: CudaDriver, device: int, num_bytes: int) -> None:
        self._cuda = cuda
        self._device = device
        self.address = cuda.allocate(device, num_bytes)

    def free(self) -> None:
        self._cuda.free(self._device, self.address)


class CudaNcclDriver:
    """``NcclDriver`` on GPU ``device``. ConfigError where NCCL or CuPy is missing."""

    def __init__(self, cuda: CudaDriver, device: int, *, max_ctas: int = MAX_CTAS) -> None:
        environment.setdefault("NCCL_NVLS_ENABLE", "0")
        try:
            import cupy  # noqa: PLC0415 - only where there is a GPU
            import torch  # noqa: F401, PLC0415 - brings NCCL's library along
        except ImportError as error:
            raise ConfigError(f"transport nccl needs CuPy and torch: {error}") from error
        self.cupy: Any = cupy
        self.device = device
        self.library = NcclLibrary()
        self.device_uuid = cuda.device_uuid(device)
        self._cuda = cuda
        self._max_ctas = max_ctas
        self._bus_rate = 0.0

    def new_unique_id(self) -> bytes:
        """Return the name of a communicator that is yet to be joined."""
        return self.library.new_unique_id()

    def join(self, unique_id: bytes, rank: int) -> _CudaCommunicator:
        """Begin to join."""
        return _CudaCommunicator(self, unique_id, rank, self._max_ctas)

    def allocate(self, num_bytes: int) -> _Scratch:
        """Take memory of the device."""
        return _Scratch(self._cuda, self.device, num_bytes)

    def limit_rate(self, peer_uuid: str) -> float:
        """Return what the way to another device could give (see ``NcclDriver``)."""
        joined = nvlink_gigabytes_per_second(self.device_uuid, peer_uuid)
        if joined is not None:
            return joined
        if not self._bus_rate:
            self._bus_rate = self._measure_bus()
        return self._bus_rate

    def _measure_bus(self) -> float:
        queue, scratch = self._cuda.queue(self.device), self.allocate(BUS_BYTES)
        try:
            host = self.cupy.cuda.alloc_pinned_memory(BUS_BYTES)
            copies = [(int(host.ptr), scratch.address, BUS_BYTES)]
            best = min(queue.copy_seconds(copies) for _ in range(3))
        finally:
            queue.close()
            scratch.free()
        return BUS_BYTES / best / 1e9


def open_nccl(
    pool: DevicePool, stall_seconds: float, *, host: str, max_ctas: int = MAX_CTAS
) -> tuple[NcclExport, NcclBackend]:
    """Return both sides of the transport for a worker with this pool; ``host`` is for peers.

    Transfers at one time are bounded so that the kernels of all fit on the device. ConfigError
    where NCCL is missing or the address cannot be used.
    """
    driver = CudaNcclDriver(pool.driver, pool.device_index, max_ctas=max_ctas)
    attribute = driver.cupy.cuda.runtime.cudaDevAttrMultiProcessorCount
    multiprocessors = int(driver.cupy.cuda.runtime.deviceGetAttribute(attribute, pool.device_index))
    max_moving = max(1, multiprocessors // max_ctas // 2)
    receiving, sending = (CommunicatorLimit(max_moving=max_moving) for _ in range(2))
    export = NcclExport(pool, driver, receiving, stall_seconds, host=host)
    return export, NcclBackend(pool, driver, sending, stall_seconds)
