"""The operations of steps, against a count of what another implementation's products take."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

from common.models.config import ModelConfig
from common.models.flops import num_pairs, step_flops
from tests.support.tiny_models import save_tiny_model

LENGTH = 4


@dataclass(frozen=True, slots=True)
class Row:
    start: int
    num_tokens: int
    is_last: bool = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("flops")
    save_tiny_model("llama", path)
    return path


def test_decodes_take_what_the_products_of_transformers_take(folder: Path) -> None:
    """One token at a time, so that a product over keys is of those that are seen alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    config = ModelConfig.load(folder)
    cache = DynamicCache(config=model.config)
    for position in range(LENGTH):
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            model(
                torch.tensor([[7 + position]]),
                cache=cache,
                position_ids=torch.tensor([[position]]),
            )
        counted = counter.get_flop_counts()
        rotations = sum(sum(of.values()) for name, of in counted.items() if "rotary" in name)
        assert step_flops(config, [Row(position, 1)]) == counter.get_total_flops() - rotations


def test_a_chunk_takes_what_its_tokens_take_one_by_one(folder: Path) -> None:
    config = ModelConfig.load(folder)
    tokens = [Row(place, 1, is_last=place == 19) for place in range(5, 20)]
    assert step_flops(config, [Row(5, 15)]) == step_flops(config, tokens)
    windowed = replace(config, layer_windows=(8, None, 6))
    assert step_flops(windowed, [Row(5, 15)]) == step_flops(windowed, tokens)
    assert step_flops(windowed, tokens) < step_flops(config, tokens)


def test_a_token_that_nothing_is_drawn_after_needs_only_k_and_v_of_the_last_layer(
    folder: Path,
) -> None:
    config = ModelConfig.load(folder)
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    saved = (
        2 * hidden * config.vocab_size  # the head
        + 4 * hidden * queries  # queries and output
        + 6 * hidden * config.intermediate_size
        + 4 * queries * 12  # it would see itself and eleven before it
    )
    drawn, silent = Row(11, 1), Row(11, 1, is_last=False)
    assert step_flops(config, [drawn]) - step_flops(config, [silent]) == saved
    assert step_flops(config, []) == 0


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 12), (3, 9), (50, 4), (7, 0)])
def test_pairs_are_the_positions_that_each_token_sees(
    start: int, count: int, window: int | None
) -> None:
    seen = [min(place + 1, window or place + 1) for place in range(start, start + count)]
    assert num_pairs(start, count, window) == sum(seen)
