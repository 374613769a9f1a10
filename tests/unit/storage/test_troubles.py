"""Trouble is logged when it begins and then once in a while."""

import structlog

from common.storage.troubles import QUIET_SECONDS, Troubles


def test_a_kind_is_silent_for_a_while_and_then_counts_what_was_not_told() -> None:
    now = 0.0
    with structlog.testing.capture_logs() as lines:
        troubles = Troubles("file:x", clock=lambda: now)
        for _ in range(3):
            troubles.note("damaged", path="p")
        troubles.note("read_failed", reason="r")
        now = QUIET_SECONDS
        troubles.note("damaged", path="q")
    told = [(line["kind"], line["num_unlogged"], line.get("path")) for line in lines]
    assert told == [("damaged", 0, "p"), ("read_failed", 0, None), ("damaged", 2, "q")]
