import json
import logging
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from common.errors import ConfigError
from common.telemetry.log_file import LogFile
from common.telemetry.logging import configure_logging
from common.telemetry.story import log_files, parse_line, read_log_folder, request_story


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines_of(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_starts_with_the_same_keys_and_keeps_its_facts(tmp_path: Path) -> None:
    file = configure_logging("decode-0", tmp_path, "info")
    structlog.get_logger().info("decode_started", request_id="r", cause="commit", blocks=3)
    file.close()
    (line,) = lines_of(tmp_path / "decode-0.jsonl")
    assert list(line) == ["ts", "process", "pid", "level", "event", "request_id", "cause", "blocks"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", str(line.pop("ts")))
    assert line == {
        "process": "decode-0",
        "pid": os.getpid(),
        "level": "info",
        "event": "decode_started",
        "request_id": "r",
        "cause": "commit",
        "blocks": 3,
    }


def test_a_logger_made_before_the_configuration_writes_into_the_file(tmp_path: Path) -> None:
    early = structlog.get_logger()
    configure_logging("p", tmp_path, "info").path.touch()
    early.info("late")
    assert [line["event"] for line in lines_of(tmp_path / "p.jsonl")] == ["late"]


def test_lines_go_to_standard_error_too_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("decode-0", tmp_path, "info", to_stderr=True)
    structlog.get_logger().info("something")
    assert capsys.readouterr().err == (tmp_path / "decode-0.jsonl").read_text()


def test_lines_under_the_level_are_not_written(tmp_path: Path) -> None:
    configure_logging("p", tmp_path, "warning")
    log = structlog.get_logger()
    log.info("quiet")
    log.warning("loud")
    assert [line["event"] for line in lines_of(tmp_path / "p.jsonl")] == ["loud"]


def test_an_exception_is_structured_and_shows_no_local_values(tmp_path: Path) -> None:
    configure_logging("p", tmp_path, "info")
    secret = "the-prompt-text"
    try:
        int(secret[:0])
    except ValueError:
        structlog.get_logger().exception("step_failed", request_id="r")
    text = (tmp_path / "p.jsonl").read_text()
    assert secret not in text
    (line,) = lines_of(tmp_path / "p.jsonl")
    assert line["level"] == "error"
    assert '"exc_type": "ValueError"' in text


def test_the_standard_library_s_loggers_end_in_the_same_file(tmp_path: Path) -> None:
    configure_logging("p", tmp_path, "info")
    logging.getLogger("uvicorn").warning("port %d", 3)
    (line,) = lines_of(tmp_path / "p.jsonl")
    assert (line["event"], line["library"], line["message"]) == ("library_log", "uvicorn", "port 3")
    assert line["level"] == "warning"


def test_values_that_json_does_not_know_are_written_as_texts(tmp_path: Path) -> None:
    configure_logging("p", tmp_path, "info")
    structlog.get_logger().info("odd", path=Path("/x"), broken="\ud800")
    (line,) = lines_of(tmp_path / "p.jsonl")
    assert line["path"] == "/x"


def test_a_full_file_is_rotated_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "p.jsonl", max_bytes=10, max_kept=2)
    for number in range(4):
        file.write(f"line-{number}-")
    file.close()
    assert {path.name: path.read_text().strip() for path in tmp_path.iterdir()} == {
        "p.jsonl": "line-3-",
        "p.jsonl.1": "line-2-",
        "p.jsonl.2": "line-1-",
    }


def test_a_file_is_appended_to_and_its_size_counts(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("12345678\n")
    file = LogFile(tmp_path / "p.jsonl", max_bytes=10)
    file.write("abc")
    file.close()
    assert (tmp_path / "p.jsonl.1").read_text() == "12345678\n"


def test_lines_that_cannot_be_written_are_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LogFile(tmp_path / "p.jsonl", max_bytes=1000)

    def no_space(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.write", no_space)
        file.write("lost")
        file.write("lost too")
    assert file.num_dropped == 2
    file.write("kept")
    assert file.num_dropped == 0
    assert file.path.read_text() == '{"event": "log_lines_dropped", "count": 2}\nkept\n'


def test_a_line_that_fits_only_in_part_is_taken_back_and_counted(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "p.jsonl")
    file.write("whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len("whole\nto"), hard))
    try:
        file.write("torn")
        assert file.path.read_text() == "whole\n"
        assert file.num_dropped == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.write("next")
    file.close()
    assert file.path.read_text() == 'whole\n{"event": "log_lines_dropped", "count": 1}\nnext\n'


@pytest.mark.parametrize("folder", ["file", "file/logs"])
def test_an_unusable_folder_is_refused_by_name_and_with_advice(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="FLOWPATH_LOG_DIR") as refused:
        configure_logging("p", tmp_path / folder, "info")
    assert f"log_dir {tmp_path / folder} cannot be used" in str(refused.value)


def test_a_closed_file_stays_closed(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "p.jsonl")
    file.close()
    file.write("late")
    assert file.path.read_text() == ""


STORY: dict[str, list[tuple[str, dict[str, object]]]] = {
    "gateway-0.jsonl": [
        ("01", {"event": "request_received", "request_id": "r"}),
        ("02", {"event": "request_received", "request_id": "other"}),
        ("09", {"event": "request_finished", "request_id": "r"}),
    ],
    "prefill-0.jsonl.1": [("03", {"event": "reserve", "request_id": "r", "transfer_id": "t"})],
    "prefill-0.jsonl": [
        ("05", {"event": "written", "transfer_id": "t"}),
        ("06", {"event": "written", "transfer_id": "t2"}),
    ],
    "decode-0.jsonl": [("04", {"event": "reserved", "transfer_id": "t", "ids": [1, 2]})],
}


def test_a_story_joins_all_processes_by_request_and_transfer_in_time(tmp_path: Path) -> None:
    for name, lines in STORY.items():
        text = "".join(
            json.dumps(
                {"ts": f"2026-01-01T00:00:{second}", "process": name.split(".")[0], **fields}
            )
            + "\n"
            for second, fields in lines
        )
        (tmp_path / name).write_text(text + "{cut by a cra")
    story = request_story(tmp_path, "r")
    assert [(entry.process, entry.event) for entry in story] == [
        ("gateway-0", "request_received"),
        ("prefill-0", "reserve"),
        ("decode-0", "reserved"),
        ("prefill-0", "written"),
        ("gateway-0", "request_finished"),
    ]
    assert story[2].fact("ids") == "[1, 2]"
    assert len(read_log_folder(tmp_path)) == 7
    assert request_story(tmp_path, "nobody") == ()
    assert [file.name for file in log_files(tmp_path)][-2:] == [
        "prefill-0.jsonl.1",
        "prefill-0.jsonl",
    ]


@pytest.mark.parametrize("line", ["", "x", "[]", "{}", '{"ts": 3}', "null"])
def test_what_is_no_log_line_is_passed_over(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize("given", ["req-1", "cmpl-req-1", "chatcmpl-req-1"])
def test_a_story_has_every_prompt_of_its_list_and_is_found_by_the_answer_s_id(
    tmp_path: Path, given: str
) -> None:
    lines = [
        {"event": "request_received", "request_id": "req-1"},
        {"event": "prompt_submitted", "request_id": "req-1", "prompt_request_id": "req-1.0"},
        {"event": "prompt_submitted", "request_id": "req-1", "prompt_request_id": "req-1.1"},
        {"event": "reserve", "request_id": "req-1.1", "transfer_id": "t"},
        {"event": "written", "transfer_id": "t"},
        {"event": "other", "request_id": "req-11"},
        {"event": "other", "request_id": "req-1.2"},
    ]
    text = "".join(
        json.dumps({"ts": f"2026-01-01T00:00:0{second}", **fields}) + "\n"
        for second, fields in enumerate(lines)
    )
    (tmp_path / "a.jsonl").write_text(text)
    events = [entry.event for entry in request_story(tmp_path, given)]
    assert events == [str(fields["event"]) for fields in lines[:5]]
