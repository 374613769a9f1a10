from pathlib import Path

import pytest

from docs import generate


def test_the_generated_pages_say_what_the_code_says() -> None:
    assert generate.stale_pages() == [], "run `python -m docs.generate`"


def test_a_changed_or_missing_page_is_stale(tmp_path: Path) -> None:
    assert generate.stale_pages(tmp_path) == list(generate.PAGES)
    for name, write in generate.PAGES.items():
        (tmp_path / name).write_text(write())
    assert generate.stale_pages(tmp_path) == []
    (tmp_path / "settings.md").write_text("old")
    assert generate.stale_pages(tmp_path) == ["settings.md"]


@pytest.mark.parametrize("machine", generate.MACHINES, ids=lambda machine: machine.title)
def test_every_machine_decides_every_cell(machine: generate.Machine) -> None:
    phases = {phase for phase, _ in machine.table}
    events = {event for _, event in machine.table}
    assert set(machine.table) == {(phase, event) for phase in phases for event in events}
    assert machine.first in phases
