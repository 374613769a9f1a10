"""What a worker's machine refuses before anything is loaded into memory."""

from contextlib import closing
from pathlib import Path

import pytest

from common.config.settings import Settings
from common.engine.cpu_engine import CpuEngine
from common.engine.layerwise.cpu import LayerwiseCpuEngine
from common.errors import ConfigError
from common.messages.fields import Role
from common.worker.machine import build_machine
from tests.support.tiny_models import save_tiny_model


def test_a_cpu_worker_refuses_an_fp8_cache_by_name(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    settings = Settings(model=str(tmp_path), device="cpu", kv_cache_dtype="float8_e4m3")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype float8_e4m3 needs a GPU; a CPU takes"):
        build_machine(settings, "decode-0", Role.DECODE)


def test_prefill_workers_compute_layer_by_layer_where_the_ring_holds_their_requests(
    tmp_path: Path,
) -> None:
    save_tiny_model("llama", tmp_path)
    settings = Settings(
        model=str(tmp_path), device="cpu", dtype="float32", kv_bytes=2**20, layer_ring=2**20
    )
    for role, engine in ((Role.PREFILL, LayerwiseCpuEngine), (Role.DECODE, CpuEngine)):
        with closing(build_machine(settings, "w-0", role)) as machine:
            assert isinstance(machine.engine, engine)
    small = settings.model_copy(update={"layer_ring": 4096})
    with pytest.raises(ConfigError, match=r"layer_ring 4096 holds 0 tokens, but requests may have"):
        build_machine(small, "w-0", Role.PREFILL)
