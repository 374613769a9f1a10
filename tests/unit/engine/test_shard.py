"""How a model is cut between the ranks of one engine."""

import pytest
import torch

from common.engine.random_weights import RandomWeights
from common.engine.shard import WHOLE, Shard
from common.engine.weights import Makers, expected_tensors, read_weights, shard_parts
from common.errors import ConfigError
from common.models.config import ModelConfig
from tests.support.parallel_runs import HEADS
from tests.support.tiny_models import save_tiny_model

Pair = tuple[torch.Tensor, torch.Tensor | None]
PAIRS: Makers[Pair, torch.Tensor] = Makers(lambda weight, bias: (weight, bias), lambda head: head)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("biased")
    save_tiny_model("llama-biased", folder, **HEADS)
    return ModelConfig.load(folder)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_shards_of_every_tensor_join_to_the_whole(config: ModelConfig, num_ranks: int) -> None:
    for name, shape in expected_tensors(config).items():
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        seen = torch.zeros(shape, dtype=torch.int32)
        for rank in range(num_ranks):
            shard = Shard(rank, num_ranks)
            part = shard_parts(config, shard).get(name, (slice(None),) * len(shape))
            assert whole[part].shape == expected_tensors(shard.config(config))[name]
            seen[part] += 1
        is_split = num_ranks > 1 and ("proj.weight" in name or "q_proj" in name)
        assert (seen == (1 if is_split or seen.max() == 1 else num_ranks)).all(), name


def test_outputs_of_the_ranks_add_up_and_their_bias_counts_once(config: ModelConfig) -> None:
    """The attention's output and down: x @ W.T + b, of x in parts."""
    dtype, cpu = torch.float32, torch.device("cpu")
    whole = read_weights(config, dtype, cpu, PAIRS).layers[1]
    shards = [read_weights(config, dtype, cpu, PAIRS, Shard(rank, 2)) for rank in range(2)]
    for name in ("output", "down"):
        weight, bias = getattr(whole, name)
        x = torch.randn(3, weight.shape[1])
        parts = []
        for shard, own in zip(shards, x.chunk(2, dim=1), strict=True):
            part_weight, part_bias = getattr(shard.layers[1], name)
            parts.append(own @ part_weight.T + (0 if part_bias is None else part_bias))
        torch.testing.assert_close(sum(parts), x @ weight.T + bias)
    assert [shard.head is None for shard in shards] == [False, True]
    torch.testing.assert_close(shards[0].embedding, shards[1].embedding)


def test_queries_stay_with_their_keys_and_values(config: ModelConfig) -> None:
    """A rank's fused product: its query heads, then its KV heads' keys and values."""
    dtype, cpu = torch.float32, torch.device("cpu")
    dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    weight = read_weights(config, dtype, cpu, PAIRS).layers[0].qkv[0]
    queries, keys, values = weight.split([heads * dim, kv_heads * dim, kv_heads * dim])
    for rank in range(4):
        own = read_weights(config, dtype, cpu, PAIRS, Shard(rank, 4)).layers[0].qkv[0]
        expected = [part.chunk(4)[rank] for part in (queries, keys, values)]
        assert torch.equal(own, torch.cat(expected))


def test_random_weights_are_cut_from_the_same_model(config: ModelConfig) -> None:
    name, cpu = "model.layers.0.mlp.down_proj.weight", torch.device("cpu")

    def drawn(shard: Shard) -> torch.Tensor:
        weights = RandomWeights(config, torch.float32, cpu, shard)
        weights.tensor("model.embed_tokens.weight")
        return weights.tensor(name)

    whole = drawn(WHOLE)
    assert torch.equal(torch.cat([drawn(Shard(rank, 2)) for rank in range(2)], dim=1), whole)


def test_what_cannot_be_split_is_refused_with_what_could(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel 8: .* 4 KV heads and an MLP of 80"):
        Shard(0, 8).config(config)
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        Shard(2, 2)


def test_a_shard_holds_its_part_and_no_more(config: ModelConfig) -> None:
    shard = read_weights(config, torch.float32, torch.device("cpu"), PAIRS, Shard(1, 2))
    products = [
        pair
        for layer in shard.layers
        for pair in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    held = sum(
        tensor.untyped_storage().nbytes() // 4
        for pair in products
        for tensor in pair
        if tensor is not None
    )
    expected = sum(
        torch.Size(shape).numel()
        for name, shape in expected_tensors(Shard(1, 2).config(config)).items()
        if "proj" in name and not name.endswith(("o_proj.bias", "down_proj.bias"))
    )
    assert held == expected
