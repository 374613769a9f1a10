"""The arbiter of a shared link against what it promises, for any offers at any times."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.traffic.arbiter import KV_FLOOR, LinkArbiter, Quantum, Ticket, TrafficClass

RATE = 1000.0
QUANTUM = 50
BURST = 50
SLACK = 1e-6

bounded = settings(max_examples=100, deadline=None, derandomize=True)

MODEL, KV = TrafficClass.MODEL, TrafficClass.KV


@dataclass(frozen=True, slots=True)
class Offer:
    at: float
    traffic_class: TrafficClass
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    offers: list[Offer]
    tickets: list[Ticket]
    quanta: list[Quantum]
    begun_at: list[float]
    """When the arbiter was called that let each quantum begin."""
    num_offered: list[int]
    """How many tickets it knew then."""


offers = st.lists(
    st.builds(
        Offer,
        at=st.integers(0, 3000).map(lambda at: at / 1000),
        traffic_class=st.sampled_from(TrafficClass),
        num_bytes=st.integers(1, 400),
    ),
    max_size=25,
).map(lambda given: sorted(given, key=lambda offer: offer.at))
lateness = st.lists(st.integers(0, 80).map(lambda late: late / 1000), min_size=1, max_size=10)


def note(made: Run, begun: Sequence[Quantum], now: float) -> None:
    made.quanta.extend(begun)
    made.begun_at.extend([now] * len(begun))
    made.num_offered.extend([len(made.tickets)] * len(begun))


def run(offers: list[Offer], late: list[float]) -> Run:
    """Offer and advance as a caller would who comes late by ``late``, in turn."""
    arbiter = LinkArbiter(RATE, QUANTUM, BURST)
    made, tickets = Run(list(offers), [], [], [], []), iter(offers)
    coming, now, turn = next(tickets, None), 0.0, 0
    while coming is not None or arbiter.num_waiting:
        due = arbiter.next_at + late[turn % len(late)] if arbiter.next_at < inf else inf
        turn += 1
        now = max(now, min(due, coming.at if coming else inf))
        note(made, arbiter.advance(now), now)
        while coming is not None and coming.at <= now:
            made.tickets.append(arbiter.offer(coming.traffic_class, coming.num_bytes, now))
            coming = next(tickets, None)
        note(made, arbiter.advance(now), now)
    return made


@bounded
@given(offers, lateness)
def test_everything_passes_exactly_once_and_in_order_of_its_class(
    offers: list[Offer], late: list[float]
) -> None:
    made = run(offers, late)
    for offer, ticket in zip(made.offers, made.tickets, strict=True):
        assert sum(q.num_bytes for q in made.quanta if q.ticket is ticket) == offer.num_bytes
        assert ticket.waiting_bytes == 0
    for name in TrafficClass:
        order = [q.ticket for q in made.quanta if q.ticket.traffic_class is name]
        first_seen = list(dict.fromkeys(order))
        assert first_seen == [t for t in made.tickets if t.traffic_class is name]


@bounded
@given(offers, lateness)
def test_no_span_sees_more_bytes_pass_than_rate_times_time_and_a_burst(
    offers: list[Offer], late: list[float]
) -> None:
    made = run(offers, late)
    quanta = made.quanta
    for first, begin in enumerate(quanta):
        total = 0
        for end in quanta[first:]:
            assert end.begins_at >= begin.begins_at
            total += end.num_bytes
            # Bytes pass at the end of their quantum, on the link's own time line.
            assert total <= RATE * (end.ends_at - begin.begins_at) + SLACK
    for quantum, begun_at in zip(quanta, made.begun_at, strict=True):
        assert quantum.begins_at <= begun_at
        assert quantum.begins_at >= quantum.ticket.offered_at - BURST / RATE - SLACK


@bounded
@given(offers, lateness)
def test_a_model_quantum_waits_for_at_most_one_kv_quantum(
    offers: list[Offer], late: list[float]
) -> None:
    made = run(offers, late)
    number_of = {id(ticket): number for number, ticket in enumerate(made.tickets)}
    passed_by = 0  # KV quanta let begin in a row while one of MODEL waited
    for place, (quantum, num_offered) in enumerate(zip(made.quanta, made.num_offered, strict=True)):
        is_model_waiting = any(
            q.ticket.traffic_class is MODEL and number_of[id(q.ticket)] < num_offered
            for q in made.quanta[place + 1 :]
        )
        if quantum.ticket.traffic_class is KV and is_model_waiting:
            passed_by += 1
        else:
            passed_by = 0
        assert passed_by <= 1


@bounded
@given(offers, lateness)
def test_a_link_is_never_idle_while_something_waits(offers: list[Offer], late: list[float]) -> None:
    free_at = -BURST / RATE
    for quantum in run(offers, late).quanta:
        assert quantum.begins_at <= max(free_at, quantum.ticket.offered_at) + SLACK
        free_at = quantum.ends_at


@bounded
@given(st.integers(1, 4 * QUANTUM), st.integers(1, 8))
def test_kv_keeps_its_floor_while_model_traffic_never_ends(
    model_bytes: int, kv_quanta: int
) -> None:
    arbiter = LinkArbiter(RATE, QUANTUM, burst_bytes=0)
    kv = arbiter.offer(KV, kv_quanta * QUANTUM, 0.0)
    passed = dict.fromkeys(TrafficClass, 0)
    now = 0.0
    while kv.passed_at is None:
        if arbiter.num_waiting < 2:
            arbiter.offer(MODEL, model_bytes, now)
        for quantum in arbiter.advance(now):
            passed[quantum.ticket.traffic_class] += quantum.num_bytes
            total = sum(passed.values())
            # One quantum of KV is owed at most, and one of MODEL was let begin before it.
            assert passed[KV] >= KV_FLOOR * (total - model_bytes - QUANTUM) - QUANTUM
            assert passed[MODEL] >= (1 - KV_FLOOR) * (total - QUANTUM) - QUANTUM
        now = arbiter.next_at
    assert passed[KV] == kv_quanta * QUANTUM


def test_model_traffic_overtakes_a_long_kv_transfer_after_one_quantum() -> None:
    arbiter = LinkArbiter(RATE, QUANTUM, burst_bytes=0)
    arbiter.offer(KV, 500, 0.0)
    arbiter.advance(0.0)
    model = arbiter.offer(MODEL, 100, 0.01)
    assert arbiter.next_at == pytest.approx(0.05)
    now = 0.0
    while model.passed_at is None:
        now = arbiter.next_at
        arbiter.advance(now)
    assert model.passed_at == pytest.approx(0.15)


def test_kv_takes_all_that_model_traffic_leaves() -> None:
    arbiter = LinkArbiter(RATE, QUANTUM, burst_bytes=0)
    kv = arbiter.offer(KV, 1000, 0.0)
    while kv.passed_at is None:
        arbiter.advance(max(0.0, arbiter.next_at))
    assert isclose(kv.passed_at, 1.0)


def test_an_idle_link_saves_up_one_burst_and_no_more() -> None:
    arbiter = LinkArbiter(RATE, QUANTUM, BURST)
    ticket = arbiter.offer(KV, 3 * QUANTUM, 100.0)
    assert [q.ends_at for q in arbiter.advance(100.0)] == pytest.approx([100.0, 100.05])
    assert ticket.passed_at is None
    arbiter.advance(arbiter.next_at)
    assert ticket.passed_at == pytest.approx(100.1)


@pytest.mark.parametrize(
    ("rate", "quantum", "burst"), [(0, 1, 0), (-1, 1, 0), (1, 0, 0), (1, 1, -1)]
)
def test_a_link_that_moves_nothing_is_refused(rate: float, quantum: int, burst: int) -> None:
    with pytest.raises(ValueError, match="moves nothing"):
        LinkArbiter(rate, quantum, burst)


def test_a_transfer_of_no_bytes_has_passed_at_once() -> None:
    arbiter = LinkArbiter(RATE, QUANTUM, BURST)
    assert arbiter.offer(MODEL, 0, 7.0).passed_at == 7.0
    assert arbiter.next_at == inf
