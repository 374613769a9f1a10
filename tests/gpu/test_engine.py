"""The CUDA engine on a GPU: its kernels, graphs and sampling.

The first run on a machine compiles kernels for minutes.
"""

import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.engine.cuda.flashinfer_kernels import FlashInferKernels, why_not
from common.engine.cuda.kernels import pool_view
from common.engine.cuda.memory import MIN_FLOAT_WORKSPACE
from common.engine.cuda.model import DTYPES, CudaModel
from common.engine.cuda.sampler import DeviceSampler, Draw
from common.engine.cuda.scales import BlockScales
from common.engine.cuda.torch_kernels import TorchKernels
from common.engine.failure import RowsFailed
from common.engine.interface import SampleSpec, StepRow
from common.engine.sampler import sample
from common.kv.layout import KVLayout
from common.models.config import ModelConfig
from common.sampling import SampledToken, SamplingParams
from tests.support.cuda_runs import PooledCudaEngine
from tests.support.sampling_cases import CASES, VOCAB, assert_same, specs_of
from tests.support.tiny_models import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # Compiling is slow, and the libraries warn about each other.
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

DEVICE = torch.device("cuda", 0)
GREEDY = SamplingParams(seed=0, max_tokens=1000, temperature=0.0, num_logprobs=5)
PLAIN = SamplingParams(seed=0, max_tokens=1000, temperature=0.0)
RANDOM = SamplingParams(seed=5, max_tokens=1000, temperature=0.8, top_p=0.95, top_k=40)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SPREAD = 0.1
"""Small enough that rounding does not decide what attention looks at."""

NOISE = {"bfloat16": 0.12, "float16": 0.015, "float32": 1e-4}
"""What a logprob of the tiny models may be off, in each type."""

FP8 = "float8_e4m3"
FP8_NOISE = 0.25
"""The same over an FP8 cache, whatever the model's type."""


@dataclass(frozen=True)
class Case:
    family: str
    dtype: str
    head_dim: int
    kv_cache_dtype: str = "auto"
    scale: float = 1.0
    """Of all layers and planes, where the cache is quantised."""

    def __str__(self) -> str:
        return f"{self.family}-{self.dtype}-{self.head_dim}-{self.kv_cache_dtype}-{self.scale}"

    @property
    def noise(self) -> float:
        return NOISE[self.dtype] if self.kv_cache_dtype == "auto" else FP8_NOISE


CASES_OF_KERNELS = [
    Case("llama-llama3", "bfloat16", 128),
    Case("qwen3", "bfloat16", 128),
    Case("qwen2", "bfloat16", 64),
    Case("qwen2-window", "bfloat16", 128),
    Case("llama", "float16", 128),
    Case("llama", "float32", 64),
    Case("llama-llama3", "bfloat16", 128, FP8),
    Case("qwen3", "bfloat16", 128, FP8, 0.03),
    Case("qwen2-window", "bfloat16", 64, FP8, 0.5),
    Case("llama", "float16", 256, FP8, 0.1),
    Case("llama", "float32", 64, FP8),
]
QUANTISED_CASES = [case for case in CASES_OF_KERNELS if case.kv_cache_dtype == FP8]


