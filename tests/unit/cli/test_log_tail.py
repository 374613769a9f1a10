import json
from pathlib import Path

from services.cli.logs import LogTail


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
    tail = LogTail(tmp_path, "r")
    append(
        tmp_path / "a.jsonl",
        line(1, "reserve", request_id="r", transfer_id="t")
        + line(2, "written", transfer_id="t")
        + line(3, "written", transfer_id="u")
        + line(4, "other"),
    )
    assert events(tail) == ["reserve", "written"]
