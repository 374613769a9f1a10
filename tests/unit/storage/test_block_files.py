"""Block files as the native core writes and reads them, by both engines."""

import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import flowpath_native
import numpy as np
import pytest

PAGE = 4096
PAYLOAD = 3 * PAGE
FILE = PAGE + PAYLOAD

ENGINES = [
    pytest.param(
        "io_uring",
        marks=pytest.mark.skipif(
            not flowpath_native.has_io_uring(), reason="this system has or allows no io_uring"
        ),
    ),
    "threads",
]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture(params=ENGINES)
def files(request: pytest.FixtureRequest, root: int) -> flowpath_native.BlockFiles:
    return flowpath_native.BlockFiles(request.param, root, 4, True)


def payloads(count: int) -> list[bytes]:
    return [np.random.default_rng(number).bytes(PAYLOAD) for number in range(count)]


def sealed(blocks: list[bytes]) -> mmap.mmap:
    arena = mmap.mmap(-1, FILE * len(blocks))
    for number, block in enumerate(blocks):
        place = memoryview(arena)[number * FILE : (number + 1) * FILE]
        flowpath_native.seal_block(place, f"head {number}".encode(), block)
    return arena


def write_all(files: flowpath_native.BlockFiles, blocks: list[bytes]) -> list[str]:
    names = [f"block-{number}" for number in range(len(blocks))]
    offsets = [number * FILE for number in range(len(blocks))]
    assert files.write(names, sealed(blocks), offsets, FILE) == [0] * len(blocks)
    return names


@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("shift", [0, 8])
def test_what_was_written_is_read_back_to_any_place(
    files: flowpath_native.BlockFiles, shift: int, *, is_registered: bool
) -> None:
    blocks = payloads(11)  # more than are in flight at a time
    names = write_all(files, blocks)
    into = mmap.mmap(-1, len(blocks) * PAYLOAD + PAGE)
    if is_registered:
        files.register_memory([into])
    offsets = [number * PAYLOAD + shift for number in range(len(blocks))]
    outcomes, heads = files.read(names[::-1], into, offsets, PAYLOAD)
    assert outcomes == [0] * len(blocks)
    for place, block in enumerate(blocks[::-1]):
        start = place * PAYLOAD + shift
        assert into[start : start + PAYLOAD] == block
        head = heads[place * 256 : (place + 1) * 256]
        assert head.rstrip(b"\0") == f"head {len(blocks) - 1 - place}".encode()


def test_memory_is_registered_again_and_given_back(root: int) -> None:
    if not flowpath_native.has_io_uring():
        pytest.skip("this system has or allows no io_uring")
    files = flowpath_native.BlockFiles("io_uring", root, 2, True)
    first, second = mmap.mmap(-1, PAYLOAD), mmap.mmap(-1, PAYLOAD)
    (name,) = write_all(files, payloads(1))
    if not files.register_memory([first]):
        pytest.skip(f"no memory can be pinned: {resource.getrlimit(resource.RLIMIT_MEMLOCK)}")
    with pytest.raises(BufferError):
        first.close()
    assert files.register_memory([second])
    first.close()
    assert files.read([name], second, [0], PAYLOAD)[0] == [0]
    assert second[:] == payloads(1)[0]
    assert not files.register_memory([])
    second.close()


@pytest.mark.parametrize("place", [0, 200, PAGE - 16, PAGE - 1, PAGE, FILE - 1])
def test_a_changed_byte_anywhere_is_noticed(
    files: flowpath_native.BlockFiles, tmp_path: Path, place: int
) -> None:
    (name,) = write_all(files, payloads(1))
    data = bytearray((tmp_path / name).read_bytes())
    data[place] ^= 0x10
    (tmp_path / name).write_bytes(data)
    assert files.read([name], mmap.mmap(-1, PAYLOAD), [0], PAYLOAD)[0] == [-2]


@pytest.mark.parametrize("size", [0, 100, PAGE, PAGE + 1, FILE - PAGE, FILE - 1])
def test_a_file_that_was_cut_is_noticed(
    files: flowpath_native.BlockFiles, tmp_path: Path, size: int
) -> None:
    (name,) = write_all(files, payloads(1))
    os.truncate(tmp_path / name, size)
    assert files.read([name], mmap.mmap(-1, PAYLOAD), [0], PAYLOAD)[0] == [-1]


def test_each_file_has_its_own_outcome(files: flowpath_native.BlockFiles, tmp_path: Path) -> None:
    names = write_all(files, payloads(4))
    (tmp_path / names[1]).unlink()
    (tmp_path / names[2]).unlink()
    (tmp_path / names[2]).symlink_to(names[0])
    into = mmap.mmap(-1, 4 * PAYLOAD)
    outcomes, _ = files.read(names, into, [number * PAYLOAD for number in range(4)], PAYLOAD)
    assert outcomes == [0, errno.ENOENT, errno.ELOOP, 0]
    assert into[3 * PAYLOAD :] == payloads(4)[3]


def test_a_file_that_exists_is_neither_written_nor_removed(
    files: flowpath_native.BlockFiles, tmp_path: Path
) -> None:
    (tmp_path / "there").write_bytes(b"old")
    arena = sealed(payloads(2))
    assert files.write(["there", "new"], arena, [0, FILE], FILE) == [errno.EEXIST, 0]
    assert (tmp_path / "there").read_bytes() == b"old"
    assert (tmp_path / "new").read_bytes() == arena[FILE:]


def test_a_folder_that_is_missing_fails_each_write(files: flowpath_native.BlockFiles) -> None:
    assert files.write(["no/where"], sealed(payloads(1)), [0], FILE) == [errno.ENOENT]


def test_nothing_to_do_is_done(files: flowpath_native.BlockFiles) -> None:
    assert files.read([], bytearray(0), [], PAYLOAD) == ([], b"")
    assert files.write([], bytearray(0), [], FILE) == []


@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(-1, PAYLOAD), (1, PAYLOAD), (0, PAYLOAD + PAGE), (0, 100), (0, 0)]
)
def test_a_place_outside_of_the_buffer_is_refused(
    files: flowpath_native.BlockFiles, offset: int, num_bytes: int
) -> None:
    with pytest.raises(ValueError, match=r"offset|payload_bytes"):
        files.read(["x"], bytearray(PAYLOAD), [offset], num_bytes)


def test_an_unknown_engine_and_depth_are_refused(root: int) -> None:
    with pytest.raises(ValueError, match="neither io_uring nor threads"):
        flowpath_native.BlockFiles("carrier pigeons", root, 1, True)
    with pytest.raises(ValueError, match="1 to 1024"):
        flowpath_native.BlockFiles("threads", root, 0, True)


def test_a_block_is_sealed_only_where_it_fits() -> None:
    with pytest.raises(ValueError, match="do not make a block"):
        flowpath_native.seal_block(bytearray(FILE), b"head", bytes(PAYLOAD - 1))
    with pytest.raises(ValueError, match="do not make a block"):
        flowpath_native.seal_block(bytearray(FILE), bytes(257), bytes(PAYLOAD))
