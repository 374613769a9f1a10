"""The FP8 KV cache on a CPU: its numbers, its scales, and blocks that go from pool to pool."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.engine.cpu_engine import CpuEngine
from common.engine.cuda.kernels import pool_view
from common.engine.cuda.memory import activation_bytes, float_workspace_bytes
from common.engine.cuda.scales import E4M3, BlockScales, dequantise, quantise
from common.engine.failure import RowsFailed
from common.engine.interface import StepRow
from common.errors import RequestError
from common.kv.pool import KVPool
from common.models.config import ModelConfig
from common.sampling import SampledToken, SamplingParams
from common.transfer.shm import ShmBackend
from common.transfer.verify import verify_blocks
from tests.support.cuda_runs import PooledCudaEngine
from tests.support.engine_runs import row
from tests.support.tiny_models import save_tiny_model

RANDOM = SamplingParams(seed=7, max_tokens=100, temperature=1.0, num_logprobs=20)
FP8 = "float8_e4m3"
SCALES = (0.5, 0.0625, 0.03, 0.5, 2.0, 0.1)
"""One a layer and plane of the tiny models, some of them no powers of two."""

MAX_RELATIVE = 2**-4
"""Half of the last of three bits behind the point."""

MAX_NOISE = 0.25
"""What a logprob of the tiny model may be off; measured: at most 0.13."""

NUM_BLOCKS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model("qwen3", path, spread=0.1)
    return path


@pytest.fixture
def pools(folder: Path) -> Iterator[tuple[KVPool, KVPool]]:
    size = quantised(folder).layout.block_bytes
    pair = KVPool(NUM_BLOCKS + 1, size), KVPool(NUM_BLOCKS + 1, size)
    yield pair
    for pool in pair:
        pool.close()


def quantised(
    folder: Path, scales: tuple[float, ...] = SCALES, memory: memoryview | None = None
) -> PooledCudaEngine:
    return PooledCudaEngine(
        folder, num_blocks=NUM_BLOCKS, kv_cache_dtype=FP8, scales=scales, memory=memory
    )


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


def prefill(
    engine: PooledCudaEngine, prompt: list[int], table: list[int], ends: list[int]
) -> SampledToken:
    """Compute a prompt in chunks that end at ``ends`` and draw its first token."""
    for first, last in itertools.pairwise([0, *ends]):
        assert engine.execute(row(prompt[first:last], first, table, params=None)) == [()]
    start = ends[-1] if ends else 0
    ((token,),) = engine.execute(row(prompt[start:], start, table))
    return token


def decode(
    engine: PooledCudaEngine, prompt: list[int], table: list[int], first: SampledToken, count: int
) -> list[SampledToken]:
    output = [first]
    while len(output) < count:
        at = len(prompt) + len(output) - 1
        output.extend(*engine.execute(row([output[-1].token_id], at, table)))
    return output


@pytest.mark.parametrize("scale", [1.0, 0.03, 7.0])
def test_numbers_are_rounded_to_the_nearest_and_saturate(scale: float) -> None:
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * scale * 20
    error = (dequantise(quantise(numbers, scale), scale) - numbers).abs()
    smallest = 2**-9 * scale
    assert (error <= torch.maximum(numbers.abs() * MAX_RELATIVE, torch.tensor(smallest / 2))).all()
    extreme = torch.tensor([449.0, 1e30, -500.0, float("inf"), -float("inf")]) * scale
    limits = dequantise(quantise(extreme, scale), scale) / scale
    torch.testing.assert_close(limits, torch.tensor([448.0, 448.0, -448.0, 448.0, -448.0]))
    assert dequantise(quantise(torch.tensor([float("nan")]), scale), scale).isnan().all()


def test_the_pool_holds_the_16_bit_pools_numbers_within_the_bound(folder: Path) -> None:
    ours = PooledCudaEngine(folder, dtype="bfloat16", kv_cache_dtype=FP8, scales=SCALES)
    plain = PooledCudaEngine(folder, dtype="bfloat16")
    prompt, table = tokens(40, 1), [3, 1, 2]
    for engine in (ours, plain):
        engine.execute(row(prompt, 0, table, params=None))
    scales = torch.tensor(SCALES).view(-1, 2)[..., None, None, None]
    found = pool_view(ours.pool, ours.layout)[table[:2]].float() * scales
    expected = pool_view(plain.pool, plain.layout)[table[:2]].float()
    # The first layer's are computed from the same numbers; later ones are not.
    bound = torch.maximum(expected.abs() * MAX_RELATIVE, 2**-10 * scales)[:, 0]
    assert ((found - expected)[:, 0].abs() <= bound).all()
    assert not torch.equal(found[:, 0], expected[:, 0])
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("scales", [(), SCALES], ids=["ones", "calibrated"])
@pytest.mark.parametrize("ends", [[], [32], [7, 50]], ids=str)
def test_logprobs_stay_near_those_of_the_models_own_type(
    folder: Path, scales: tuple[float, ...], ends: list[int]
) -> None:
    ours, plain = quantised(folder, scales), PooledCudaEngine(folder)
    prompt = tokens(70, 2)
    table, its = ours.blocks_for(90), plain.blocks_for(90)
    output = decode(plain, prompt, its, prefill(plain, prompt, its, ends), 12)
    drawn = [prefill(ours, prompt, table, ends)]
    for at, token in enumerate(output[:-1]):
        drawn.extend(*ours.execute(row([token.token_id], len(prompt) + at, table)))
    worst = 0.0
    for token, other in zip(drawn, output, strict=True):
        near = dict(token.top_logprobs)
        for token_id, logprob in other.top_logprobs[:10]:
            assert token_id in near
            worst = max(worst, abs(near[token_id] - logprob))
    assert 1e-4 < worst < MAX_NOISE


@pytest.mark.parametrize("ends", [[], [32], [16, 53]], ids=str)
def test_a_handoff_of_blocks_changes_no_token(
    folder: Path, pools: tuple[KVPool, KVPool], ends: list[int]
) -> None:
    """Split is combined, given the same chunks: scales go with the blocks, and so do checksums."""
    one = quantised(folder)
    prompt = tokens(70, 3)
    table = one.blocks_for(100)
    first = prefill(one, prompt, table, ends)
    expected = decode(one, prompt, table, first, 20)

    sender = quantised(folder, memory=pools[0].buffer)
    receiver = quantised(folder, memory=pools[1].buffer)
    sent, received = sender.blocks_for(70), list(range(20, 27))
    assert prefill(sender, prompt, sent, ends) == first
    link = ShmBackend(pools[0]).open_peer(pools[1].handle())
    checksums = link.write(sent, received[: len(sent)]).checksums
    link.close()
    assert verify_blocks(pools[1], received[: len(sent)], checksums) is None
    assert decode(receiver, prompt, received, first, 20) == expected
    # A scale that was damaged on the way shows as any other byte does.
    receiver.pool.view(-1, receiver.layout.block_bytes)[
        received[0], receiver.layout.trailer_offset
    ] ^= 1
    assert verify_blocks(pools[1], received[:1], checksums[:1]) == 0


def test_every_block_that_is_written_has_its_scales_and_no_other(folder: Path) -> None:
    ours = quantised(folder)
    scales = BlockScales(ours.pool, ours.layout)
    tables = [ours.blocks_for(count) for count in (70, 16, 17, 1)]
    ours.execute(
        row(tokens(70, 1), 0, tables[0], params=None),
        row(tokens(16, 2), 0, tables[1], params=None),
        row([5], 0, tables[3]),
    )
    ours.execute(row(tokens(10, 4), 0, tables[2], params=None))
    ours.execute(row(tokens(7, 4), 10, tables[2], params=None))
    ours.execute(row([6], 16, tables[1] + ours.blocks_for(1), params=None))
    expected = torch.tensor(SCALES).view(-1, 2)
    for block in itertools.chain(*tables):
        assert torch.equal(scales.trailers[block], expected)
    for block in ours._free:
        assert scales.trailers[block].isnan().all()
    end = ours.layout.trailer_offset + 4 * len(SCALES)
    padding = ours.pool.view(-1, ours.layout.block_bytes)[:, end:]
    assert (padding == 255).all(), "nothing is written behind the scales"


def test_rows_with_blocks_of_other_scales_fail_alone(folder: Path) -> None:
    """Whether they are decoded or continued, and whichever of their blocks it is."""
    ours = quantised(folder)
    tables = [ours.blocks_for(40) for _ in range(4)]
    for at, table in enumerate(tables):
        ours.execute(row(tokens(33, at), 0, table, params=None))
    scales = BlockScales(ours.pool, ours.layout)
    scales.trailers[tables[1][0], 2, 1] = 0.2
    scales.trailers[tables[3][2], 0, 0] = float("nan")
    pure = [row([9], 33, table) for table in tables]
    mixed = [*[row([9], 33, table) for table in tables[:3]], row([9, 8], 33, tables[3])]
    drawn_twice = [StepRow([9], 33, tables[0], (row([9], 33, []).samples[0],) * 2), *pure[1:]]
    for rows in (
        pure,
        mixed,
        drawn_twice,
        [*pure, row([9, 8], 0, ours.blocks_for(2), params=None)],
    ):
        with pytest.raises(RowsFailed, match=r"2 of \d rows failed: \[1, 3\]") as caught:
            ours.execute(*rows)
        failed = caught.value.outcomes[1]
        assert isinstance(failed, RequestError)
        assert "other scales" in str(failed)
    assert len(ours.execute(pure[0], pure[2])) == 2
    # What draws nothing gives nothing out.
    assert ours.execute(row([9], 33, tables[1], params=None)) == [()]


def test_launching_ahead_changes_no_token(folder: Path) -> None:
    prompts = [tokens(count, count) for count in (5, 1, 33)]
    one_by_one = quantised(folder).generate(prompts, RANDOM, 12, ahead=False)
    assert quantised(folder).generate(prompts, RANDOM, 12, ahead=True) == one_by_one


def test_fresh_prompts_attend_to_what_was_computed(folder: Path) -> None:
    """All but the last layer's sampled tokens; so the pool holds K and V of unquantised context."""
    ours, plain = quantised(folder, ()), PooledCudaEngine(folder, num_blocks=NUM_BLOCKS)
    prompt, table = tokens(33, 5), [3, 1, 2]
    for engine in (ours, plain):
        engine.execute(row(prompt, 0, table, params=None))
    found = pool_view(ours.pool, ours.layout)[table[:2]]
    expected = quantise(pool_view(plain.pool, plain.layout)[table[:2]], 1.0)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_other_engines_and_pools_refuse_it(folder: Path) -> None:
    ours = quantised(folder)
    with pytest.raises(ValueError, match="the CPU engine does not run in float8_e4m3"):
        CpuEngine(folder, ours.layout, ours.pool)
    with pytest.raises(ValueError, match="no multiple of blocks"):
        pool_view(ours.pool[:-4096], ours.layout)
    assert pool_view(ours.pool, ours.layout).dtype == E4M3


def test_memory_for_split_chunks_is_kept_for_quantised_pools_alone(folder: Path) -> None:
    config = ModelConfig.load(folder)
    plain = activation_bytes(config, 1024, 8, "bfloat16")
    assert activation_bytes(config, 1024, 8, "bfloat16", FP8) >= plain
    rows = 512 // config.num_kv_heads * 128
    least = config.num_heads * rows * (config.head_dim + 1) * 4
    assert float_workspace_bytes(config, 8, FP8) >= least
