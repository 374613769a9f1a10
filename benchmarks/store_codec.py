"""What the FP8 codec of the store costs beside plain copies, and what it loses.

Speeds: one thread, blocks in host memory, all ways in turns of random order, of each the best turn;
GB/s are of the pool's bytes. ``measure`` is what one block in eight pays on top of ``encode``.

Losses: of the default model's own KV, a block of its decode, for scales of several grains: the root
mean square of the differences by that of the numbers, and how many times more bytes scales are.
"""

import argparse
import sys
import time
from collections.abc import Callable
from random import Random

import torch

from benchmarks.kept_blocks import Decode
from benchmarks.report import Cell, print_table, write_results
from common.config.load import load_settings
from common.kv.layout import KVLayout
from common.models.default_model import ensure_default_model
from common.storage.codec_fp8 import FP8_MAX, Fp8Codec

SHAPES = ((30, 16, 3, 64), (32, 64, 8, 128))
"""Layers, tokens of a block, KV heads, head dim: the default model's and an 8B model's."""
DTYPES = ("bfloat16", "float32")
NUM_TURNS = 15
GRAINS = {
    "block": (0, 1, 2, 3, 4),
    "layer, plane": (2, 3, 4),
    "layer, plane, head": (2, 4),
    "layer, plane, head, token": (4,),
}
"""Dimensions of (layers, planes, tokens, heads, head dim) that share a scale."""


def speeds(layout: KVLayout, random: Random) -> dict[str, Cell]:
    codec = Fp8Codec(layout)
    block, copied = bytearray(layout.block_bytes), bytearray(layout.block_bytes)
    encoded = bytearray(codec.encoded_bytes)
    dtype = getattr(torch, layout.dtype)
    count = layout.payload_bytes // layout.element_bytes
    torch.frombuffer(block, dtype=dtype, count=count).copy_(torch.randn(count))
    source = torch.frombuffer(block, dtype=torch.uint8)
    target = torch.frombuffer(copied, dtype=torch.uint8)
    assert codec.try_encode(block, encoded)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "encode": lambda: codec.try_encode(block, encoded),
        "measure": lambda: codec.error(block, encoded),
        "decode": lambda: codec.decode(encoded, copied),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(NUM_TURNS):
        for name in random.sample(list(ways), len(ways)):
            began = time.perf_counter()
            ways[name]()
            best[name] = min(best[name], time.perf_counter() - began)
    rates = {f"{way} GB/s": round(layout.block_bytes / best[way] / 1e9, 2) for way in ways}
    return {
        "dtype": layout.dtype,
        "block KiB": layout.block_bytes // 1024,
        "ratio": round(layout.block_bytes / codec.encoded_bytes, 3),
        **rates,
    }


def losses() -> list[dict[str, Cell]]:
    model = ensure_default_model(load_settings().settings.cache_dir / "models", print)
    decode = Decode(model, "float32", threads=1, num_rows=1, num_rounds=4)
    for _ in range(3):
        decode.fill_block()
    layout = decode.layout
    (held,) = decode.filled()
    size = layout.block_bytes
    start = held.block_ids[0] * size
    block = bytearray(decode.pool.buffer[start : start + size])
    shape = (layout.num_layers, layout.planes, layout.block_size, layout.num_kv_heads, -1)
    numbers = torch.frombuffer(block, dtype=torch.float32, count=layout.payload_bytes // 4)
    numbers = numbers.view(shape)
    rows: list[dict[str, Cell]] = []
    for grain, dims in GRAINS.items():
        greatest = numbers.abs().amax(dims, keepdim=True)
        exact = greatest / FP8_MAX
        for kind, scales in (
            ("power of two", torch.exp2(torch.log2(exact).ceil())),
            ("any", exact),
        ):
            left = (numbers / scales).to(torch.float8_e4m3fn).float() * scales
            rms = float((left - numbers).norm() / numbers.norm())
            share = 4 * scales.numel() / numbers.numel()
            rows.append(
                {
                    "a scale for": grain,
                    "scales": kind,
                    "rms error": round(rms, 5),
                    "bytes of scales / of numbers": round(share, 5),
                }
            )
    codec, encoded = Fp8Codec(layout), bytearray(size)
    assert codec.try_encode(block, encoded)
    error = codec.error(block, encoded)
    print(f"the codec's own report: rms {error.rms:.5f}, greatest {error.greatest:.5f}")
    return rows


def main(argv: list[str]) -> int:
    """Measure, print and keep the results."""
    argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0]).parse_args(argv)
    torch.set_num_threads(1)
    random = Random(0)
    layouts = [KVLayout(*shape, dtype) for shape in SHAPES for dtype in DTYPES]
    rows = [speeds(layout, random) for layout in layouts]
    print_table(rows)
    lost = losses()
    print_table(lost)
    print(f"kept as {write_results('store_codec', argv, [*rows, *lost])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
