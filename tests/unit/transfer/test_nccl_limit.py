"""How many communicators are held, and which one goes."""

import threading

import pytest

from common.errors import TransferError
from common.transfer.nccl_limit import CommunicatorLimit


class FakeHolder:
    def __init__(self, limit: CommunicatorLimit, *, is_busy: bool = False) -> None:
        self._limit = limit
        self.is_busy = is_busy
        self.is_released = False
        self.asked = threading.Event()

    def try_release(self) -> bool:
        self.asked.set()
        if self.is_busy or self.is_released:
            return False
        self.is_released = True
        self._limit.remove(self)
        return True


def test_the_one_unused_for_longest_goes_first() -> None:
    limit = CommunicatorLimit(2)
    first, second, third, fourth = (FakeHolder(limit) for _ in range(4))
    limit.admit(first, 0)
    limit.admit(second, 0)
    limit.used(first)
    limit.admit(third, 0)
    assert [h.is_released for h in (first, second, third)] == [False, True, False]
    limit.admit(fourth, 0)
    assert first.is_released
    assert limit.num_held == 2


def test_one_in_use_is_passed_over() -> None:
    limit = CommunicatorLimit(2)
    busy, idle = FakeHolder(limit, is_busy=True), FakeHolder(limit)
    limit.admit(busy, 0)
    limit.admit(idle, 0)
    limit.admit(FakeHolder(limit), 0)
    assert (busy.is_released, idle.is_released) == (False, True)


def test_none_is_admitted_while_all_are_in_use() -> None:
    limit = CommunicatorLimit(1)
    limit.admit(FakeHolder(limit, is_busy=True), 0)
    with pytest.raises(TransferError, match=r"all 1 communicators are in use, for 0\.01 s"):
        limit.admit(FakeHolder(limit), 0.01)
    assert limit.num_held == 1


def test_whoever_waits_goes_on_when_one_is_used_no_more() -> None:
    limit = CommunicatorLimit(1)
    busy, waiting = FakeHolder(limit, is_busy=True), FakeHolder(limit)
    limit.admit(busy, 0)
    thread = threading.Thread(target=limit.admit, args=(waiting, 20.0))
    thread.start()
    assert busy.asked.wait(20)
    busy.is_busy = False
    limit.used(busy)
    thread.join(20)
    assert busy.is_released
    assert limit.num_held == 1


def test_removing_one_that_is_not_held_changes_nothing() -> None:
    limit = CommunicatorLimit(1)
    holder = FakeHolder(limit)
    limit.remove(holder)
    limit.used(holder)
    assert limit.num_held == 0
