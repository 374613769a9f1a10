"""Model folders on disk: shards, damage, and what an engine refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.cpu_engine import CpuEngine
from common.engine.dtype import load_model_layout
from common.engine.failure import RowsFailed
from common.errors import ErrorCode, ModelError, RequestError
from common.kv.layout import KVLayout
from common.models.config import ModelConfig
from tests.support.engine_runs import PooledEngine, row
from tests.support.tiny_models import save_tiny_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_model("llama", tmp_path)
    return tmp_path


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def greedy(folder: Path, dtype: str = "float32") -> list[int]:
    pooled = PooledEngine(folder, dtype=dtype)
    blocks = pooled.blocks_for(20)
    output = [pooled.execute(row([5, 6, 7, 8, 9, 10], 0, blocks))[0][0].token_id]
    while len(output) < 8:
        step = row([output[-1]], 5 + len(output), blocks)
        output.append(pooled.execute(step)[0][0].token_id)
    return output


def test_shards_give_what_one_file_gives(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sharded = tmp_path_factory.mktemp("sharded")
    save_tiny_model("llama", sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert greedy(sharded) == greedy(folder)


def test_bfloat16_weights_and_pool_work(folder: Path) -> None:
    assert len(greedy(folder, "bfloat16")) == 8


def test_a_missing_shard_is_named(folder: Path) -> None:
    save_tiny_model("llama", folder, max_shard_size="60KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    (folder / WEIGHTS).unlink(missing_ok=True)
    with pytest.raises(ModelError, match=f"{shard.name}: the shard is missing"):
        PooledEngine(folder)


NORM = "model__layers__1__input_layernorm__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, "missing: model.layers.1.input_layernorm.weight"),
        (
            {NORM: torch.ones(47)},
            r"another shape: .*input_layernorm.weight \(47,\) instead of \(48,\)",
        ),
        ({"extra__weight": torch.ones(2)}, "unknown: extra.weight"),
        ({NORM: torch.ones(48, dtype=torch.int8)}, "holds torch.int8"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.ones(96)}, "unknown: .*q_proj.bias"),
    ],
)
def test_wrong_tensors_are_named(
    folder: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    change_weights(folder, **changes)
    with pytest.raises(ModelError, match=message):
        PooledEngine(folder)


def test_many_wrong_tensors_are_counted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with pytest.raises(ModelError, match=r"missing: .* and 49 more$"):
        PooledEngine(folder)


def test_stored_frequencies_and_a_tied_head_are_ignored(folder: Path) -> None:
    save_tiny_model("llama-tied", folder)
    before = greedy(folder)
    change_weights(
        folder,
        lm_head__weight=torch.zeros(97, 48),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8),
    )
    assert greedy(folder) == before


def test_a_cut_file_is_refused(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="another length"):
        PooledEngine(folder)


def test_a_pool_that_does_not_fit_is_refused(folder: Path) -> None:
    layout = load_model_layout(ModelConfig.load(folder), "float32", 16)
    size = layout.block_bytes
    with pytest.raises(ValueError, match="no multiple of blocks"):
        CpuEngine(folder, layout, torch.zeros(size + 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no multiple of blocks"):
        CpuEngine(folder, layout, torch.zeros(0, dtype=torch.uint8))
    with pytest.raises(ValueError, match="run of bytes"):
        CpuEngine(folder, layout, torch.zeros(size, dtype=torch.int8))
    with pytest.raises(ValueError, match="must be writable"):
        CpuEngine(folder, layout, memoryview(bytes(size)))
    other = KVLayout(4, 16, 2, 16, "float32")
    with pytest.raises(ValueError, match="the layout"):
        CpuEngine(folder, other, torch.zeros(other.block_bytes, dtype=torch.uint8))


def test_the_engine_writes_into_the_callers_memory(folder: Path) -> None:
    config = ModelConfig.load(folder)
    layout = load_model_layout(config, "float32", 16)
    memory = bytearray(3 * layout.block_bytes)
    engine = CpuEngine(folder, layout, memoryview(memory))
    assert engine.execute([]) == []
    engine.execute([row([1, 2, 3], 0, [1], params=None)])
    written = [any(memory[i * layout.block_bytes : (i + 1) * layout.block_bytes]) for i in range(3)]
    assert written == [False, True, False]


def test_a_row_without_numbers_fails_and_the_others_go_on(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[50] = float("nan")
    change_weights(folder, model__embed_tokens__weight=embedding)
    pooled = PooledEngine(folder)
    good = [3, 4, 5, 6, 7, 8]
    alone = pooled.execute(row(good, 0, pooled.blocks_for(6)))[0]

    rows = [
        row(good, 0, pooled.blocks_for(6)),
        row([50], 0, pooled.blocks_for(1)),
        row([9, 10], 0, pooled.blocks_for(2), params=None),
    ]
    with pytest.raises(RowsFailed, match=r"1 of 3 rows failed: \[1\]") as caught:
        pooled.execute(*rows)

    first, failed, last = caught.value.outcomes
    assert isinstance(first, tuple)
    assert first[0].token_id == alone[0].token_id
    assert first[0].logprob == pytest.approx(alone[0].logprob, abs=1e-5)
    assert isinstance(failed, RequestError)
    assert failed.code is ErrorCode.INTERNAL
    assert last == ()
