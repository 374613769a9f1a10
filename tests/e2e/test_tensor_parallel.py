"""A decode worker of two ranks goes on with what a prefill worker computed layer by layer."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.answers import Json
from tests.support.cluster import Cluster, ClusterOptions, running_cluster
from tests.support.prompts import Encode, exact_prompt
from tests.support.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

NUM_RANKS = 2
POOL_BYTES = 16 * 2**20
PROMPT_TOKENS = (5, 64, 300)
MAX_TIES = 1


async def test_the_answers_are_those_of_one_rank(
    model_folder: Path, tmp_path: Path, encode: Encode, note: Callable[[str], None]
) -> None:
    write_tiny_llama(tmp_path, model_folder)
    options = ClusterOptions(
        tmp_path,
        kv_bytes=POOL_BYTES,
        settings={"roles": "manual"},
        # Neither a ring of layers nor ranks may be seen in an answer.
        worker_settings={
            "prefill-0": {"layer_ring": POOL_BYTES},
            "decode-0": {"tensor_parallel": NUM_RANKS},
        },
    )
    alone = ClusterOptions(tmp_path, is_combined=True, kv_bytes=POOL_BYTES)
    prompts = [exact_prompt("", n, first=7000 + n).token_ids(encode) for n in PROMPT_TOKENS]
    bodies: list[Json] = [
        {"prompt": prompt, "max_tokens": 12, "temperature": 0} for prompt in prompts
    ]

    async def texts(cluster: Cluster, bodies: list[Json]) -> list[str]:
        answers = await asyncio.gather(*(cluster.ask("/v1/completions", b) for b in bodies))
        return [answer.choices[0].text for answer in answers]

    async with running_cluster(alone) as cluster:
        wanted = await texts(cluster, bodies)
    async with running_cluster(options) as cluster:
        found = await texts(cluster, bodies)
        num_ties = sum(ours != theirs for ours, theirs in zip(found, wanted, strict=True))
        note(f"two ranks equal one: {len(bodies)} prompts, {num_ties} ties")
        assert num_ties <= MAX_TIES
        prefill = await cluster.worker("prefill-0")
        assert prefill is not None
        assert [pair.transport for pair in prefill.pairs] == ["ranks"]
        await cluster.wait_idle()

        (rank, *_) = psutil.Process(cluster.pid("decode-0")).children()
        rank.send_signal(signal.SIGKILL)
        assert await cluster.end_of("decode-0") == 1, "it goes on without one of its ranks"
        cluster.start("decode-0")
        await cluster.wait_ready()
        assert await texts(cluster, bodies[:1]) == found[:1]
