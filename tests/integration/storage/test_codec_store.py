"""Blocks that are kept encoded come back, and are never taken for blocks of another kind."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.storage import codec_stage
from common.storage.codec_fp8 import FP8, Fp8Codec
from common.storage.codec_stage import CodecStage
from common.storage.codec_store import CodecStore
from common.storage.file_store import FileStore
from common.storage.header import HeaderCodec
from common.storage.interface import StoreIdentity
from tests.support.stored_blocks import (
    FLUSH_SECONDS,
    PAGE_BYTES,
    chain,
    files_of,
    open_file_store,
)

LAYOUT = KVLayout(2, 16, 4, 32, "float32")
CODEC = Fp8Codec(LAYOUT)
SIZE = LAYOUT.block_bytes
PLAIN = StoreIdentity("0123456789abcdef", LAYOUT.fingerprint(), LAYOUT.dtype, SIZE)
ENCODED = replace(PLAIN, block_bytes=CODEC.encoded_bytes, codec=FP8)
HASHES = chain("a", 5)


def block(block_hash: bytes) -> bytes:
    """Return the numbers that belong to a hash."""
    random = np.random.default_rng(int.from_bytes(block_hash[:8], "little"))
    return random.standard_normal(SIZE // 4).astype(np.float32).tobytes()


def decoded(block_hash: bytes) -> bytes:
    """Return what is left of them."""
    encoded, left = bytearray(CODEC.encoded_bytes), bytearray(SIZE)
    assert CODEC.try_encode(block(block_hash), encoded)
    CODEC.decode(encoded, left)
    return bytes(left)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileStore]:
    with closing(open_file_store(tmp_path, identity=ENCODED)) as opened:
        yield opened


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> CodecStage:
    """Return one with room for two blocks."""
    monkeypatch.setattr(codec_stage, "READ_BYTES", 2 * CODEC.encoded_bytes)
    return CodecStage(CODEC)


@pytest.fixture
def store(files: FileStore, stage: CodecStage) -> CodecStore:
    store = CodecStore(files, stage)
    previous = None
    for block_hash in HASHES:
        assert store.write(block_hash, previous, block(block_hash))
        previous = block_hash
    assert store.flush(FLUSH_SECONDS)
    return store


def read(store: CodecStore) -> tuple[list[bool], bytearray]:
    buffer = bytearray(6 * SIZE)
    return store.read(HASHES, buffer, [5, 0, 3, 1, 4]), buffer


def test_blocks_come_back_to_their_places_a_stage_full_at_a_time(
    store: CodecStore, stage: CodecStage
) -> None:
    assert stage.num_slots == 2
    store.register([bytearray(SIZE)])
    hits, buffer = read(store)
    assert hits == [True] * 5
    for block_hash, place in zip(HASHES, [5, 0, 3, 1, 4], strict=True):
        assert buffer[place * SIZE : (place + 1) * SIZE] == decoded(block_hash)
    assert not any(buffer[2 * SIZE : 3 * SIZE]), "other places are left alone"
    assert store.identity == replace(PLAIN, codec=FP8)
    assert store.longest_prefix(HASHES) == 5


def test_bytes_are_counted_as_storage_has_them(store: CodecStore, stage: CodecStage) -> None:
    read(store)
    stats, codec = store.stats(), stage.stats()
    file_bytes = CODEC.encoded_bytes + PAGE_BYTES
    assert (stats.stored_bytes, stats.written_bytes) == (5 * file_bytes, 5 * file_bytes)
    assert stats.read_bytes == 5 * CODEC.encoded_bytes
    # Of 8 pages are left two of numbers, and one of scales.
    assert codec.ratio == SIZE / CODEC.encoded_bytes == 8 / 3
    assert (codec.encoded_bytes, codec.decoded_bytes) == (5 * SIZE, 5 * SIZE)
    assert codec.encode_seconds > 0
    assert codec.decode_seconds > 0
    assert codec.num_measured == 1
    assert 0.02 < codec.rms_error == codec.worst_rms_error < 0.03, "of E4M3 and normal numbers"
    assert codec.rms_error < codec.worst_error <= 1 / 16


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_flipped_byte_is_a_miss_and_what_follows_its_turn_is_not_read(
    store: CodecStore, tmp_path: Path, number: int
) -> None:
    name = HASHES[number].hex()
    (path,) = (path for path in files_of(tmp_path) if path.name.startswith(name))
    data = bytearray(path.read_bytes())
    data[PAGE_BYTES + 7] ^= 1
    path.write_bytes(data)
    hits, _ = read(store)
    assert hits[: number + 1] == [True] * number + [False]
    assert store.stats().num_damaged == 1
    assert hits == [i != number and i // 2 <= number // 2 for i in range(5)]


def test_blocks_of_another_codec_are_not_found(store: CodecStore, tmp_path: Path) -> None:
    # Even where their bytes are as many, and wherever somebody put their files.
    same_size = replace(ENCODED, codec="none")
    with closing(open_file_store(tmp_path, identity=same_size)) as plain:
        assert plain.longest_prefix(HASHES) == 0
        buffer = bytearray(5 * CODEC.encoded_bytes)
        assert plain.read(HASHES, buffer, range(5)) == [False] * 5
        digest = HeaderCodec(same_size).digest().hex()
        for path in files_of(tmp_path):
            there = tmp_path / digest / path.parent.name / path.name
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(path.read_bytes())
        assert plain.read(HASHES, buffer, range(5)) == [False] * 5
        assert plain.stats().num_damaged == 5
    assert read(store)[0] == [True] * 5


def test_a_codec_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no store codec 'fp7'"):
        HeaderCodec(replace(ENCODED, codec="fp7"))


def test_a_block_that_cannot_be_encoded_is_dropped_and_counted(
    store: CodecStore, stage: CodecStage
) -> None:
    (block_hash,) = chain("b", 1)
    assert not store.write(block_hash, None, b"\xff" * SIZE)  # each of its numbers is NaN
    assert store.flush(FLUSH_SECONDS)
    assert store.stats().num_unencodable == 1
    assert store.longest_prefix([block_hash]) == 0
    assert stage.stats().num_encoded == 5
    with capture_logs() as lines:
        stage.close()
    (line,) = lines
    assert (line["event"], line["codec"], line["ratio"]) == ("store_codec_closed", "fp8", 2.6667)
    assert (line["num_encoded"], line["num_unencodable"], line["num_measured"]) == (5, 1, 1)
    assert line["worst_error"] >= line["worst_rms_error"] > 0


def test_places_outside_of_the_buffer_and_stores_of_other_sizes_are_refused(
    store: CodecStore, stage: CodecStage, tmp_path: Path
) -> None:
    for ids in ([0, 1, 2, 3, 6], [0, 1, 2, 3, -1], [0]):
        with pytest.raises(ValueError, match="do not fit"):
            store.read(HASHES, bytearray(6 * SIZE), ids)
    with (
        closing(open_file_store(tmp_path, identity=PLAIN)) as plain,
        pytest.raises(ValueError, match=f"blocks of {SIZE} bytes"),
    ):
        CodecStore(plain, stage)
