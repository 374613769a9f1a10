import ctypes
import importlib.util
from typing import Any, cast

import pytest

from common.cuda.cupy_driver import CupyDriver
from common.cuda.nvml import _link_rate, nvlink_gigabytes_per_second
from common.errors import ConfigError


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_a_machine_without_cupy_is_told_what_to_install() -> None:
    with pytest.raises(ConfigError, match="install the extra cuda12 or cuda13"):
        CupyDriver()


def test_links_of_unknown_gpus_have_no_rate() -> None:
    assert nvlink_gigabytes_per_second("GPU-none", "GPU-none") is None


class ToldSpeeds:
    """A management library that tells some fields: (id, scope) to MB/s, and no others."""

    def __init__(self, told: dict[tuple[int, int], int]) -> None:
        self._told = told

    def nvmlDeviceGetFieldValues(self, device: object, count: int, values: Any) -> int:  # noqa: N802 - its name
        assert (device, count) == (DEVICE, 1)
        field = values._obj  # what byref points at
        speed = self._told.get((field.field_id, field.scope_id))
        field.status, field.value = (3, 0) if speed is None else (0, speed)
        return 0


DEVICE = ctypes.c_void_p(1)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({(164, 2): 26_562, (90, 0): 25_000}, 26.562),
        ({(90, 0): 25_000}, 25.0),
        ({(164, 2): 0, (90, 0): 25_000}, 25.0),
        ({(164, 1): 26_562}, 0.0),
    ],
)
def test_a_link_s_rate_is_taken_from_whichever_field_tells_it(
    told: dict[tuple[int, int], int], expected: float
) -> None:
    library = cast("ctypes.CDLL", ToldSpeeds(told))
    assert _link_rate(library, DEVICE, 2) == expected
