"""1 000 clients that leave a prefill and a decode worker on GPUs: nothing is left behind."""

from pathlib import Path

import pytest
import torch

from tests.support.cluster import ClusterOptions, running_cluster
from tests.support.disturbers import Disturbers, run_lanes
from tests.support.gpu import why_no_gpu
from tests.support.prompts import Encode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_gpu() is not None, reason=str(why_no_gpu())),
]

NUM_WARM = 200
NUM_CLIENTS = 1000
NUM_LANES = 48
MAX_GROWTH_BYTES = 64 * 2**20
BLOCK_SIZE = 16
NUM_BLOCKS = 400
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2


def used_bytes() -> int:
    """Memory that all processes together use, on all GPUs."""
    used = 0
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        used += total - free
    return used


@pytest.mark.timeout(500)
async def test_1000_cancels_leak_no_block_and_no_device_memory(
    model_folder: Path, encode: Encode
) -> None:
    options = ClusterOptions(
        model_folder,
        dtype="bfloat16",
        kv_bytes=(NUM_BLOCKS + 1) * BLOCK_SIZE * TOKEN_BYTES,
        block_size=BLOCK_SIZE,
        settings={
            "device": "cuda",
            "max_num_batched_tokens": 64,  # prompts take steps: cancels meet chunks in flight
            "max_num_seqs": 64,
            "gpu_memory_fraction": 0.2,
        },
    )
    async with running_cluster(options) as cluster:
        disturbers = Disturbers(cluster, encode)
        await run_lanes(disturbers.crowded(range(NUM_WARM)), NUM_LANES)
        await cluster.wait_idle()
        before = used_bytes()
        await run_lanes(disturbers.crowded(range(NUM_CLIENTS)), NUM_LANES)
        for name, counts in (await cluster.wait_idle()).items():
            assert (counts.referenced, counts.in_transfer) == (0, 0), name
            assert counts.total == NUM_BLOCKS == counts.free + counts.cached, name
        assert used_bytes() - before < MAX_GROWTH_BYTES
        assert disturbers.ends.total() == NUM_WARM + NUM_CLIENTS
