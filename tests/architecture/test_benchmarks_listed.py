"""Every benchmark can be found: ``python -m benchmarks --help`` names it."""

from benchmarks.__main__ import ALONE, BENCHMARKS
from tests.support.source_tree import ROOT


def test_every_benchmark_is_listed_once() -> None:
    found = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if path.stem != "__main__" and "\ndef main(argv" in path.read_text(encoding="utf-8")
    }
    assert sorted((*BENCHMARKS, *ALONE)) == sorted(found)
