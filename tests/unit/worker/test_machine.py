"""What a worker's machine refuses before anything is loaded into memory."""

from pathlib import Path

import pytest

from common.config.settings import Settings
from common.errors import ConfigError
from common.worker.machine import build_machine
from tests.support.tiny_models import save_tiny_model


def test_a_cpu_worker_refuses_an_fp8_cache_by_name(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    settings = Settings(model=str(tmp_path), device="cpu", kv_cache_dtype="float8_e4m3")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype float8_e4m3 needs a GPU; a CPU takes"):
        build_machine(settings, "decode-0")
