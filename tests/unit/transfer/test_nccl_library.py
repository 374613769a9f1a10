"""What can be known of NCCL's library where there is none."""

import ctypes

import pytest

from common.errors import ConfigError
from common.transfer.nccl_library import NcclConfig, NcclLibrary, nonblocking_config


def test_the_configuration_is_laid_out_as_in_nccl_2_18() -> None:
    offsets = {name: getattr(NcclConfig, name).offset for name, *_ in NcclConfig._fields_}
    assert offsets == {
        "size": 0,
        "magic": 8,
        "version": 12,
        "blocking": 16,
        "cga_cluster_size": 20,
        "min_ctas": 24,
        "max_ctas": 28,
        "net_name": 32,
        "split_share": 40,
    }
    config = nonblocking_config(16)
    assert config.size == ctypes.sizeof(config) == 48
    assert (config.blocking, config.max_ctas, config.min_ctas) == (0, 16, -(2**31))


def test_a_missing_library_is_named() -> None:
    with pytest.raises(ConfigError, match=r"transport nccl needs NCCL \(libabsent\.so\.2\)"):
        NcclLibrary("libabsent.so.2")


def test_a_library_that_is_not_nccl_is_named() -> None:
    with pytest.raises(ConfigError, match=r"transport nccl needs NCCL \(libc\.so\.6\)"):
        NcclLibrary("libc.so.6")
