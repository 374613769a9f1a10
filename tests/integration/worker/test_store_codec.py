"""Workers whose store keeps blocks encoded load those, and find no others."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.messages.fields import PhaseName, Role
from common.storage.codec_fp8 import FP8, Fp8Codec
from common.storage.interface import StoreIdentity
from tests.support import running_worker
from tests.support.gated_store import GatedStore
from tests.support.played_store import (
    GREEDY,
    NUM_LOADED,
    PROMPT,
    SIZE,
    Played,
    num_computed,
    playing,
    value,
)
from tests.support.running_worker import MODEL, RunningWorker, WorkerOptions
from tests.support.stored_blocks import PAGE_BYTES, open_file_store
from tests.support.worker_harness import expected

LAYOUT = replace(running_worker.LAYOUT, head_dim=256)
"""Of blocks that are worth encoding."""
ENCODED_BYTES = Fp8Codec(LAYOUT).encoded_bytes
PLAIN = StoreIdentity(MODEL, LAYOUT.fingerprint(), LAYOUT.dtype, LAYOUT.block_bytes)
ENCODED = replace(PLAIN, block_bytes=ENCODED_BYTES, codec=FP8)
NUM_BLOCKS = NUM_LOADED // SIZE


async def start(
    played: Played, name: str, identity: StoreIdentity, options: WorkerOptions
) -> RunningWorker:
    store = open_file_store(played.folder, identity=identity)
    played.stores.append(store)
    with_store = replace(options, store=GatedStore(store, played.cluster.board))
    return await played.cluster.start_worker(name, Role.PREFILL, with_store)


@pytest.mark.parametrize(
    "options",
    [
        WorkerOptions(),
        WorkerOptions(num_buffer_blocks=4),
        WorkerOptions(num_tier_blocks=32),
    ],
    ids=["direct", "buffered", "tier"],
)
async def test_encoded_blocks_are_loaded_and_counted_as_storage_moved_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: WorkerOptions
) -> None:
    monkeypatch.setattr(running_worker, "LAYOUT", LAYOUT)
    async with playing(tmp_path) as played:
        writer = await start(played, "writer", ENCODED, options)
        played.cluster.place("w", PROMPT, GREEDY, prefill="writer", decode=None)
        assert (await played.cluster.answer("w")).token_ids(0) == expected(PROMPT, GREEDY)
        await writer.idle()
        played.flush()
        num_written = value(writer, "store_blocks_total", event="written")
        assert num_written == len(PROMPT) // SIZE
        written_bytes = value(writer, "store_written_bytes_total")
        assert written_bytes == num_written * (ENCODED_BYTES + PAGE_BYTES)
        encoded = value(writer, "store_codec_bytes_total", way="encoded")
        assert encoded == num_written * LAYOUT.block_bytes
        ratio = value(writer, "store_codec_ratio")
        assert ratio == pytest.approx(LAYOUT.block_bytes / ENCODED_BYTES)
        assert value(writer, "store_codec_error", kind="rms") > 0

        reader = await start(played, "reader", ENCODED, options)
        played.place()
        answer = (await played.cluster.answer("r")).token_ids(0)
        await reader.idle()
        # What this engine draws hangs on every bit, and FP8 keeps too few of them: only that it
        # went on from what was loaded can be told.
        assert len(answer) == GREEDY.max_tokens
        assert num_computed(reader) == len(PROMPT) - NUM_LOADED
        load = played.phase(PhaseName.LOAD)
        assert (load.num_tokens, load.num_calls) == (NUM_LOADED, NUM_BLOCKS)
        assert load.num_bytes == NUM_BLOCKS * ENCODED_BYTES
        assert value(reader, "store_read_bytes_total") == NUM_BLOCKS * ENCODED_BYTES
        decoded = value(reader, "store_codec_bytes_total", way="decoded")
        assert decoded == NUM_BLOCKS * LAYOUT.block_bytes
        assert reader.store.link_stats().kv_bytes == NUM_BLOCKS * ENCODED_BYTES
        assert reader.hybrid.heartbeat().rates.read_tokens_per_second > 0


async def test_a_worker_without_the_codec_computes_what_is_stored_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_worker, "LAYOUT", LAYOUT)
    async with playing(tmp_path) as played:
        writer = await start(played, "writer", ENCODED, WorkerOptions())
        played.cluster.place("w", PROMPT, GREEDY, prefill="writer", decode=None)
        await played.cluster.answer("w")
        await writer.idle()
        played.flush()
        reader = await start(played, "reader", PLAIN, WorkerOptions())
        played.place()
        await played.answered()
        await reader.idle()
        assert num_computed(reader) == len(PROMPT)
        assert value(reader, "store_blocks_total", event="hit") == 0
        assert value(reader, "store_codec_ratio") == 1.0
