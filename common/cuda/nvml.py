"""What the links between two GPUs are worth, as NVIDIA's management library tells."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_P2P_OK = 0
_P2P_NVLINK = 2
_MAX_LINKS = 18
_SPEED_OF_LINK = 164
"""Field ``NVML_FI_DEV_NVLINK_GET_SPEED``, whose scope is the link."""
_SPEED_OF_EACH_LINK = 90
"""Field ``NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON``, which older drivers tell instead."""


class _FieldValue(ctypes.Structure):
    """``nvmlFieldValue_t``; the value of a speed is an unsigned number of MB/s."""

    _fields_ = (
        ("field_id", ctypes.c_uint),
        ("scope_id", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_microseconds", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


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
        links = [link for link in range(_MAX_LINKS) if _is_active(nvml, device, link)]
        return sum(_link_rate(nvml, device, link) for link in links) or None


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


def _is_active(nvml: ctypes.CDLL, device: ctypes.c_void_p, link: int) -> bool:
    state = ctypes.c_uint(0)
    asked = nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(state))
    return asked == _SUCCESS and bool(state.value)


def _link_rate(nvml: ctypes.CDLL, device: ctypes.c_void_p, link: int) -> float:
    """Return GB/s of one link, 0.0 where the library does not tell."""
    for field_id, scope_id in ((_SPEED_OF_LINK, link), (_SPEED_OF_EACH_LINK, 0)):
        field = _FieldValue(field_id=field_id, scope_id=scope_id)
        asked = nvml.nvmlDeviceGetFieldValues(device, 1, ctypes.byref(field))
        megabytes = field.value & 0xFFFFFFFF
        if asked == _SUCCESS and field.status == _SUCCESS and megabytes:
            return float(megabytes) / 1e3
    return 0.0
