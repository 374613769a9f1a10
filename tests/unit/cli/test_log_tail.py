import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.telemetry.log_file import LogFile
from common.telemetry.story import RequestScope, read_log_folder
from services.cli.logs import LogTail, show_logs


def line(second: int, event: str, **facts: object) -> str:
    return json.dumps({"ts": f"2026-01-01T00:00:{second:02}", "event": event, **facts}) + "\n"


def append(file: Path, text: str) -> None:
    with file.open("a") as opened:
        opened.write(text)


def events(tail: LogTail) -> list[str]:
    return [entry.event for entry in tail.read_new()]


def test_only_what_is_appended_is_read_in_time_and_whole_lines_only(tmp_path: Path) -> None:
    append(tmp_path / "a.jsonl", line(1, "old"))
    tail = LogTail(tmp_path)
    append(tmp_path / "a.jsonl", line(3, "third") + line(4, "cut")[:10])
    append(tmp_path / "b.jsonl", line(2, "second"))
    assert events(tail) == ["second", "third"]
    append(tmp_path / "a.jsonl", line(4, "cut")[10:])
    assert events(tail) == ["cut"]
    assert events(tail) == []


def test_a_rotated_file_is_read_from_its_start(tmp_path: Path) -> None:
    append(tmp_path / "a.jsonl", line(1, "old"))
    tail = LogTail(tmp_path)
    (tmp_path / "a.jsonl").rename(tmp_path / "a.jsonl.1")
    append(tmp_path / "a.jsonl", line(2, "new"))
    assert events(tail) == ["new"]


def test_a_followed_request_brings_its_transfers(tmp_path: Path) -> None:
    tail = LogTail(tmp_path, RequestScope("r"))
    append(
        tmp_path / "a.jsonl",
        line(1, "reserve", request_id="r", transfer_id="t")
        + line(2, "written", transfer_id="t")
        + line(3, "written", transfer_id="u")
        + line(4, "other"),
    )
    assert events(tail) == ["reserve", "written"]


def test_a_followed_request_brings_its_prompts_and_what_was_named_before(tmp_path: Path) -> None:
    scope = RequestScope("cmpl-req-1")
    first = line(1, "prompt_submitted", request_id="req-1", prompt_request_id="req-1.0")
    append(tmp_path / "a.jsonl", first)
    tail = LogTail(tmp_path, scope)
    assert len(scope.select(read_log_folder(tmp_path))) == 1
    append(tmp_path / "b.jsonl", line(2, "request_placed", request_id="req-1.0"))
    append(tmp_path / "b.jsonl", line(3, "request_placed", request_id="req-11"))
    assert events(tail) == ["request_placed"]


def test_lines_before_a_rotation_are_read_after_it(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "a.jsonl", max_bytes=120, max_kept=2)
    file.write(line(1, "old").strip())
    tail = LogTail(tmp_path)
    seen: list[str] = []
    for second in range(2, 50):
        file.write(line(second, f"e{second}").strip())
        if second % 3 == 0:  # up to two rotations between two looks
            seen += events(tail)
    file.close()
    assert seen == [f"e{second}" for second in range(2, 49)]


def test_a_file_that_is_rotated_away_in_the_moment_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone")
    append(tmp_path / "b.jsonl", line(1, "kept"))
    tail = LogTail(tmp_path)
    append(tmp_path / "b.jsonl", line(2, "new"))
    assert events(tail) == ["new"]
    assert [entry.event for entry in read_log_folder(tmp_path)] == ["kept", "new"]


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("request_id", ["", " "])
def test_an_empty_request_id_is_refused(tmp_path: Path, request_id: str, follow: bool) -> None:
    append(tmp_path / "a.jsonl", line(1, "old"))
    with pytest.raises(ConfigError, match="--request is empty"):
        show_logs(tmp_path, request_id, follow=follow)