@pytest.fixture(scope="module", params=CASES_OF_KERNELS, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    if found.dtype != "float32":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own, as they are imported
            pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
            pytest.importorskip("cupy", reason="CuPy is not installed")
    return found


@pytest.fixture(scope="module")
def saved(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny_model(
        case.family, folder, spread=SPREAD, **(SHAPE | {"head_dim": case.head_dim})
    )
    # Rounded as the engine's weights are: what is compared is the arithmetic.
    return folder, model.to(DTYPES[case.dtype]).double()


def engine(
    folder: Path, case: Case, *, use_graphs: bool = True, num_blocks: int = 128
) -> PooledCudaEngine:
    is_quantised = case.kv_cache_dtype == FP8
    return PooledCudaEngine(
        folder,
        device="cuda:0",
        dtype=case.dtype,
        use_graphs=use_graphs,
        num_blocks=num_blocks,
        max_num_seqs=16,
        kv_cache_dtype=case.kv_cache_dtype,
        scales=(case.scale,) * (2 * ModelConfig.load(folder).num_layers) if is_quantised else (),
    )


def row(
    token_ids: list[int], start: int, table: list[int], params: SamplingParams | None = GREEDY
) -> StepRow:
    samples = () if params is None else (SampleSpec(params, 0, (), ()),)
    return StepRow(token_ids, start, table, samples)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


def logprobs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return found.double().log_softmax(dim=-1)


def assert_near(token: SampledToken, expected: torch.Tensor, case: Case) -> None:
    noise = case.noise
    assert token.logprob is not None
    for token_id, logprob in ((token.token_id, token.logprob), *token.top_logprobs):
        assert abs(float(expected[token_id]) - logprob) < noise
    assert float(expected.max() - expected[token.token_id]) < noise


def test_a_mixed_step_gives_every_row_its_logits(
    saved: tuple[Path, PreTrainedModel], case: Case
) -> None:
    """Decodes, fresh prompts, chunks on shared and own prefixes, sampled and not."""
    ours, reference = engine(saved[0], case), saved[1]
    shared, decoding, short = tokens(48, 1), tokens(70, 2), tokens(3, 3)
    shared_blocks, decoding_blocks = ours.blocks_for(48), ours.blocks_for(80)
    short_blocks = ours.blocks_for(8)
    ours.execute(
        row(shared, 0, shared_blocks, None),
        row(decoding, 0, decoding_blocks, None),
        row(short, 0, short_blocks, None),
    )
    fresh, on_shared, chunked = tokens(333, 4), tokens(20, 5), tokens(260, 7)
    chunked_blocks = ours.blocks_for(260)
    ours.execute(row(chunked[:137], 0, chunked_blocks, None))
    results = ours.execute(
        row([11], 70, decoding_blocks),
        row(fresh, 0, ours.blocks_for(333)),
        row(tokens(9, 9), 0, ours.blocks_for(9), None),
        row(on_shared, 48, shared_blocks + ours.blocks_for(20)),
        row([12], 3, short_blocks),
        row(chunked[137:], 137, chunked_blocks),
        row([7], 0, ours.blocks_for(1)),
    )
    contexts = [[*decoding, 11], fresh, shared + on_shared, [*short, 12], chunked, [7]]
    assert results.pop(2) == ()
    for (token,), context in zip(results, contexts, strict=True):
        assert_near(token, logprobs(reference, context)[-1], case)


def test_long_decodes_follow_the_float64_reference(
    saved: tuple[Path, PreTrainedModel], case: Case
) -> None:
    """Teacher-forced: every token's logprobs, given the tokens that were drawn before it."""
    ours, reference = engine(saved[0], case), saved[1]
    prompts = [tokens(count, count) for count in (5, 64, 65, 130, 300)]
    outputs = ours.generate(prompts, GREEDY, 40, ahead=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = logprobs(reference, prompt + [token.token_id for token in output])
        for index, token in enumerate(output):
            assert_near(token, expected[len(prompt) - 1 + index], case)


@pytest.mark.parametrize("params", [PLAIN, RANDOM, GREEDY], ids=["plain", "random", "logprobs"])
def test_launching_ahead_changes_no_token(
    saved: tuple[Path, PreTrainedModel], case: Case, params: SamplingParams
) -> None:
    prompts = [tokens(count, count) for count in (5, 9, 33)]
    one_by_one = engine(saved[0], case).generate(prompts, params, 30, ahead=False)
    assert engine(saved[0], case).generate(prompts, params, 30, ahead=True) == one_by_one


def test_a_step_s_time_is_its_device_s_however_late_it_is_seen(tmp_path: Path) -> None:
    save_tiny_model("llama-llama3", tmp_path, **(SHAPE | {"head_dim": 128}))
    pooled = PooledCudaEngine(tmp_path, device="cuda", dtype="bfloat16")
    blocks = pooled.blocks_for(64)

    def row(start: int) -> StepRow:
        return StepRow(tuple(range(8)), start, tuple(blocks), (SampleSpec(PLAIN, 0, (1,), ()),))

    for start in (0, 8):  # compiles what it needs
        pooled.engine.execute([row(start)])
    first = pooled.engine.launch([row(16)])
    second = pooled.engine.launch([row(24)])
    time.sleep(0.3)
    began = time.perf_counter()
    pooled.engine.collect(first)
    pooled.engine.collect(second)
    assert time.perf_counter() - began < 0.1
    taken = first.seconds_after(None), second.seconds_after(first)
    assert all(seconds is not None and 0 < seconds < 0.1 for seconds in taken), taken


def test_graphs_change_no_choice(saved: tuple[Path, PreTrainedModel], case: Case) -> None:
    prompts = [tokens(count, count) for count in (5, 9, 33, 64, 100)]
    with_graphs, without = engine(saved[0], case), engine(saved[0], case, use_graphs=False)
    assert bool(with_graphs.told) == (case.dtype != "float32")
    outputs = with_graphs.generate(prompts, GREEDY, 30, ahead=True)
    others = without.generate(prompts, GREEDY, 30, ahead=True)
    for output, other in zip(outputs, others, strict=True):
        for token, its in zip(output, other, strict=True):
            assert token.logprob == pytest.approx(its.logprob, abs=case.noise)
            if token.token_id != its.token_id:
                gap = token.top_logprobs[0][1] - token.top_logprobs[1][1]
                assert gap < case.noise, "they differ where there is no tie"
                break


def test_every_graph_pads_without_touching_other_blocks(
    saved: tuple[Path, PreTrainedModel], case: Case
) -> None:
    """1 to 16 rows: what is not a row's own block keeps its bytes."""
    ours = engine(saved[0], case)
    size = ours.layout.block_bytes
    for count in range(1, 17):
        ours.pool[: 128 * size].fill_(255)
        tables = [(block,) for block in range(0, 2 * count, 2)]
        ours.execute(*[StepRow([5], 0, table) for table in tables])
        ours.execute(*[row([6], 1, list(table), PLAIN) for table in tables])
        blocks = ours.pool[: 128 * size].view(128, size)
        touched = (blocks != 255).any(dim=1).nonzero().squeeze(1).tolist()
        assert touched == [table[0] for table in tables]


def test_200_random_requests_have_tokens(saved: tuple[Path, PreTrainedModel], case: Case) -> None:
    """Arrivals, chunks and decodes mixed, with every kind of sampling, in a pool full of NaN."""
    ours = engine(saved[0], case, num_blocks=1024)
    random = np.random.default_rng(3)
    kinds = [PLAIN, RANDOM, GREEDY, SamplingParams(seed=1, max_tokens=9, min_p=0.1)]
    waiting = [
        (tokens(int(random.integers(1, 90)), seed), kinds[seed % 4], int(random.integers(1, 9)))
        for seed in range(200)
    ]
    running: list[tuple[list[int], list[int], SamplingParams, int, int]] = []
    num_done = 0
    while waiting or running:
        while waiting and len(running) < 16 and random.random() < 0.7:
            prompt, params, count = waiting.pop()
            running.append((prompt, ours.blocks_for(len(prompt) + count), params, 0, count))
        if not running:
            continue
        rows, news = [], []
        for ids, table, params, start, _ in running:
            stop = len(ids) if random.random() < 0.6 else int(random.integers(start, len(ids))) + 1
            news.append(stop)
            rows.append(row(ids[start:stop], start, table, params if stop == len(ids) else None))
        results = ours.execute(*rows)
        left = []
        for (ids, table, params, _, count), stop, drawn in zip(running, news, results, strict=True):
            more = [token.token_id for token in drawn]
            assert all(0 <= token_id < 97 for token_id in more)
            remaining = count - len(more)
            if remaining:
                left.append((ids + more, table, params, stop, remaining))
            else:
                num_done += 1
                ours._free += table
        running = left
    assert num_done == 200


def test_a_row_without_numbers_fails_alone(saved: tuple[Path, PreTrainedModel], case: Case) -> None:
    ours = engine(saved[0], case)
    with torch.inference_mode():
        ours.engine._model.weights.embedding[50] = math.nan
    tables = [ours.blocks_for(4) for _ in range(2)]
    ours.execute(*[row([9], 0, table, None) for table in tables])
    for params in (PLAIN, GREEDY, RANDOM):
        with pytest.raises(RowsFailed, match=r"1 of 2 rows failed: \[1\]"):
            ours.execute(row([5], 1, tables[0], params), row([50], 1, tables[1], params))


def test_memory_does_not_grow(saved: tuple[Path, PreTrainedModel], case: Case) -> None:
    ours = engine(saved[0], case)
    prompts = [tokens(count, count) for count in (5, 9, 33)]
    ours.generate(prompts, RANDOM, 20, ahead=True)
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        ours.generate(prompts, RANDOM, 20, ahead=True)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("case", QUANTISED_CASES, ids=str, indirect=True)
def test_rows_with_blocks_of_other_scales_fail_alone(
    saved: tuple[Path, PreTrainedModel], case: Case
) -> None:
    """In a graph, and in a step of chunks."""
    ours = engine(saved[0], case)
    tables = [ours.blocks_for(40) for _ in range(3)]
    ours.execute(*[row(tokens(33, at), 0, table, None) for at, table in enumerate(tables)])
    BlockScales(ours.pool, ours.layout).trailers[tables[1][0], 1, 0] = 0.7
    torch.cuda.synchronize()
    for more in ([9], [9, 8]):
        for params in (PLAIN, GREEDY):
            with pytest.raises(RowsFailed, match=r"1 of 3 rows failed: \[1\]"):
                ours.execute(*[row(more, 33, table, params) for table in tables])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", FP8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("family", "head_dim"), [("llama", 64), ("qwen3", 128), ("qwen3", 256)])
def test_rotation_and_storing_equal_torchs(
    tmp_path: Path, family: str, head_dim: int, dtype: str, kv_cache_dtype: str
) -> None:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    save_tiny_model(family, tmp_path, **(SHAPE | {"head_dim": head_dim}))
    config = ModelConfig.load(tmp_path)
    scales = (1.0, 1.0, 0.0625, 0.003, 1.0, 1.0) if kv_cache_dtype == FP8 else ()
    layout = KVLayout(3, 16, 2, head_dim, dtype, 2, kv_cache_dtype, scales)
    assert why_not(config, layout, DEVICE) is None
    weights = CudaModel.load(config, dtype, DEVICE).weights
    pools = [torch.zeros(8 * layout.block_bytes, dtype=torch.uint8, device=DEVICE) for _ in "ab"]
    views = [pool_view(pool, layout) for pool in pools]
    trailers = [BlockScales(pool, layout) if scales else None for pool in pools]
    kernels = (
        FlashInferKernels(config, layout, views[0], DEVICE, MIN_FLOAT_WORKSPACE, trailers[0]),
        TorchKernels(config, layout, views[1], DEVICE, trailers[1]),
    )
    generator = torch.Generator(DEVICE).manual_seed(1)
    positions = torch.tensor([0, 1, 15, 16, 300, 511, 7], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([5, 16, 127, -1, 64, 0, -1], dtype=torch.int32, device=DEVICE)
    noise = 2e-2 if dtype == "bfloat16" else 3e-3
    for num_heads in (config.num_heads, 0):
        width = (num_heads + 2 * config.num_kv_heads) * head_dim
        heads = torch.randn(7, width, device=DEVICE, generator=generator).to(DTYPES[dtype])
        both = (heads.clone(), heads.clone())
        for one, its in zip(kernels, both, strict=True):
            one.rotate_store(1, weights.layers[1], its, positions, slots)
        torch.testing.assert_close(*both, rtol=noise, atol=noise)
        found, expected = (view.float() for view in views)
        torch.testing.assert_close(found, expected, rtol=2**-3 if scales else noise, atol=noise)
        assert torch.equal(found[:, 1, 1], expected[:, 1, 1]), "values are stored as they come"
        assert not torch.equal(both[0][:, :head_dim], heads[:, :head_dim])
        values = slice((num_heads + config.num_kv_heads) * head_dim, None)
        assert torch.equal(both[0][:, values], heads[:, values])
    assert not found[:, [0, 2]].any()
    if scales:
        for pair in trailers:
            assert pair is not None
            expected_scales = torch.tensor(scales[2:4], device=DEVICE)
            assert torch.equal(pair.trailers[[0, 1, 4], 1], expected_scales.expand(3, 2))
            assert not pair.trailers[[2, 3, 5, 6, 7]].any()
            assert not pair.trailers[:, [0, 2]].any()


def test_draws_equal_the_cpus() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, [40, 41, 300]] = logits.max() + 1  # a tie at the top
    specs = sorted((pair for name in CASES for pair in specs_of(name)), key=lambda pair: pair[0])
    draws = [Draw(index, spec) for index, spec in specs]
    there = logits.to(DEVICE)
    values, ids = there.max(dim=1)
    with torch.inference_mode():
        drawn = DeviceSampler(VOCAB, DEVICE).draw(there, (values, ids), draws).to_host()
    torch.cuda.synchronize()
    assert_same(drawn.tokens(draws), sample(logits, specs))


def test_float32_tokens_equal_the_cpu_engines(tmp_path: Path) -> None:
    pytest.importorskip("flowpath_native", reason="the native extension is not built")
    from tests.support.engine_runs import PooledEngine  # noqa: PLC0415 - needs the extension

    save_tiny_model("llama", tmp_path)
    prompt = tokens(50, 3)
    gpu = PooledCudaEngine(tmp_path, device="cuda:0")
    (output,) = gpu.generate([prompt], PLAIN, 30, ahead=True)
    cpu = PooledEngine(tmp_path)
    blocks = cpu.blocks_for(80)
    expected = [cpu.execute(row(prompt, 0, blocks))[0][0].token_id]
    while len(expected) < 30:
        at = len(prompt) + len(expected) - 1
        expected.append(cpu.execute(row([expected[-1]], at, blocks))[0][0].token_id)
    assert [token.token_id for token in output] == expected
