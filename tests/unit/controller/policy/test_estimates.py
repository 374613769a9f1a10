from dataclasses import replace

import pytest

from services.controller.policy.estimates import (
    DEFAULT_LINK_RATE,
    DEFAULT_PREFILL_RATE,
    Objectives,
    decode_score,
    decode_weight,
    link_rate,
    prefill_score,
    shared_decode_score,
)
from services.controller.policy.views import WorkerView
from tests.unit.controller.policy.builders import C, D, P, worker

OBJECTIVES = Objectives(ttft_seconds=2.0, tpot_seconds=0.05)


def test_a_prefill_score_is_made_of_waiting_tokens_pool_and_the_next_step() -> None:
    assert prefill_score(worker("p", P), 0, OBJECTIVES) == 0
    # 256 tokens at 1 000 a second of 2 s; a tenth of the pool; half of a step of 512 tokens
    view = worker("p", P, 256, used=100)
    assert prefill_score(view, 0, OBJECTIVES) == pytest.approx(0.6 * 0.128 + 0.03 + 0.05)
    assert prefill_score(view, 1744, OBJECTIVES) == pytest.approx(0.6 + 0.03 + 0.1)


def test_a_prefill_score_without_a_rate_takes_the_default() -> None:
    view = worker("p", P, 512, prefill_rate=0.0)
    late = 512 / (DEFAULT_PREFILL_RATE * 2.0)
    assert prefill_score(view, 0, OBJECTIVES) == pytest.approx(0.6 * late + 0.1)


def test_a_decode_score_is_made_of_step_time_pool_and_batch() -> None:
    view = worker("d", D, used=250, step=0.025, decoding=16)
    assert decode_score(view, OBJECTIVES) == pytest.approx(0.25 + 0.1 + 0.025)


def test_a_slow_decode_side_weighs_a_little_more() -> None:
    fast, slow = worker("d0", D, decode_rate=1000.0), worker("d1", D, decode_rate=100.0)
    assert decode_weight(fast, 0.3, OBJECTIVES) == pytest.approx(1.3 + 0.1 * 0.02)
    assert decode_weight(slow, 0.3, OBJECTIVES) == pytest.approx(1.3 + 0.1 * 0.2)
    assert decode_weight(worker("d2", D, decode_rate=1.0), 0.3, OBJECTIVES) == pytest.approx(1.4)
    assert decode_weight(worker("d3", D, decode_rate=0.0), 0.3, OBJECTIVES) == pytest.approx(1.3)


def test_a_sequence_alone_is_no_load_that_others_could_share_however_slow_it_is() -> None:
    alone = worker("d", D, step=0.2, decoding=1, used=100)
    assert decode_score(alone, OBJECTIVES) > 1
    assert shared_decode_score(alone, OBJECTIVES) < 0.1
    two = replace(alone, num_decoding=2)
    assert shared_decode_score(two, OBJECTIVES) == decode_score(two, OBJECTIVES)


def test_a_link_has_its_measured_rate_or_the_default() -> None:
    source = worker("p", P, links={"d": 5e9})
    assert link_rate(source, worker("d", D)) == 5e9
    assert link_rate(source, worker("d1", D)) == DEFAULT_LINK_RATE


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (worker("p", P, step=0.0), True),
        (worker("p", P, 1, prefill_rate=0.0), False),
        (worker("p", P, prefill_rate=0.0), True),
        (worker("d", D, prefill_rate=0.0, decoding=1), True),
        (worker("d", D, step=0.0, decoding=1), False),
        (worker("d", D, step=0.0), True),
        (worker("c", C, 1, decoding=1), True),
        (worker("c", C, step=0.0, decoding=1), False),
        (worker("c", C, 1, prefill_rate=0.0), False),
        (worker("c", C, prefill_rate=0.0, step=0.0), True),
        (worker("p", P, has_heartbeat=False), False),
    ],
)
def test_a_worker_counts_once_it_told_its_load_and_has_measured_what_it_does(
    view: WorkerView, expected: bool
) -> None:
    assert view.is_measured is expected
