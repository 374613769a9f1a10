"""Two processes with a GPU each, over NCCL: by NVLink or the bus, and as between hosts.

And two with pools in host memory, which need no GPU: everything but NCCL itself is the same.
"""

import signal
from collections.abc import Iterator
from time import monotonic

import pytest

from tests.gpu.pair import BLOCKS, STALL, Pair, churned
from tests.support.gpus import why_too_few

ON_GPUS = (
    pytest.mark.gpu,
    pytest.mark.skipif(why_too_few(2) is not None, reason=str(why_too_few(2))),
)
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""What makes NCCL use the network between two GPUs of one host."""
OWN = [{"CUDA_VISIBLE_DEVICES": number} for number in "01"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([("host", {}), ("host", {})], id="host memory"),
        pytest.param([("0", {}), ("1", {})], id="both GPUs visible", marks=ON_GPUS),
        pytest.param([("0", OWN[0]), ("0", OWN[1])], id="each its own GPU", marks=ON_GPUS),
        pytest.param([("0", SOCKETS), ("1", SOCKETS)], id="sockets", marks=ON_GPUS),
    ],
)
def joined(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair("nccl", request.param)
    yield pair
    pair.end()


@pytest.fixture
def pair(joined: Pair) -> Pair:
    joined.target("poison")
    return joined


def test_measuring_writes_nothing_and_says_what_the_link_could_be(pair: Pair) -> None:
    rate = pair.source("measure", 0)
    assert isinstance(rate, dict)
    assert rate["gigabytes_per_second"] > 0.1
    assert rate["limit_gigabytes_per_second"] > 5
    assert pair.target.ids("poisoned") == BLOCKS


def test_scattered_blocks_arrive_whole_and_nothing_else_is_touched(pair: Pair) -> None:
    sources, targets = churned(41, 0)
    pair.assert_arrives(sources, targets)
    assert pair.target.ids("poisoned") == sorted(set(BLOCKS) - set(targets))


def test_a_run_arrives_whole_and_nothing_else_is_touched(pair: Pair) -> None:
    pair.assert_arrives(BLOCKS[3:90], BLOCKS[5:92])
    assert pair.target.ids("poisoned") == sorted(set(BLOCKS) - set(range(5, 92)))


def test_two_hundred_random_writes_arrive_whole(pair: Pair) -> None:
    for number in range(200):
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


def test_both_write_to_each_other_at_once(pair: Pair) -> None:
    front, back = BLOCKS[:48], BLOCKS[48:]
    for _ in range(10):
        with pair.granted(pair.target, front) as there, pair.granted(pair.source, back) as here:
            pair.source.begin("write", 0, front, front, there)
            pair.target.begin("write", 0, back, back, here)
            pair.source.answer()
            pair.target.answer()
    assert pair.target.ids("native", BLOCKS) == pair.source.ids("native", BLOCKS)
    pair.source("fill", 1)


def test_after_a_revoke_no_byte_is_written_however_the_writer_goes_on(pair: Pair) -> None:
    for number in range(10):
        with pair.granted(pair.target, BLOCKS) as token:
            pair.write_on(token)
        pair.target("poison")
        assert pair.source("failure")
        assert pair.target.ids("poisoned") == BLOCKS, f"revoke {number}"
    pair.assert_arrives(*churned(40, 2))


def test_a_target_that_stands_still_is_given_up_within_the_stall(pair: Pair) -> None:
    with pair.granted(pair.target, BLOCKS) as token:
        pair.write_on(token)
        pair.target.process.send_signal(signal.SIGSTOP)
        began = monotonic()
        try:
            assert "nccl 127.0.0.1" in str(pair.source("failure"))
            assert monotonic() - began < 2 * STALL + 5
        finally:
            pair.target.process.send_signal(signal.SIGCONT)
    pair.assert_arrives(*churned(40, 5))


def test_the_writer_outlives_a_target_that_is_killed_in_the_middle(pair: Pair) -> None:
    pair.write_on(str(pair.target("grant", "tr-killed", BLOCKS)))
    pair.target.kill()
    began = monotonic()
    assert "nccl 127.0.0.1" in str(pair.source("failure"))
    assert monotonic() - began < 2 * STALL + 5
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
