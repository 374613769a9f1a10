"""The kernel of ``native/cuda/engine_rotate_store.cu``, compiled for the CPU, against torch's."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from common.engine.cuda.kernels import pool_view
from common.engine.cuda.model import CudaModel
from common.engine.cuda.rotate_store import SOURCE, defines_of, scale_arguments
from common.engine.cuda.scales import BlockScales
from common.engine.cuda.torch_kernels import TorchKernels
from common.engine.rope import rotary_tables
from common.kv.layout import KVLayout
from common.models.config import ModelConfig
from tests.support.source_tree import ROOT
from tests.support.tiny_models import save_tiny_model

LAYER = 1
NUM_BLOCKS = 4
SCALES = (1.0, 1.0, 0.0625, 0.003, 1.0, 1.0)
"""Powers of two are exact; with the other, values are out of range."""


def compiled(folder: Path, head_dim: int, layout: KVLayout) -> ctypes.CDLL:
    library = folder / f"rotate_store_{layout.element_dtype}.so"
    host = ROOT / "tests" / "support" / "rotate_store_on_cpu.cpp"
    # Without contraction: what is compared to the last bit is the order of the operations.
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-w"]
    flags += [f'-DCUDA_SOURCE="{SOURCE}"', *defines_of(head_dim, layout)]
    subprocess.run(["c++", *flags, "-o", str(library), str(host)], check=True)
    return ctypes.CDLL(str(library))


def at(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float8_e4m3"])
@pytest.mark.parametrize(("family", "head_dim"), [("llama", 64), ("qwen3", 128)])
def test_it_stores_what_torchs_kernels_store(
    tmp_path: Path, family: str, head_dim: int, kv_cache_dtype: str
) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    save_tiny_model(family, tmp_path, head_dim=head_dim, **shape)
    config = ModelConfig.load(tmp_path)
    scales = SCALES if kv_cache_dtype != "auto" else ()
    layout = KVLayout(3, 16, 2, head_dim, "bfloat16", 2, kv_cache_dtype, scales)
    device = torch.device("cpu")
    weights = CudaModel.load(config, "bfloat16", device).weights.layers[LAYER]
    pools = [torch.full((NUM_BLOCKS * layout.block_bytes,), 255, dtype=torch.uint8) for _ in "ab"]
    views = [pool_view(pool, layout) for pool in pools]
    trailers = [BlockScales(pool, layout) if layout.is_quantised else None for pool in pools]
    torchs = TorchKernels(config, layout, views[0], device, trailers[0])
    positions = torch.tensor([0, 1, 15, 16, 300, 511, 7], dtype=torch.int32)
    slots = torch.tensor([5, 16, 47, -1, 63, 0, -1], dtype=torch.int32)
    cosine, sine = rotary_tables(config.rope, config.head_dim, config.max_model_len)
    more = () if trailers[1] is None else scale_arguments(layout, trailers[1], LAYER)
    kernel = compiled(tmp_path, head_dim, layout).launch_rotate_store
    generator = torch.Generator().manual_seed(1)
    for num_heads in (config.num_heads, 0):
        heads = torch.randn(7, (num_heads + 4) * head_dim, generator=generator).bfloat16()
        mine = heads.clone()
        torchs.rotate_store(LAYER, weights, heads, positions, slots)
        numbers = [ctypes.c_float(float(number)) for number in more[:-1]]
        address = [ctypes.c_void_p(int(number)) for number in more[-1:]]
        kernel(
            64,
            at(mine),
            *(7, num_heads, 2),
            *map(at, (positions, slots, cosine, sine, weights.q_norm, weights.k_norm)),
            ctypes.c_float(config.rms_norm_eps),
            at(views[1][:, LAYER, 0]),
            at(views[1][:, LAYER, 1]),
            ctypes.c_longlong(views[1].stride(0)),
            layout.block_size,
            *numbers,
            *address,
        )
        torch.testing.assert_close(mine, heads, rtol=2**-7, atol=2**-8)
        found, expected = (view.float() for view in reversed(views))
        assert torch.equal(found.isnan(), expected.isnan()), "the same slots are written"
        step = 2**-3 if layout.is_quantised else 2**-7
        torch.testing.assert_close(found, expected, rtol=step, atol=2**-8, equal_nan=True)
        # Values are stored as they come, so that not even their last bit may differ.
        assert torch.equal(found[:, LAYER, 1].nan_to_num(), expected[:, LAYER, 1].nan_to_num())
        if layout.is_quantised:
            assert found[:, LAYER, 1].nan_to_num().abs().max() == 448
            assert found[:, LAYER, 0].nan_to_num().abs().max() < 448
    if layout.is_quantised:
        assert trailers[0] is not None
        assert trailers[1] is not None
        both = [found.trailers for found in trailers if found is not None]
        torch.testing.assert_close(both[0], both[1], rtol=0, atol=0, equal_nan=True)
        assert both[1][:2, LAYER].tolist() == [
            pytest.approx([0.0625, 0.003]),
            pytest.approx([0.0625, 0.003]),
        ]
        assert both[1][2:].isnan().all()
        assert both[1][:, [0, 2]].isnan().all()
