import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.engine.parallel.rendezvous import PREFIX, Rendezvous, remove_abandoned

OWNER = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from common.engine.parallel.rendezvous import Rendezvous
place = Rendezvous()
print(place.file, flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), 9)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def start(folder: Path, what: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_it_goes_with_its_owner_or_after_it(folder: Path) -> None:
    with start(folder, "live") as alive:
        assert alive.stdout is not None
        kept = Path(alive.stdout.readline().strip()).parent
        # Only then the other: one that starts removes what dead owners left.
        with start(folder, "die") as dead:
            assert dead.stdout is not None
            lost = Path(dead.stdout.readline().strip()).parent
        dead.wait()
        assert {kept, lost} == set(folder.iterdir())
        assert remove_abandoned() == [lost.name]
        assert list(folder.iterdir()) == [kept]
        alive.communicate("")
    assert not list(folder.iterdir()), "one that ends in order removes its own"


def test_one_that_is_removed_before_it_is_locked_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = fcntl.flock
    first: list[Path] = []

    def remove_first(descriptor: int, how: int) -> None:
        if not first:
            first.append(Path(f"/proc/self/fd/{descriptor}").readlink().parent)
            shutil.rmtree(first[0])
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    own = Rendezvous()
    assert Path(own.file).parent != first[0]
    assert Path(own.file).parent.exists()
    own.close()


def test_a_new_one_removes_those_of_the_dead_and_leaves_all_else(folder: Path) -> None:
    old, young, other = folder / f"{PREFIX}old", folder / f"{PREFIX}young", folder / "other"
    for each in (old, young, other):
        each.mkdir()
    os.utime(old, (1.0, 1.0))
    own = Rendezvous()
    assert not old.exists()
    assert young.exists(), "its owner may be about to lock it"
    assert other.exists()
    assert not Path(own.file).exists()
    assert Path(own.file).parent.exists()
    assert remove_abandoned() == []
    own.close()
    own.close()
    assert not Path(own.file).parent.exists()
