"""Which log lines tell the story of one request."""

import json

from common.telemetry.story import LogEntry, RequestScope, parse_lines


def entries(*lines: dict[str, object]) -> list[LogEntry]:
    """Make entries; each line is a second later than the one before."""
    texts = [
        json.dumps({"ts": f"2026-01-01T00:00:{second:02}+00:00", "event": "e", **line})
        for second, line in enumerate(lines)
    ]
    return list(parse_lines(texts))


def told(scope: RequestScope, found: list[LogEntry]) -> list[object]:
    return [entry.fact("n") for entry in scope.select(found)]


def test_a_story_has_the_requests_that_went_on_where_one_was_lost() -> None:
    found = entries(
        {"n": 0, "request_id": "r"},
        {"n": 1, "request_id": "r~1"},
        {"n": 2, "request_id": "r", "resumed_request_id": "r~1"},
        {"n": 3, "request_id": "r", "resumed_request_id": "r~2"},
        {"n": 4, "request_id": "r~2", "transfer_id": "t"},
        {"n": 5, "transfer_id": "t"},
        {"n": 6, "request_id": "q~1"},
    )
    assert told(RequestScope("chatcmpl-r"), found) == [0, 1, 2, 3, 4, 5]


def test_a_story_has_what_went_on_for_one_of_several_prompts() -> None:
    found = entries(
        {"n": 0, "request_id": "r.1", "resumed_request_id": "r.1~1"},
        {"n": 1, "request_id": "r", "prompt_request_id": "r.1"},
        {"n": 2, "request_id": "r.1~1"},
        {"n": 3, "request_id": "r.2"},
    )
    assert told(RequestScope("r"), found) == [0, 1, 2]
