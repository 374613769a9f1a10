"""Our own kernel of a layer: rotation and the pool's writes in one launch."""

from pathlib import Path

import numpy as np
import torch

from common.engine.cuda.kernels import PlaceOf, own_place
from common.engine.cuda.products import Product
from common.engine.cuda.scales import BlockScales, inverse_of
from common.engine.rope import rotary_tables
from common.engine.weights import LayerWeights
from common.kv.layout import KVLayout
from common.models.config import ModelConfig

SOURCE = Path(__file__).parents[3] / "native" / "cuda" / "engine_rotate_store.cu"
HEAD_DIMS = (64, 128, 256)
THREADS = 256
NUMBERS_PER_LANE = 16


class RotateStore:
    """Rotates q and k in place and writes k and v; bfloat16 or float16."""

    def __init__(
        self,
        config: ModelConfig,
        layout: KVLayout,
        view: torch.Tensor,
        device: torch.device,
        scales: BlockScales | None = None,
        place_of: PlaceOf = own_place,
    ) -> None:
        """``view`` is the pool as ``kernels.pool_view`` returns it, on ``device``.

        ``scales`` are those of a quantised pool.
        """
        import cupy  # noqa: PLC0415 - there on GPU machines alone

        module = cupy.RawModule(
            code=SOURCE.read_text(encoding="utf-8"),
            options=("--std=c++17", *defines_of(config.head_dim, layout)),
        )
        with cupy.cuda.Device(device.index):
            self._function = module.get_function("rotate_store")
        self._stream_class = cupy.cuda.ExternalStream
        cosine, sine = rotary_tables(config.rope, config.head_dim, config.max_model_len)
        self._tables = (cosine.to(device), sine.to(device))
        self._num_kv_heads = np.int32(config.num_kv_heads)
        self._head_dim = config.head_dim
        self._lanes = config.head_dim // NUMBERS_PER_LANE
        self._epsilon = np.float32(config.rms_norm_eps)
        self._block_size = np.int32(layout.block_size)
        self._block_stride = np.int64(view.stride(0))
        self._planes = [
            (_address(view[:, place, 0]), _address(view[:, place, 1]))
            for place in map(place_of, range(config.num_layers))
        ]
        self._scaling: list[tuple[np.float32 | np.uint64, ...]] = [
            () if scales is None else scale_arguments(layout, scales, layer)
            for layer in range(config.num_layers)
        ]

    def __call__(
        self,
        layer: int,
        weights: LayerWeights[Product],
        heads: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Enqueue it on torch's current stream (see ``Kernels.rotate_store``)."""
        num_tokens, width = heads.shape
        num_all = width // self._head_dim
        num_threads = num_tokens * num_all * self._lanes
        keys, values = self._planes[layer]
        stream = self._stream_class(torch.cuda.current_stream().cuda_stream)
        with stream:
            self._function(
                (-(-num_threads // THREADS),),
                (THREADS,),
                (
                    _address(heads),
                    np.int64(heads.stride(0)),
                    np.int32(num_tokens),
                    np.int32(num_all - 2 * int(self._num_kv_heads)),
                    self._num_kv_heads,
                    _address(positions),
                    _address(slots),
                    _address(self._tables[0]),
                    _address(self._tables[1]),
                    _address(weights.q_norm),
                    _address(weights.k_norm),
                    self._epsilon,
                    keys,
                    values,
                    self._block_stride,
                    self._block_size,
                    *self._scaling[layer],
                ),
            )


def defines_of(head_dim: int, layout: KVLayout) -> tuple[str, ...]:
    """Return what the kernel of a layout is compiled with."""
    defines = (f"-DHEAD_DIM={head_dim}", f"-DIS_BFLOAT16={int(layout.dtype == 'bfloat16')}")
    return (*defines, "-DKV_E4M3") if layout.is_quantised else defines


def scale_arguments(
    layout: KVLayout, scales: BlockScales, layer: int
) -> tuple[np.float32 | np.uint64, ...]:
    """Return the kernel's last arguments for a layer of a quantised pool."""
    found = layout.scales_of(layer)
    numbers = (*found, *(inverse_of(scale) for scale in found))
    return (*map(np.float32, numbers), _address(scales.trailers[0, layer]))


def _address(tensor: torch.Tensor | None) -> np.uint64:
    return np.uint64(0 if tensor is None else tensor.data_ptr())
