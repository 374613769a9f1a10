from threading import Event, Thread
from time import monotonic

import pytest

from common.traffic.arbiter import TrafficClass
from common.traffic.shared_link import QUANTUM_SECONDS, LinkStats, SharedLink

MODEL, KV = TrafficClass.MODEL, TrafficClass.KV
RATE = 10_000_000


def test_a_link_without_limit_lets_all_pass_and_counts() -> None:
    link = SharedLink(0, clock=lambda: 7.0)
    link.transfer(10**12, KV)
    with link.passing(5, MODEL):
        pass
    assert link.stats() == LinkStats(model_bytes=5, kv_bytes=10**12)


def test_a_transfer_takes_as_long_as_its_bytes_take_but_for_one_burst() -> None:
    link = SharedLink(RATE)
    num_bytes = RATE // 20
    waited = link.transfer(num_bytes, KV)
    assert waited >= 0.05 - QUANTUM_SECONDS - 1e-9
    stats = link.stats()
    assert stats.kv_bytes == num_bytes
    assert 0 < stats.kv_wait_seconds <= waited


def test_model_traffic_overtakes_kv_traffic_that_has_begun() -> None:
    link = SharedLink(RATE)
    ended: list[TrafficClass] = []
    under_way = Event()

    def move_kv() -> None:
        with link.passing(RATE * 3600, KV):
            under_way.set()
        ended.append(KV)

    kv = Thread(target=move_kv)
    kv.start()
    assert under_way.wait(10)
    link.transfer(RATE // 20, MODEL)
    ended.append(MODEL)
    assert link.stats().kv_bytes == 0
    link.lift()
    kv.join(10)
    assert ended == [MODEL, KV]


def test_two_threads_share_the_rate() -> None:
    link = SharedLink(RATE)
    threads = [Thread(target=link.transfer, args=(RATE // 40, KV)) for _ in range(2)]
    began = monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert monotonic() - began >= 0.05 - QUANTUM_SECONDS - 1e-9
    assert link.stats().kv_bytes == RATE // 20


def test_a_lifted_limit_lets_pass_what_waits() -> None:
    link = SharedLink(1000)
    under_way = Event()

    def move() -> None:
        with link.passing(10**9, KV):
            under_way.set()

    thread = Thread(target=move)
    thread.start()
    assert under_way.wait(10)
    assert not link.wait_idle(0)
    link.lift()
    assert link.wait_idle(10)
    thread.join(10)
    assert not thread.is_alive()
    held_up = link.stats().kv_wait_seconds
    link.transfer(10**9, KV)
    assert link.stats().kv_wait_seconds == held_up


def test_what_moves_beside_the_link_takes_none_of_its_time() -> None:
    now = [100.0]
    link = SharedLink(RATE, clock=lambda: now[0])
    with link.passing(RATE, KV):
        now[0] += 1.0
    assert link.stats().kv_wait_seconds == 0.0
    assert link.stats().kv_bytes == RATE


def test_a_link_is_in_use_while_any_transfer_is_under_way() -> None:
    now = [100.0]
    link = SharedLink(0, clock=lambda: now[0])
    with link.passing(5, KV):
        now[0] += 1.0
        with link.passing(5, MODEL):
            now[0] += 1.0
            assert link.stats().busy_seconds == 2.0
        now[0] += 1.0
    now[0] += 9.0
    assert link.stats().busy_seconds == 3.0


def test_a_failed_move_is_not_held_up() -> None:
    link = SharedLink(RATE, clock=lambda: 0.0)
    with pytest.raises(ValueError, match="lost"), link.passing(RATE * 3600, KV):
        raise ValueError("lost")
    assert link.stats() == LinkStats()
