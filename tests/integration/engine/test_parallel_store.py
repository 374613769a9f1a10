"""A prompt that workers of two ranks stored is loaded by one of a lone rank, and back."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
import torch

from common.config.settings import Settings
from common.errors import ConfigError
from common.kv.blocks import PublishedBlocks
from common.messages.fields import Role
from common.sampling import SampledToken
from common.traffic.shared_link import SharedLink
from common.worker.machine import Machine, build_machine
from common.worker.store_access import StoreAccess
from common.worker.store_setup import open_worker_store
from tests.support.engine_runs import row
from tests.support.parallel_runs import HEADS, count_ties
from tests.support.tiny_models import save_tiny_model

NOISE = 1e-4
SIZE = 16
"""Tokens of a block."""
NUM_STORED = 4
HASHES = tuple(bytes([number]) * 16 for number in range(1, NUM_STORED + 1))
PROMPT = NUM_STORED * SIZE + 9
NUM_NEW = 6
WRITTEN = [7, 3, 4, 12, 0]
READ = [1, 9, 2, 11, 5, 6]
SECONDS = 30.0


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Machine]]:
    """Workers by their number of ranks."""
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model("qwen3", folder, **HEADS)
    with ExitStack() as stack:
        built = {}
        for num_ranks in (1, 2):
            settings = Settings(
                model=str(folder),
                device="cpu",
                dtype="float32",
                block_size=SIZE,
                kv_bytes=2**20,
                tensor_parallel=num_ranks,
                threads=1,
                swap_bytes=2**16,
            )
            machine = build_machine(settings, "prefill-0", Role.PREFILL)
            for close in (machine.pool.close, machine.host_blocks.close, machine.close):
                stack.callback(close)
            built[num_ranks] = machine
        yield built


def generated(
    machine: Machine, prompt: Sequence[int], start: int, blocks: list[int]
) -> list[SampledToken]:
    """Return the tokens after a prompt whose K and V before ``start`` are there."""
    ((token,),) = machine.engine.execute([row(list(prompt[start:]), start, blocks)])
    tokens = [token]
    for at in range(len(prompt), len(prompt) + NUM_NEW):
        ((token,),) = machine.engine.execute([row([tokens[-1].token_id], at, blocks)])
        tokens.append(token)
    return tokens


@pytest.mark.parametrize(("num_writers", "num_readers"), [(2, 1), (1, 2)])
async def test_a_stored_prompt_goes_on_with_another_number_of_ranks(
    tmp_path: Path, machines: dict[int, Machine], num_writers: int, num_readers: int
) -> None:
    settings = Settings(store=f"file:{tmp_path}/s")
    seed = torch.Generator().manual_seed(num_writers)
    prompt = torch.randint(3, 97, (PROMPT,), generator=seed).tolist()
    writer, reader = machines[num_writers], machines[num_readers]
    expected = generated(writer, prompt, 0, [*WRITTEN, 13])
    with closing(open_worker_store(settings, writer)) as store:
        access = StoreAccess(store, SharedLink(0))
        held = PublishedBlocks("o", tuple(WRITTEN[:NUM_STORED]), HASHES, ())
        assert await access.write(held) == 0
        assert store.storage.flush(SECONDS)
        access.close()
    # What was not loaded would be another prompt's.
    generated(reader, prompt[::-1], 0, READ)
    with closing(open_worker_store(settings, reader)) as store:
        access = StoreAccess(store, SharedLink(0))
        assert (await access.read(HASHES, READ[:NUM_STORED], None)).num_blocks == NUM_STORED
        access.close()
    found = generated(reader, prompt, NUM_STORED * SIZE, READ)
    assert count_ties(found, expected, NOISE) == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_preempted_blocks_come_back_to_all_ranks(
    machines: dict[int, Machine], num_ranks: int
) -> None:
    machine = machines[num_ranks]
    assert machine.host_blocks.num_slots == 2**16 // machine.layout.block_bytes
    prompt = list(range(3, 3 + SIZE))
    expected = generated(machine, prompt, 0, [1, 2])
    generated(machine, prompt, 0, [4, 5])
    machine.host_blocks.swap_out([(4, 0)])
    generated(machine, prompt[::-1], 0, [4, 5])
    machine.host_blocks.swap_in([(8, 0)])
    ((token,),) = machine.engine.execute([row([expected[0].token_id], SIZE, [8, 9])])
    assert count_ties([token], [expected[1]], NOISE) == 0


def test_swap_without_room_ends_a_worker_of_ranks_by_name(tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path, **HEADS)
    settings = Settings(
        model=str(tmp_path), device="cpu", tensor_parallel=2, kv_bytes=2**20, swap_bytes=2**50
    )
    before = {process.pid for process in psutil.Process().children()}
    with pytest.raises(ConfigError, match="swap_bytes cannot be had"):
        build_machine(settings, "prefill-0", Role.PREFILL)
    assert {process.pid for process in psutil.Process().children()} == before
