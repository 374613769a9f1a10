"""How the suite is spread over processes, and notes for its summary.

What starts whole clusters stays in one process, one test after the other, and what starts two hosts
of its own in another: more of them at a time would only slow each other down. Everything else goes
to the process that is free.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

HOSTS = "tests/e2e/test_two_hosts.py"
CLUSTERS = ("tests/e2e/", "tests/chaos/", "tests/integration/load/")
NOTES = "notes"

_notes: list[str] = []


class _Node(Protocol):
    """A process of tests that has ended, as pytest-xdist tells of it."""

    workeroutput: dict[str, list[str]]


class _Spread(LoadScopeScheduling):
    """Gives whole files to processes, and all files of clusters to one of them."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(HOSTS):
            return "hosts"
        return "clusters" if nodeid.startswith(CLUSTERS) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _Spread(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[NOTES] = _notes


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: _Node) -> None:
    _notes.extend(node.workeroutput.get(NOTES, []) if hasattr(node, "workeroutput") else [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _notes:
        terminalreporter.section("notes")
        for note in _notes:
            terminalreporter.write_line(note)


@pytest.fixture(scope="session")
def note() -> Callable[[str], None]:
    """Take a line for the summary, which is printed however the tests end."""
    return _notes.append


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test's own, with a path short enough for the sockets in it."""
    return tmp_path_factory.mktemp("t")
