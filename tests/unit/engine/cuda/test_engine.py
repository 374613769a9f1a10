"""Steps in flight, failing rows, and what an engine refuses; on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.cuda.memory import activation_bytes
from common.engine.cuda.model import CudaModel
from common.engine.failure import RowsFailed
from common.engine.interface import DeferredStep, PendingToken, SampleSpec, StepRow
from common.errors import ConfigError, ErrorCode, RequestError
from common.models.config import ModelConfig
from common.sampling import SamplingParams
from tests.support.cuda_runs import PooledCudaEngine
from tests.support.engine_runs import GREEDY, PooledEngine, row
from tests.support.tiny_models import save_tiny_model

RANDOM = SamplingParams(seed=7, max_tokens=100, temperature=1.0, top_p=0.9, num_logprobs=3)
PLAIN = SamplingParams(seed=0, max_tokens=100, temperature=0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model("llama", tmp_path)
    return tmp_path


def break_token(folder: Path, token_id: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[token_id] = float("nan")
    tensors["model.embed_tokens.weight"] = embedding
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("params", [PLAIN, RANDOM, GREEDY])
def test_launching_ahead_changes_no_token(folder: Path, params: SamplingParams) -> None:
    prompts = [[5, 6, 7, 8, 9], [11], [20, 21, 22, 23, 24, 25, 26]]
    one_by_one = PooledCudaEngine(folder).generate(prompts, params, 12, ahead=False)
    ahead = PooledCudaEngine(folder).generate(prompts, params, 12, ahead=True)
    assert ahead == one_by_one
    assert len({token.token_id for output in ahead for token in output}) > 3


def test_greedy_tokens_are_the_cpu_engines(folder: Path) -> None:
    prompt = [5, 6, 7, 8, 9]
    ((*output,),) = PooledCudaEngine(folder).generate([prompt], PLAIN, 12, ahead=True)
    cpu = PooledEngine(folder)
    blocks = cpu.blocks_for(20)
    expected = [cpu.execute(row(prompt, 0, blocks))[0][0].token_id]
    while len(expected) < 12:
        step = row([expected[-1]], 4 + len(expected), blocks)
        expected.append(cpu.execute(step)[0][0].token_id)
    assert [token.token_id for token in output] == expected


def test_a_pending_token_feeds_a_chunk_beside_other_rows(folder: Path) -> None:
    """The row that continues is not the one with the same number, and not the only draw."""
    ours = PooledCudaEngine(folder)
    first, second = ours.blocks_for(20), ours.blocks_for(20)
    choices = tuple(SampleSpec(RANDOM, choice, (), ()) for choice in range(3))
    begun = ours.engine.launch(
        [
            StepRow([3, 4, 5], 0, first, choices),
            StepRow([50, 51], 0, ours.blocks_for(2)),
            StepRow([6, 7, 8, 9], 0, second, (SampleSpec(PLAIN, 0, (), ()),)),
        ]
    )
    continued = ours.engine.launch(
        [
            StepRow([0], 4, second, (SampleSpec(GREEDY, 0, (), ()),), PendingToken(0, 2)),
            StepRow([0], 3, first, (SampleSpec(GREEDY, 0, (), ()),), PendingToken(0, 0)),
        ]
    )
    drawn = ours.engine.collect(begun)
    assert [len(tokens) for tokens in drawn] == [3, 0, 1]
    results = ours.engine.collect(continued)

    again = PooledCudaEngine(folder)
    contexts = [[6, 7, 8, 9, drawn[2][0].token_id], [3, 4, 5, drawn[0][0].token_id]]
    for (token,), context in zip(results, contexts, strict=True):
        ((expected,),) = again.execute(row(context, 0, again.blocks_for(5)))
        assert token.token_id == expected.token_id
        assert token.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("pending", "message"),
    [
        (PendingToken(0, 0), "row 0 awaits step 0, not 1"),
        (PendingToken(1, 1), "does not draw"),
        (PendingToken(1, 5), "does not draw"),
    ],
)
def test_a_row_awaits_only_what_the_latest_step_draws(
    folder: Path, pending: PendingToken, message: str
) -> None:
    ours = PooledCudaEngine(folder)
    blocks = ours.blocks_for(20)
    ours.engine.launch([row([3], 0, blocks)])
    ours.engine.launch([row([4], 1, blocks), row([9], 0, ours.blocks_for(1), params=None)])
    with pytest.raises(ValueError, match=message):
        ours.engine.launch([StepRow([0], 2, blocks, (), pending)])


def test_a_row_without_numbers_fails_and_the_others_go_on(folder: Path) -> None:
    break_token(folder, 50)
    ours = PooledCudaEngine(folder)
    good = [3, 4, 5, 6, 7, 8]
    ((alone,),) = ours.execute(row(good, 0, ours.blocks_for(6)))
    for params in (GREEDY, PLAIN, RANDOM):
        with pytest.raises(RowsFailed, match=r"1 of 3 rows failed: \[1\]") as caught:
            ours.execute(
                row(good, 0, ours.blocks_for(6)),
                row([50], 0, ours.blocks_for(1), params=params),
                row([9, 10], 0, ours.blocks_for(2), params=None),
            )
        first, failed, last = caught.value.outcomes
        assert isinstance(first, tuple)
        assert first[0].token_id == alone.token_id
        assert isinstance(failed, RequestError)
        assert failed.code is ErrorCode.INTERNAL
        assert last == ()


def test_a_step_behind_a_failed_row_is_still_computed(folder: Path) -> None:
    """Its pending token is no number either way; the step must not read outside of anything."""
    break_token(folder, 50)
    ours = PooledCudaEngine(folder)
    bad, good = ours.blocks_for(4), ours.blocks_for(4)
    begun = ours.engine.launch([row([50], 0, bad), row([9], 0, good)])
    behind = ours.engine.launch(
        [
            StepRow([0], 1, bad, (SampleSpec(PLAIN, 0, (), ()),), PendingToken(0, 0)),
            StepRow([0], 1, good, (SampleSpec(PLAIN, 0, (), ()),), PendingToken(0, 1)),
        ]
    )
    with pytest.raises(RowsFailed) as caught:
        ours.engine.collect(begun)
    with pytest.raises(RowsFailed) as later:
        ours.engine.collect(behind)
    for error in (caught.value, later.value):
        assert isinstance(error.outcomes[0], RequestError)
        assert isinstance(error.outcomes[1], tuple)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([row([], 0, [1])], "row 0 has no tokens"),
        ([row([1], 0, [1]), row([1, 2], 15, [1])], "row 1: 1 blocks do not hold .* 15 to 16"),
        ([row([97], 0, [1])], "row 0 has a token id outside of the vocabulary of 97"),
        ([row([1], 0, [1]), row([-1], 0, [2])], "row 1 has a token id outside"),
    ],
)
def test_malformed_rows_are_refused_and_not_counted(
    folder: Path, rows: list[StepRow], message: str
) -> None:
    ours = PooledCudaEngine(folder)
    with pytest.raises(ValueError, match=message):
        ours.engine.launch(rows)
    assert ours.engine.launch([row([3], 0, [1])]).number == 0
    assert ours.engine.last_launch_seconds > 0


def test_a_table_that_was_changed_in_place_is_read_anew(folder: Path) -> None:
    ours = PooledCudaEngine(folder)
    table = [1]
    ours.execute(row([3, 4, 5], 0, table))
    table[0] = 2
    ours.execute(row([3, 4, 5], 0, table))
    size = ours.layout.block_bytes
    assert torch.equal(ours.pool[size : size + 48], ours.pool[2 * size : 2 * size + 48])


def test_dummy_weights_need_only_a_configuration(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    params = SamplingParams(seed=0, max_tokens=9, temperature=0.0, num_logprobs=1)
    runs = [
        PooledCudaEngine(folder, load_format="dummy").generate([[5, 6, 7]], params, 8, ahead=True)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert all(token.logprob is not None and -9 < token.logprob < 0 for token in runs[0][0])


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    config = ModelConfig.load(folder)
    with pytest.raises(ConfigError, match="dtype 'int8' is not supported"):
        CudaModel.load(config, "int8", torch.device("cpu"))
    ours = PooledCudaEngine(folder)
    with pytest.raises(TypeError, match="another engine"):
        ours.engine.collect(DeferredStep(0, []))
    changed = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(changed))
    other = CudaModel.load(ModelConfig.load(folder), "float32", torch.device("cpu"), "dummy")
    with pytest.raises(ValueError, match="the layout"):
        type(ours.engine)(
            other, ours.layout, ours.pool, 64, max_num_batched_tokens=64, max_num_seqs=8
        )


def test_activation_memory_grows_with_tokens_and_sequences(folder: Path) -> None:
    config = ModelConfig.load(folder)
    base = activation_bytes(config, 1024, 8, "bfloat16")
    more_tokens = activation_bytes(config, 2048, 8, "bfloat16")
    widest = 2 * config.hidden_size + 3 * config.intermediate_size
    assert more_tokens - base >= 1024 * widest * 2
    assert activation_bytes(config, 1024, 512, "bfloat16") > base
