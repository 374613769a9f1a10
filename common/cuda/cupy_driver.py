"""CUDA through CuPy, which is imported with the first ``cuda_driver()`` and not before."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING
from uuid import UUID

from common.cuda.cupy_queue import CupyQueue
from common.cuda.driver import CudaError
from common.cuda.handles import OpenedHandles
from common.cuda.nvml import nvlink_gigabytes_per_second
from common.errors import ConfigError

if TYPE_CHECKING:
    import torch

ALLOCATION_BYTES = 2 * 1024 * 1024
"""CUDA carves smaller allocations out of shared ones of this size."""
PROBE_BYTES = 64 * 1024 * 1024
REGISTERED_FOR_ALL_DEVICES = 1
"""CUDA's flag ``cudaHostRegisterPortable``, which CuPy does not name."""
MAPPED_WITH_PEER_ACCESS = 1
"""CUDA's flag ``cudaIpcMemLazyEnablePeerAccess``, likewise."""
PEER_ACCESS_ALREADY_ENABLED = 704
"""CUDA's number of the error, which CuPy does not name."""


class CupyDriver:
    """``CudaDriver`` by CuPy's thin wrappers of the runtime; the memory is no pool's of CuPy."""

    def __init__(self) -> None:
        try:
            import cupy  # noqa: PLC0415 - only where there is a GPU
        except ImportError as error:
            raise ConfigError(
                "GPUs need CuPy: install the extra cuda12 or cuda13, as the CUDA version of PyTorch"
                f" says ({error})"
            ) from error
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        with self._called("looking for a GPU"):
            self._num_devices = int(self._runtime.getDeviceCount())
        self._handles = OpenedHandles(self._map, self._unmap)

    def num_devices(self) -> int:
        """Return how many devices this process sees."""
        return self._num_devices

    def device_uuid(self, device: int) -> str:
        """Return ``GPU-`` and the UUID."""
        # Not from CuPy's properties: those end at a zero byte.
        number = ctypes.create_string_buffer(16)
        status = ctypes.CDLL("libcuda.so.1").cuDeviceGetUuid_v2(number, ctypes.c_int(device))
        if status:
            raise CudaError(f"asking for the UUID of GPU {device}: CUDA error {status}")
        return f"GPU-{UUID(bytes=number.raw)}"

    def memory_bytes(self, device: int) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        with self._called(f"asking for the memory of GPU {device}"):
            self._runtime.setDevice(device)
            free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def allocate(self, device: int, num_bytes: int) -> int:
        """Return the address of a plain allocation of its own, filled with zeros."""
        whole = -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        with self._called(f"allocating {whole} bytes on GPU {device}"):
            self._runtime.setDevice(device)
            address = int(self._runtime.malloc(whole))
            self._runtime.memset(address, 0, whole)
            self._runtime.deviceSynchronize()
        return address

    def free(self, device: int, address: int) -> None:
        """Give an allocation back."""
        with self._called(f"freeing memory of GPU {device}"):
            self._runtime.setDevice(device)
            self._runtime.free(address)

    def export_memory(self, device: int, address: int) -> bytes:
        """Return the 64 bytes by which other processes of this host open an allocation."""
        with self._called(f"exporting memory of GPU {device}"):
            self._runtime.setDevice(device)
            return bytes(self._runtime.ipcGetMemHandle(address))

    def open_memory(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for work on ``device``; return its address here."""
        return self._handles.open(device, handle)

    def close_memory(self, device: int, handle: bytes) -> None:
        """Undo one ``open_memory``."""
        self._handles.close(device, handle)

    def pin(self, device: int, address: int, num_bytes: int) -> None:
        """Lock pages of host memory, so that copies from and to it are fast."""
        with self._called(f"locking {num_bytes} bytes of host memory"):
            self._runtime.setDevice(device)
            self._runtime.hostRegister(address, num_bytes, REGISTERED_FOR_ALL_DEVICES)

    def unpin(self, address: int) -> None:
        """Unlock what begins at ``address``."""
        with self._called("unlocking host memory"):
            self._runtime.hostUnregister(address)

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether ``device`` can read and write the memory of ``peer`` directly."""
        with self._called(f"asking whether GPU {device} reaches GPU {peer}"):
            return bool(self._runtime.deviceCanAccessPeer(device, peer))

    def enable_peer_access(self, device: int, peer: int) -> None:
        """Let ``device`` read and write the memory of ``peer`` directly."""
        with self._called(f"letting GPU {device} reach GPU {peer}"):
            self._runtime.setDevice(device)
            try:
                self._runtime.deviceEnablePeerAccess(peer)
            except self._runtime.CUDARuntimeError as error:
                if error.status != PEER_ACCESS_ALREADY_ENABLED:
                    raise

    def peer_gigabytes_per_second(self, device: int, peer_uuid: str) -> float:
        """Return what the link to another device, seen or not, should give, one way."""
        joined = nvlink_gigabytes_per_second(self.device_uuid(device), peer_uuid)
        return self._host_gigabytes_per_second(device) if joined is None else joined

    def tensor(self, device: int, address: int, num_bytes: int) -> "torch.Tensor":
        """Return memory as a torch tensor of bytes, at the same address."""
        import torch.utils.dlpack  # noqa: PLC0415 - seconds, and only an engine needs tensors

        cupy = self._cupy
        with self._called(f"showing memory of GPU {device} to torch"):
            self._runtime.setDevice(device)
            memory = cupy.cuda.UnownedMemory(address, num_bytes, self, device)
            pointer = cupy.cuda.MemoryPointer(memory, 0)
            array = cupy.ndarray((num_bytes,), dtype="u1", memptr=pointer)
            tensor = torch.utils.dlpack.from_dlpack(array)
        if tensor.data_ptr() != address:
            raise CudaError(f"torch shows memory of GPU {device} at another address")
        return tensor

    def queue(self, device: int) -> CupyQueue:
        """Return a new queue."""
        return CupyQueue(self._cupy, device)

    def _map(self, device: int, handle: bytes) -> int:
        with self._called(f"opening another process's memory on GPU {device}"):
            self._runtime.setDevice(device)
            return int(self._runtime.ipcOpenMemHandle(handle, MAPPED_WITH_PEER_ACCESS))

    def _unmap(self, device: int, address: int) -> None:
        with self._called(f"closing another process's memory on GPU {device}"):
            self._runtime.setDevice(device)
            self._runtime.ipcCloseMemHandle(address)

    def _host_gigabytes_per_second(self, device: int) -> float:
        queue = self.queue(device)
        address = self.allocate(device, PROBE_BYTES)
        try:
            host = self._cupy.cuda.alloc_pinned_memory(PROBE_BYTES)
            copies = [(int(host.ptr), address, PROBE_BYTES)]
            seconds = min(queue.copy_seconds(copies) for _ in range(3))
        finally:
            queue.close()
            self.free(device, address)
        return PROBE_BYTES / seconds / 1e9

    @contextmanager
    def _called(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._runtime.CUDARuntimeError as error:
            raise CudaError(f"{doing}: {error}") from error


@cache
def cuda_driver() -> CupyDriver:
    """Return the process's driver: one, because it counts what the process has opened.

    ConfigError where CuPy is missing, CudaError where CUDA does not work.
    """
    return CupyDriver()
