import importlib.util

import pytest

from common.cuda.cupy_driver import CupyDriver
from common.cuda.nvml import nvlink_gigabytes_per_second
from common.errors import ConfigError


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_a_machine_without_cupy_is_told_what_to_install() -> None:
    with pytest.raises(ConfigError, match="install the extra cuda12 or cuda13"):
        CupyDriver()


def test_links_of_unknown_gpus_have_no_rate() -> None:
    assert nvlink_gigabytes_per_second("GPU-none", "GPU-none") is None
