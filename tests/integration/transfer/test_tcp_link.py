"""Two pools of one process, joined by real streams."""

import threading
from collections.abc import Iterator
from random import Random

import flowpath_native
import numpy as np
import pytest

from common.errors import ConfigError, TransferError
from common.ids import TransferId
from common.kv.pool import KVPool
from common.transfer.tcp import MIN_SHARE_BYTES, TcpBackend, TcpLink
from common.transfer.tcp_export import TcpExport
from common.transfer.tcp_wire import new_token
from common.transfer.verify import verify_blocks
from tests.support.data_stream import wait_until

BLOCK = 20 * 4096
NUM_BLOCKS = 120
STALL = 2.0
A = TransferId("tr-a")


@pytest.fixture
def source() -> Iterator[KVPool]:
    pool = KVPool(NUM_BLOCKS, BLOCK)
    numbers = np.frombuffer(pool.buffer, dtype=np.uint8)
    numbers[:] = np.random.default_rng(1).integers(0, 256, numbers.size, dtype=np.uint8)
    del numbers
    yield pool
    pool.close()


@pytest.fixture
def target() -> Iterator[KVPool]:
    pool = KVPool(NUM_BLOCKS, BLOCK)
    pool.buffer[:] = b"\xee" * pool.num_bytes
    yield pool
    pool.close()


@pytest.fixture
def export(target: KVPool) -> Iterator[TcpExport]:
    export = TcpExport(target, STALL)
    yield export
    export.close()


@pytest.fixture
def link(source: KVPool, export: TcpExport) -> Iterator[TcpLink]:
    link = TcpBackend(source, STALL, num_streams=3).open_peer(export.handle())
    yield link
    link.close()


def block(pool: KVPool, number: int) -> bytes:
    return pool.buffer[number * BLOCK : (number + 1) * BLOCK].tobytes()


@pytest.mark.parametrize("count", [1, 7, 60, 119])
@pytest.mark.parametrize("is_scattered", [False, True])
def test_every_block_arrives_and_nothing_else_changes(
    link: TcpLink, export: TcpExport, source: KVPool, target: KVPool, count: int, is_scattered: bool
) -> None:
    random = Random(count)
    sources = random.sample(range(NUM_BLOCKS), count) if is_scattered else list(range(count))
    targets = random.sample(range(NUM_BLOCKS), count) if is_scattered else list(range(1, count + 1))
    token = export.grant(A, targets)
    report = link.write(sources, targets, token)
    assert (report.num_blocks, report.num_bytes) == (count, count * BLOCK)
    for src, dst in zip(sources, targets, strict=True):
        assert block(target, dst) == block(source, src)
    for untouched in set(range(NUM_BLOCKS)) - set(targets):
        assert block(target, untouched) == b"\xee" * BLOCK
    assert report.checksums.tolist() == [
        flowpath_native.checksum(block(source, number)) for number in sources
    ]
    assert verify_blocks(target, targets, report.checksums) is None


def test_one_run_is_one_call_on_each_stream(link: TcpLink, export: TcpExport) -> None:
    token = export.grant(A, range(NUM_BLOCKS))
    small = MIN_SHARE_BYTES // BLOCK
    assert link.write(range(small), range(small), token).num_calls == 1
    assert link.write(range(110), range(10, 120), token).num_calls == 3


def test_more_fragments_than_one_frame_holds(export: TcpExport) -> None:
    pages = KVPool(1500, 4096)
    pages.buffer[:] = np.random.default_rng(2).bytes(pages.num_bytes)
    inside = KVPool(1500, 4096)
    exported = TcpExport(inside, STALL)
    link = TcpBackend(pages, STALL, num_streams=2).open_peer(exported.handle())
    order = Random(3).sample(range(1500), 1500)
    report = link.write(range(1500), order, exported.grant(A, order))
    assert report.num_calls > 1400
    assert verify_blocks(inside, order, report.checksums) is None
    link.close()
    exported.close()
    pages.close()
    inside.close()


def test_streams_are_opened_at_pairing_and_kept(link: TcpLink, export: TcpExport) -> None:
    assert export.num_streams == 3
    streams = list(link._streams)
    token = export.grant(A, range(NUM_BLOCKS))
    for _ in range(3):
        link.write(range(100), range(100), token)
    assert link._streams == streams
    link.close()
    wait_until(lambda: export.num_streams == 0)


