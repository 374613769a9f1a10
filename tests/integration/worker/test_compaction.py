"""A worker's pool is tidied while nothing happens, and prefixes are found with their bytes."""

from pathlib import Path

import pytest

from common.messages.fields import Role
from common.sampling import SamplingParams
from common.telemetry.metrics import value_of
from common.worker import worker as worker_module
from tests.support.running_worker import LAYOUT, WorkerOptions
from tests.support.worker_harness import expected, harness

GREEDY = SamplingParams(seed=1, max_tokens=2, temperature=0)
PROMPTS = [tuple(range(1000 * number, 1000 * number + 40)) for number in range(1, 5)]


async def test_an_idle_worker_joins_free_memory_and_its_prefixes_stay_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "REST_SECONDS", 0.01)
    async with harness(tmp_path) as cluster:
        # Side by side: each leaves cached blocks, and after them a hole where it would have grown.
        options = WorkerOptions(num_blocks=32, max_num_batched_tokens=256, is_compacting=True)
        worker = await cluster.start_worker("combined", Role.COMBINED, options)
        worker.steps.hold()
        for number, prompt in enumerate(PROMPTS):
            cluster.place(f"r{number}", prompt, GREEDY, prefill="combined", decode=None)
        await cluster.board.wait_for(
            "all are there", lambda: len(worker.hybrid._scheduler.request_ids()) == len(PROMPTS)
        )
        worker.steps.open()
        for number in range(len(PROMPTS)):
            await cluster.answer(f"r{number}")
        await cluster.board.wait_for(
            f"blocks are moved: {worker.blocks.free_runs()}",
            lambda: value_of(worker.hybrid.metrics.relocated) > 0,
        )
        worker.blocks.validate()
        for number, prompt in enumerate(PROMPTS):
            assert worker.blocks.match(prompt, len(prompt)) == 40 // LAYOUT.block_size * 8
            cluster.place(f"s{number}", prompt, GREEDY, prefill="combined", decode=None)
            stream = await cluster.answer(f"s{number}")
            assert stream.token_ids(0) == expected(prompt, GREEDY, 0)
        await worker.idle()
