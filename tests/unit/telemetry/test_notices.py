"""What a program tells the terminal that it was started in."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from common.telemetry.logging import configure_logging

REFUSED = {"endpoint": "tcp://a:1", "reason": "no", "our_key": "x", "its_key": "y"}


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_a_program_says_once_what_keeps_it_from_its_cluster_and_when_it_is_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = configure_logging("decode-0", tmp_path, "info")
    log = structlog.get_logger()
    for _ in range(2):
        log.warning("waiting_for_controller", endpoint="tcp://a:1")
        log.error("handshake_refused", **REFUSED)
    log.info("registered", role="decode", num_peers=0)
    log.info("request_received", request_id="r")
    log.warning("waiting_for_controller", endpoint="tcp://a:1")
    file.close()
    assert capsys.readouterr().err.splitlines() == [
        "notice: waiting for the controller at tcp://a:1",
        "notice: tcp://a:1 refuses to connect: no (our_key x, its_key y)",
        "notice: registered with the controller",
        "notice: waiting for the controller at tcp://a:1",
    ]
    assert len((tmp_path / "decode-0.jsonl").read_text().splitlines()) == 7, "the log has them all"


def test_the_line_that_joins_a_controller_can_be_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("controller", tmp_path, "info")
    structlog.get_logger().info("joinable", controller="tcp://a:1?key=00")
    told = "notice: join       --controller 'tcp://a:1?key=00' on other hosts\n"
    assert capsys.readouterr().err == told


def test_an_event_that_lacks_a_notice_s_facts_is_only_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("controller", tmp_path, "info")
    structlog.get_logger().error("hello_refused", sender="d0", reason="no")
    assert capsys.readouterr().err == ""


def test_a_program_whose_whole_log_goes_to_the_terminal_tells_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("decode-0", tmp_path, "info", to_stderr=True)
    structlog.get_logger().info("registered", role="decode", num_peers=0)
    assert "notice" not in capsys.readouterr().err
