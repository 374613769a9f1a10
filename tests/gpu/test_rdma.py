"""Two processes with a GPU each, over NIXL: however UCX goes between them, and over sockets alone.

And two with pools in host memory, where NIXL is there without a GPU.
"""

from collections.abc import Iterator

import pytest

from common.transfer.nixl_packages import HOW_TO_INSTALL, is_nixl_installed
from tests.gpu.pair import BLOCKS, Pair, churned
from tests.support.gpus import why_too_few

pytestmark = pytest.mark.skipif(not is_nixl_installed(), reason=f"no NIXL here; {HOW_TO_INSTALL}")

SOCKETS = {"UCX_TLS": "tcp,cuda_copy"}
"""What makes UCX use the network between two GPUs of one host."""


def on_gpus(count: int) -> tuple[pytest.MarkDecorator, ...]:
    reason = why_too_few(count)
    return (pytest.mark.gpu, pytest.mark.skipif(reason is not None, reason=str(reason)))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([("host", {}), ("host", {})], id="host memory"),
        pytest.param([("0", {}), ("0", {})], id="one GPU", marks=on_gpus(1)),
        pytest.param([("0", {}), ("1", {})], id="two GPUs", marks=on_gpus(2)),
        pytest.param([("0", SOCKETS), ("0", SOCKETS)], id="sockets", marks=on_gpus(1)),
    ],
)
def joined(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair("rdma", request.param)
    yield pair
    pair.end()


@pytest.fixture
def pair(joined: Pair) -> Pair:
    joined.target("poison")
    return joined


def test_measuring_writes_nothing(pair: Pair) -> None:
    rate = pair.source("measure", 0)
    assert isinstance(rate, dict)
    assert rate["gigabytes_per_second"] > 0.1
    assert pair.target.ids("poisoned") == BLOCKS


def test_scattered_blocks_arrive_whole_and_nothing_else_is_touched(pair: Pair) -> None:
    sources, targets = churned(41, 0)
    pair.assert_arrives(sources, targets)
    assert pair.target.ids("poisoned") == sorted(set(BLOCKS) - set(targets))


def test_a_run_arrives_whole_and_nothing_else_is_touched(pair: Pair) -> None:
    pair.assert_arrives(BLOCKS[3:90], BLOCKS[5:92])
    assert pair.target.ids("poisoned") == sorted(set(BLOCKS) - set(range(5, 92)))


def test_a_hundred_random_writes_arrive_whole(pair: Pair) -> None:
    for number in range(100):
        sources, targets = churned(1 + number % 40, number)
        with pair.granted(pair.target, targets) as token:
            sums = pair.source.ids("write", 0, sources, targets, token)
        if number % 20 == 0:
            assert pair.target.ids("native", targets) == sums
            assert pair.source.ids("native", sources) == sums


def test_what_is_not_granted_is_refused(pair: Pair) -> None:
    with pair.granted(pair.target, [3, 4]) as token:
        assert "does not grant it" in pair.source.fails("write", 0, [0], [5], token)
    assert "does not grant it" in pair.source.fails("write", 0, [0], [3], token)
    assert pair.target.ids("poisoned") == BLOCKS
    pair.assert_arrives([0], [3])


def test_after_a_revoke_no_byte_is_read_however_the_writer_goes_on(pair: Pair) -> None:
    for number in range(5):
        with pair.granted(pair.target, BLOCKS) as token:
            pair.write_on(token)
        pair.target("poison")
        assert pair.source("failure")
        assert pair.target.ids("poisoned") == BLOCKS, f"revoke {number}"
    pair.assert_arrives(*churned(40, 2))


def test_the_writer_outlives_a_target_that_is_killed_in_the_middle(pair: Pair) -> None:
    pair.write_on(str(pair.target("grant", "tr-killed", BLOCKS)))
    pair.target.kill()
    assert "rdma 127.0.0.1" in str(pair.source("failure"))
    pair.restart_target()
    pair.assert_arrives(*churned(40, 3))


def test_the_target_outlives_a_writer_that_is_killed_in_the_middle(pair: Pair) -> None:
    with pair.granted(pair.target, BLOCKS) as token:
        pair.write_on(token)
        pair.source.kill()
    pair.target("poison")
    pair.restart_source()
    assert pair.target.ids("poisoned") == BLOCKS
    pair.assert_arrives(*churned(40, 4))
