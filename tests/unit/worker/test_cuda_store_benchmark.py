"""The benchmark of stores for pools on GPUs measures what it says, as far as a CPU can tell."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.cuda_store import WrongBytes, layout_of, measure
from common.kv.device_pool import DevicePool
from tests.support.fake_cuda import FakeGpus

BLOCK_BYTES = 8192
NUM_BLOCKS = 20


def test_every_way_brings_the_bytes_that_were_written(tmp_path: Path) -> None:
    driver = FakeGpus().process()
    pool = DevicePool(2 * NUM_BLOCKS, BLOCK_BYTES, 0, driver=driver)
    pool.tensor.random_()
    before = driver.num_mappings
    rows = measure(pool, tmp_path, NUM_BLOCKS, 2)
    assert [row["way"] for row in rows] == ["write", "storage", "host tier", "plain copy"]
    assert all(float(row["ms"]) > 0 for row in rows)
    assert driver.num_mappings == before, "page-locked memory is given back"
    half = pool.tensor.numpy()[: 2 * NUM_BLOCKS * BLOCK_BYTES].reshape(2, -1)
    assert np.array_equal(half[0], half[1])
    pool.close()


def test_bytes_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DevicePool(2 * NUM_BLOCKS, BLOCK_BYTES, 0, driver=FakeGpus().process())
    pool.tensor.random_()
    monkeypatch.setattr("common.worker.pool_copies.runs_of", lambda *_: np.zeros((0, 3), np.int32))
    with pytest.raises(WrongBytes, match="other bytes"):
        measure(pool, tmp_path, NUM_BLOCKS, 1)
    pool.close()


def test_the_shape_has_the_bytes_of_the_model() -> None:
    assert layout_of(64).block_bytes == 8 * 2**20