def test_writing_nothing_is_no_call(link: TcpLink, export: TcpExport) -> None:
    report = link.write([], [], export.grant(A, [1]))
    assert (report.num_blocks, report.num_calls, len(report.checksums)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([0, 1], [3, NUM_BLOCKS]),
        ([0, NUM_BLOCKS], [3, 4]),
        ([0, -1], [3, 4]),
        ([0, 1], [3, 3]),
        ([0], [3, 4]),
        ([0], [2**40]),
    ],
)
def test_a_write_that_cannot_be_right_is_refused_before_a_byte_is_sent(
    link: TcpLink, export: TcpExport, target: KVPool, sources: list[int], targets: list[int]
) -> None:
    token = export.grant(A, range(NUM_BLOCKS))
    with pytest.raises(TransferError, match="cannot write"):
        link.write(sources, targets, token)
    assert target.buffer.tobytes() == b"\xee" * target.num_bytes
    assert export.num_streams == 3


def test_a_write_without_a_token_is_refused_here(link: TcpLink) -> None:
    with pytest.raises(TransferError, match="without a token"):
        link.write([0], [0])


@pytest.mark.parametrize("count", [1, 100])
def test_a_write_that_the_peer_refuses_fails_and_the_next_one_works(
    link: TcpLink, export: TcpExport, source: KVPool, target: KVPool, count: int
) -> None:
    blocks = range(count)
    token = export.grant(A, blocks)
    for refused, where in ((new_token(), blocks), (token, range(1, count + 1))):
        with pytest.raises(TransferError, match=f"writing {count * BLOCK} bytes failed"):
            link.write(blocks, where, refused)
    assert block(target, count) == b"\xee" * BLOCK
    report = link.write(blocks, blocks, token)
    assert verify_blocks(target, blocks, report.checksums) is None


def test_nothing_is_written_any_more_once_the_grant_is_revoked(
    link: TcpLink, export: TcpExport, target: KVPool
) -> None:
    token = export.grant(A, range(NUM_BLOCKS))
    link.write([5], [6], token)
    before = target.buffer.tobytes()
    export.revoke(A)
    with pytest.raises(TransferError):
        link.write(range(100), range(100), token)
    assert target.buffer.tobytes() == before
    export.grant(A, range(NUM_BLOCKS), token)
    link.write(range(100), range(100), token)
    assert target.buffer.tobytes() != before


def test_revoking_in_the_middle_of_writes_leaves_the_blocks_still(
    link: TcpLink, export: TcpExport, source: KVPool, target: KVPool
) -> None:
    failures: list[TransferError] = []
    first_done = threading.Event()
    token = export.grant(A, range(NUM_BLOCKS))

    def write_on() -> None:
        try:
            while True:
                link.write(range(NUM_BLOCKS), range(NUM_BLOCKS), token)
                first_done.set()
        except TransferError as error:
            failures.append(error)

    thread = threading.Thread(target=write_on)
    thread.start()
    assert first_done.wait(20)
    export.revoke(A)
    target.buffer[:] = b"\xaa" * target.num_bytes
    thread.join()
    assert len(failures) == 1
    assert target.buffer.tobytes() == b"\xaa" * target.num_bytes


def test_the_link_is_measured_beside_a_bare_stream_and_writes_nothing(
    link: TcpLink, target: KVPool
) -> None:
    rate = link.measure()
    assert rate.gigabytes_per_second > 0
    assert rate.limit_gigabytes_per_second > 0
    assert target.buffer.tobytes() == b"\xee" * target.num_bytes


def test_a_closed_link_refuses_to_write(link: TcpLink, export: TcpExport) -> None:
    link.close()
    link.close()
    for use in (lambda: link.write([0], [0], new_token()), link.measure):
        with pytest.raises(TransferError, match="closed"):
            use()


def test_a_peer_with_other_blocks_or_another_transport_is_refused(
    source: KVPool, export: TcpExport, target: KVPool
) -> None:
    other = KVPool(2, 4096)
    with pytest.raises(TransferError, match="the peer's blocks have 81920 bytes, ours 4096"):
        TcpBackend(other, STALL).open_peer(export.handle())
    with pytest.raises(TransferError, match="not offered over tcp"):
        TcpBackend(source, STALL).open_peer(target.handle())
    other.close()


def test_a_pool_whose_listener_is_gone_says_what_to_check(source: KVPool, target: KVPool) -> None:
    export = TcpExport(target, STALL)
    handle = export.handle()
    export.close()
    with pytest.raises(TransferError, match=r"cannot open a data stream.*check that the address"):
        TcpBackend(source, STALL).open_peer(handle)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("0.0.0.0", "say which address"),
        ("203.0.113.7", "cannot listen"),
    ],
)
def test_an_address_that_cannot_serve_peers_is_refused(
    target: KVPool, host: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TcpExport(target, STALL, host=host)


def test_the_listener_is_on_loopback_unless_told_otherwise(export: TcpExport) -> None:
    assert export.handle().host == "127.0.0.1"
    assert "secret" not in repr(export.handle())
