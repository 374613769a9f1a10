"""What the links between two GPUs are worth, as NVIDIA's management library tells."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_P2P_OK = 0
_P2P_NVLINK = 2
_MAX_LINKS = 18
_LINK_GIGABYTES_PER_SECOND = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
"""By the NVLink version, each way; what later ones give is taken as at least that of the last."""


def nvlink_gigabytes_per_second(uuid: str, peer_uuid: str) -> float | None:
    """Return the rate of all NVLinks of a GPU, each way, where they join it with its peer.

    None where they do not, or the library does not tell.
    """
    with _library() as nvml:
        if nvml is None:
            return None
        device, peer = _device(nvml, uuid), _device(nvml, peer_uuid)
        status = ctypes.c_int(-1)
        if device is None or peer is None:
            return None
        asked = nvml.nvmlDeviceGetP2PStatus(device, peer, _P2P_NVLINK, ctypes.byref(status))
        if asked != _SUCCESS or status.value != _P2P_OK:
            return None
        rate = sum(_link_rate(nvml, device, link) for link in range(_MAX_LINKS))
        return rate or None


@contextmanager
def _library() -> Iterator[ctypes.CDLL | None]:
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != _SUCCESS:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _device(nvml: ctypes.CDLL, uuid: str) -> ctypes.c_void_p | None:
    device = ctypes.c_void_p()
    found = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device))
    return device if found == _SUCCESS else None


def _link_rate(nvml: ctypes.CDLL, device: ctypes.c_void_p, link: int) -> float:
    is_active, version = ctypes.c_uint(0), ctypes.c_uint(0)
    if nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(is_active)) != _SUCCESS:
        return 0.0
    if not is_active.value:
        return 0.0
    if nvml.nvmlDeviceGetNvLinkVersion(device, link, ctypes.byref(version)) != _SUCCESS:
        return 0.0
    newest = max(_LINK_GIGABYTES_PER_SECOND)
    return _LINK_GIGABYTES_PER_SECOND.get(min(version.value, newest), 0.0)
