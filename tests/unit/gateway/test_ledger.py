"""The ledger of one request's phases."""

from common.messages.fields import PhaseName, PhaseRecord
from services.gateway.ledger import MAX_PHASES, PhaseLedger, phases_json


def told(ledger: PhaseLedger) -> list[tuple[str, str, float]]:
    return [(record.name.value, record.worker, record.seconds) for record in ledger.records]


def test_placing_is_counted_once_until_the_first_answer() -> None:
    ledger = PhaseLedger("g", now=10.0)
    ledger.taken_in(10.5)
    ledger.taken_in(99.0)  # placed, after it was queued; or placed again
    assert told(ledger) == [("place", "g", 0.5)]


def test_a_resume_lasts_from_the_first_loss_to_the_next_tokens() -> None:
    ledger = PhaseLedger("g", now=0.0)
    ledger.went_on(1.0)
    ledger.lost(2.0)
    ledger.lost(3.0)
    ledger.went_on(6.0)
    ledger.went_on(7.0)
    assert told(ledger) == [("resume", "g", 4.0)]


def test_no_more_than_a_bounded_number_is_kept() -> None:
    ledger = PhaseLedger("g", now=0.0)
    record = PhaseRecord(name=PhaseName.DECODE, worker="d", seconds=1.0)
    for _ in range(MAX_PHASES):
        ledger.add([record, record])
    assert len(ledger.records) == MAX_PHASES


def test_a_rate_is_told_where_bytes_were_moved_in_some_time() -> None:
    def rate(num_bytes: int, seconds: float) -> object:
        record = PhaseRecord(
            name=PhaseName.TRANSFER, worker="p", seconds=seconds, num_bytes=num_bytes
        )
        return phases_json([record])[0]["gigabytes_per_second"]

    assert rate(3_000_000_000, 2.0) == 1.5
    assert rate(0, 2.0) is None
    assert rate(5, 0.0) is None
