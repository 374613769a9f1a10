"""Every page that another page or a message names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    *(ROOT / "common").rglob("*.py"),
    *(ROOT / "services").rglob("*.py"),
    *(p for p in (ROOT / "deploy").iterdir() if p.is_file()),
    ROOT / "Makefile",
    ROOT / "compose.yaml",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    broken = [
        link for link in links if "://" not in link and not (page.parent / link).resolve().exists()
    ]
    assert not broken


def test_a_page_that_the_code_names_is_there() -> None:
    named = {
        (str(source.relative_to(ROOT)), page)
        for source in SOURCES
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", source.read_text(errors="replace"))
    }
    assert named, "nothing was found: the pattern is wrong"
    assert not [(source, page) for source, page in named if not (ROOT / page).is_file()]
