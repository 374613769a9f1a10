"""One engine over two GPUs: what it computes, what it survives, and heads moved on GPUs.

With FlashInfer's kernels, captured graphs and NCCL. The first run on a machine compiles for
minutes, in both processes.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.cuda.cupy_driver import cuda_driver
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.messages.fields import CudaPoolHandle
from common.sampling import SampledToken, SamplingParams
from common.transfer.cuda_heads import HeadMover
from common.transfer.head_copies import block_checksums
from common.transfer.heads import plan_heads, rank_layout
from common.transfer.ranks import RankedPool, RanksLink
from common.transfer.ranks_transport import join_ranks
from common.transfer.verify import verify_blocks
from tests.support.cuda_runs import PooledCudaEngine
from tests.support.engine_runs import row
from tests.support.gpu import why_no_gpu
from tests.support.parallel_runs import CudaRanks
from tests.support.tiny_models import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_gpu(2) is not None, reason=str(why_no_gpu(2))),
    # Compiling is slow, and the libraries warn about each other.
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

DEVICES = ("cuda:0", "cuda:1")
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SPREAD = 0.05
"""Small enough that rounding does not decide what attention looks at."""
NOISE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
GREEDY = SamplingParams(seed=0, max_tokens=1000, temperature=0.0, num_logprobs=5)
PLAIN = SamplingParams(seed=0, max_tokens=1000, temperature=0.0)
PROMPTS = [[*range(3, 8)], [*range(10, 90)], [*range(20, 53)]]
NUM_NEW = 24
END_SECONDS = 10.0
"""NCCL would wait for captured operations much longer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny_model("qwen3", path, spread=SPREAD, **SHAPE)
    return path


@pytest.fixture(scope="module", params=list(NOISE))
def built(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[CudaRanks, str]]:
    ranks = CudaRanks(folder, DEVICES, dtype=request.param, num_blocks=256)
    yield ranks, request.param
    ranks.close()


def assert_near(
    outputs: list[list[SampledToken]], expected: list[list[SampledToken]], noise: float
) -> None:
    """Equal tokens up to the first tie of each prompt, and their logprobs near each other."""
    for output, reference in zip(outputs, expected, strict=True):
        for token, other in zip(output, reference, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=noise)
            if token.token_id != other.token_id:
                gap = other.top_logprobs[0][1] - other.top_logprobs[1][1]
                assert gap < noise, "they differ where there is no tie"
                break


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_two_gpus_draw_what_one_draws(
    built: tuple[CudaRanks, str], folder: Path, ahead: bool
) -> None:
    ranks, dtype = built
    outputs = ranks.generate(PROMPTS, GREEDY, NUM_NEW, ahead=ahead)
    alone = PooledCudaEngine(folder, device=DEVICES[0], dtype=dtype, num_blocks=256)
    assert_near(outputs, alone.generate(PROMPTS, GREEDY, NUM_NEW, ahead=ahead), NOISE[dtype])


def test_launching_ahead_changes_no_token(built: tuple[CudaRanks, str]) -> None:
    ranks, _ = built
    one_by_one = ranks.generate(PROMPTS, PLAIN, NUM_NEW, ahead=False)
    assert ranks.generate(PROMPTS, PLAIN, NUM_NEW, ahead=True) == one_by_one


def test_chunks_on_prefixes_and_steps_without_draws(
    built: tuple[CudaRanks, str], folder: Path
) -> None:
    ranks, dtype = built
    results = []
    alone = PooledCudaEngine(folder, device=DEVICES[0], dtype=dtype, num_blocks=256)
    for engine in (ranks, alone):
        blocks = engine.blocks_for(80)
        assert engine.execute(row([*range(3, 40)], 0, blocks, params=None)) == [()]
        results.append(
            engine.execute(
                row([*range(40, 55)], 37, blocks, params=GREEDY),
                row([5, 6, 7], 0, engine.blocks_for(8), params=None),
                row([9], 0, engine.blocks_for(1), params=GREEDY),
            )
        )
    found, expected = ([[*rows[0]], [*rows[2]]] for rows in results)
    assert_near(found, expected, NOISE[dtype])


def test_an_engine_with_captured_steps_ends(folder: Path) -> None:
    ranks = CudaRanks(folder, DEVICES, dtype="bfloat16")
    ranks.generate(PROMPTS, PLAIN, 4, ahead=True)
    begin = perf_counter()
    ranks.close()
    assert perf_counter() - begin < END_SECONDS


