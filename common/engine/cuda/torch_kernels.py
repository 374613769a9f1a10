"""Kernels of torch's own operators: any device, any type, slower; the reference of the others."""

import math

import numpy as np
import torch
from torch.nn import functional

from common.engine.cuda.device_batch import DeviceBatch, Group
from common.engine.cuda.kernels import PlaceOf, own_place
from common.engine.cuda.products import Product
from common.engine.cuda.scales import E4M3, BlockScales, dequantise, quantise
from common.engine.rope import rotary_tables
from common.engine.weights import LayerWeights
from common.kv.layout import KVLayout
from common.models.config import ModelConfig

QUERIES_AT_ONCE = 256
SCORES_AT_ONCE = 2**26
"""Bounds of what attention holds at a time: query rows of one sequence; scores of many."""


class TorchKernels:
    """Implements ``Kernels``; everything but the products is computed in float32."""

    def __init__(
        self,
        config: ModelConfig,
        layout: KVLayout,
        view: torch.Tensor,
        device: torch.device,
        scales: BlockScales | None = None,
        place_of: PlaceOf = own_place,
    ) -> None:
        """``view`` is the pool as ``kernels.pool_view`` returns it.

        ``scales`` are those of a quantised pool.
        """
        self._place_of = place_of
        self._config = config
        self._layout = layout
        self._scales = scales
        # Not every operator that moves numbers takes FP8 ones.
        self._view = view if scales is None else view.view(torch.uint8)
        self._device = device
        self._block_size = layout.block_size
        cosine, sine = rotary_tables(config.rope, config.head_dim, config.max_model_len)
        self._cosine, self._sine = cosine.to(device), sine.to(device)
        self._batch: DeviceBatch | None = None

    def begin(self, batch: DeviceBatch) -> None:
        """Take the batch that the next calls work on."""
        self._batch = batch

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMSNorm of (rows, size)."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add ``delta`` to ``residual`` in place and return the RMSNorm of the sum."""
        residual += delta
        return self.rms_norm(residual, weight)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of (rows, 2 * size), gate first."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(gate_up.dtype)

    def rotate_store(
        self,
        layer: int,
        weights: LayerWeights[Product],
        heads: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Normalise and rotate q and k in place; store k and v (see ``Kernels``)."""
        config = self._config
        split = heads.view(len(heads), -1, config.head_dim)
        num_heads = split.shape[1] - 2 * config.num_kv_heads
        at = positions.long()
        cosine, sine = self._cosine[at].unsqueeze(1), self._sine[at].unsqueeze(1)
        queries, keys = split[:, :num_heads], split[:, num_heads : -config.num_kv_heads]
        for part, norm in ((queries, weights.q_norm), (keys, weights.k_norm)):
            wide = part.float()
            if norm is not None:
                scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
                wide = wide * scale * norm.float()
            low, high = wide.chunk(2, dim=-1)
            turned = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
            part.copy_(turned)
        kept = (slots >= 0).nonzero().squeeze(1)
        block, offset = (
            slots[kept].long() // self._block_size,
            slots[kept].long() % self._block_size,
        )
        found = (keys[kept], split[kept, -config.num_kv_heads :])
        for plane, numbers in enumerate(found):
            self._view[block, self._place_of(layer), plane, offset] = self._stored(
                layer, plane, numbers
            )
        if self._scales is not None:
            self._scales.write(layer, block[offset == 0])

    def attend(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Return causal attention of all the batch's tokens, (tokens, num_heads * head_dim)."""
        assert self._batch is not None  # begin comes first
        batch = self._batch
        groups = (batch.decodes, batch.fresh, batch.chunks)
        parts = [
            self._attend_group(
                layer, group, heads[group.first : group.last], is_fresh=group is batch.fresh
            )
            for group in groups
            if group is not None
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_tail(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Return the attention of the sampled tokens alone; ``heads`` has only theirs."""
        assert self._batch is not None
        assert self._batch.tail is not None  # else the whole batch is sampled
        return self._attend_group(layer, self._batch.tail, heads, is_fresh=False)

    def _attend_group(
        self, layer: int, group: Group, heads: torch.Tensor, *, is_fresh: bool
    ) -> torch.Tensor:
        config = self._config
        split = heads.view(len(heads), -1, config.head_dim)
        queries, computed = split[:, : config.num_heads], split[:, config.num_heads :]
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        bounds = group.host.qo_indptr.tolist()
        if bounds[-1] == len(bounds) - 1:
            self._attend_singles(layer, group, queries, out)
        else:
            for row in range(len(bounds) - 1):
                part = slice(bounds[row], bounds[row + 1])
                if is_fresh:
                    keys, values = computed[part].unsqueeze(0).float().chunk(2, dim=2)
                else:
                    keys, values = self._gather_row(layer, group, row)
                self._attend_row(layer, queries[part], keys, values, out[part])
        return out.view(len(heads), -1)

    def _gather_row(self, layer: int, group: Group, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = group.host
        pages = group.device.indices[int(host.indptr[row]) : int(host.indptr[row + 1])]
        return self._gather(layer, pages.unsqueeze(0).long(), int(host.kv_lens[row]))

    def _attend_row(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Rows of many tokens, the last of those that ``keys`` and ``values`` are of."""
        length = keys.shape[1]
        at = torch.arange(length, device=self._device)
        window = self._config.layer_windows[layer]
        for first in range(0, len(queries), QUERIES_AT_ONCE):
            part = queries[first : first + QUERIES_AT_ONCE]
            place = at[length - len(queries) + first :][: len(part), None]
            is_seen = at <= place
            if window is not None:
                is_seen &= at > place - window
            out[first : first + len(part)] = self._weigh(
                part.unsqueeze(0), keys, values, is_seen.unsqueeze(0)
            )[0]

    def _attend_singles(
        self, layer: int, group: Group, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Rows of one token each: many at a time, padded to the longest."""
        host = group.host
        counts = host.indptr.diff()
        width = int(counts.max())
        tables = torch.zeros((len(queries), width), dtype=torch.int64)
        rows = np.repeat(np.arange(len(queries)), counts.numpy())
        columns = np.arange(len(rows)) - np.repeat(host.indptr[:-1].numpy(), counts.numpy())
        tables[torch.from_numpy(rows), torch.from_numpy(columns)] = host.indices.long()
        tables = tables.to(self._device)
        length = width * self._block_size
        at = torch.arange(length, device=self._device)
        window = self._config.layer_windows[layer]
        step = max(1, SCORES_AT_ONCE // (length * self._config.kv_size))
        for first in range(0, len(queries), step):
            part = slice(first, first + step)
            ends = group.device.kv_lens[part, None]
            is_seen = at < ends
            if window is not None:
                is_seen &= at >= ends - window
            keys, values = self._gather(layer, tables[part], length)
            values = torch.where(is_seen[..., None, None], values, 0.0)
            out[part] = self._weigh(queries[part, None], keys, values, is_seen.unsqueeze(1))[:, 0]

    def _gather(
        self, layer: int, tables: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 (keys, values), each (rows, length, kv_heads, head_dim)."""
        place = self._place_of(layer)
        found = [
            self._meant(layer, plane, self._view[:, place, plane][tables].flatten(1, 2))
            for plane in (0, 1)
        ]
        return found[0][:, :length], found[1][:, :length]

    def _stored(self, layer: int, plane: int, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers as the view holds them."""
        if self._scales is None:
            return numbers
        return quantise(numbers, self._layout.scales_of(layer)[plane]).view(torch.uint8)

    def _meant(self, layer: int, plane: int, stored: torch.Tensor) -> torch.Tensor:
        """Return what numbers of the view stand for, float32."""
        if self._scales is None:
            return stored.float()
        return dequantise(stored.view(E4M3), self._layout.scales_of(layer)[plane])

    def _weigh(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        is_seen: torch.Tensor,
    ) -> torch.Tensor:
        """Return (rows, n, heads, head_dim) of queries of that shape; the mask is (rows, n, kv)."""
        rows, count, num_heads, head_dim = queries.shape
        grouped = queries.float().view(rows, count, self._config.num_kv_heads, -1, head_dim)
        scores = torch.einsum("rnkgd,rlkd->rkgnl", grouped, keys) / math.sqrt(head_dim)
        scores = scores.masked_fill(~is_seen[:, None, None], -math.inf)
        weighed = torch.einsum("rkgnl,rlkd->rnkgd", scores.softmax(-1), values)
        return weighed.reshape(rows, count, num_heads, head_dim).to(queries.dtype)