def test_an_fp8_cache_over_two_gpus(folder: Path) -> None:
    scales = (0.05,) * 6
    kind = "float8_e4m3"
    ranks = CudaRanks(folder, DEVICES, dtype="bfloat16", kv_cache_dtype=kind, scales=scales)
    try:
        outputs = ranks.generate(PROMPTS, GREEDY, 8, ahead=True)
    finally:
        ranks.close()
    alone = PooledCudaEngine(
        folder, device=DEVICES[0], dtype="bfloat16", kv_cache_dtype=kind, scales=scales
    )
    assert_near(outputs, alone.generate(PROMPTS, GREEDY, 8, ahead=True), 0.3)


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 2), (2, 2), (2, 1)])
def test_decoding_goes_on_with_heads_moved_between_gpus(
    folder: Path, num_sources: int, num_targets: int
) -> None:
    """Prefill by so many ranks, decode by so many; the tokens are those of one GPU."""
    source = CudaRanks(folder, DEVICES[:num_sources], dtype="bfloat16")
    target = CudaRanks(folder, DEVICES[:num_targets], dtype="bfloat16")
    alone = PooledCudaEngine(folder, device=DEVICES[0], dtype="bfloat16")
    try:
        layout = alone.layout
        own, peer = (ranked_pool(layout, ranks) for ranks in (source, target))
        link = RanksLink.between(own, peer.ranks)
        prompt, total = PROMPTS[1], len(PROMPTS[1]) + 12
        ours, theirs = source.blocks_for(len(prompt)), target.blocks_for(total)
        reference = alone.blocks_for(total)
        (first,) = source.execute(row(prompt, 0, ours, params=GREEDY))[0]
        (last,) = alone.execute(row(prompt, 0, reference, params=GREEDY))[0]
        written = theirs[: len(ours)]
        report = link.write(ours, written)
        assert verify_blocks(peer, written, report.checksums) is None
        found, expected = [first], [last]
        for at in range(len(prompt), total):
            found += target.execute(row([last.token_id], at, theirs, params=GREEDY))[0]
            (last,) = alone.execute(row([last.token_id], at, reference, params=GREEDY))[0]
            expected.append(last)
        for token, other in zip(found, expected, strict=True):
            assert_near([[token]], [[other]], NOISE["bfloat16"])
        link.close()
    finally:
        source.close()
        target.close()


def ranked_pool(layout: KVLayout, ranks: CudaRanks) -> RankedPool:
    pool = ranks.built.own.pool
    assert isinstance(pool, DevicePool)
    handles = [h for h in ranks.engine.handles[1:] if isinstance(h, CudaPoolHandle)]
    return join_ranks(layout, pool, handles)


KILLED = """
import os, signal, sys
from pathlib import Path
from time import perf_counter
from common.engine.failure import EngineBroken
from tests.support.engine_runs import row
from tests.support.parallel_runs import CudaRanks
ranks = CudaRanks(Path(sys.argv[1]), ("cuda:0", "cuda:1"), dtype="bfloat16")
blocks = ranks.blocks_for(20)
ranks.execute(row([3, 4, 5], 0, blocks))
os.kill(ranks.engine.pids[0], signal.SIGKILL)
begin = perf_counter()
for _ in range(2):
    try:
        ranks.execute(row([6], 3, blocks))
    except EngineBroken as error:
        print(f"{perf_counter() - begin:.2f} s: {error}", flush=True)
os._exit(0)
"""


def test_a_killed_rank_breaks_the_engine_by_name_and_nobody_hangs(folder: Path) -> None:
    """In a process of its own: what NCCL leaves behind after an abort is not this process's."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(ended.stdout, ended.stderr[-2000:])
    told = [line for line in ended.stdout.splitlines() if " s: the tensor-parallel" in line]
    assert len(told) == 2
    assert all("was killed by SIGKILL" in line for line in told)


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 2), (2, 1), (2, 2)])
def test_heads_are_gathered_on_the_gpu(num_sources: int, num_targets: int) -> None:
    """640 blocks of Llama-3.1-8B's shape in random order, from GPU 0 to GPU 1."""
    layout = KVLayout(32, 16, 8, 128, "bfloat16")
    source, target = rank_layout(layout, num_sources), rank_layout(layout, num_targets)
    count = 640
    driver = cuda_driver()
    driver.enable_peer_access(0, 1)
    sources = [DevicePool(count, source.block_bytes, 0) for _ in range(num_sources)]
    targets = [DevicePool(count, target.block_bytes, 1) for _ in range(num_targets)]
    for pool in sources:
        pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
    random = np.random.default_rng(1)
    source_ids, target_ids = (random.permutation(count).astype(np.int32) for _ in range(2))
    mover = HeadMover(driver, 0)
    parts: list[list[NDArray[np.uint64]]] = [[] for _ in targets]
    torch.cuda.synchronize(0)
    for _ in range(2):
        parts = [[] for _ in targets]
        begin = perf_counter()
        for transfer in plan_heads(layout, num_sources, num_targets):
            addresses = (
                sources[transfer.source_rank].address,
                targets[transfer.target_rank].address,
            )
            sums = mover.move(transfer, addresses, source_ids, target_ids)
            parts[transfer.target_rank].append(sums)
        seconds = perf_counter() - begin
    num_bytes = count * layout.block_bytes
    print(f"{num_sources} to {num_targets}: {num_bytes / seconds / 1e9:.0f} GB/s")
    for pool, sums in zip(targets, parts, strict=True):
        found = block_checksums(sums, target.block_bytes)
        assert found.tolist() == pool.checksum(target_ids).tolist()

    def heads(pools: list[DevicePool], own: KVLayout, ids: NDArray[np.int32]) -> torch.Tensor:
        views = [
            pool.tensor[: pool.num_bytes]
            .view(count, own.num_layers, 2, own.block_size, own.num_kv_heads, -1)
            .cpu()
            for pool in pools
        ]
        return torch.cat(views, dim=4)[torch.from_numpy(ids).long()]

    assert torch.equal(heads(sources, source, source_ids), heads(targets, target, target_ids))
    mover.close()
    for pool in (*sources, *targets):
        pool.close()
