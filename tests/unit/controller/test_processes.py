import os
import subprocess
import sys
from pathlib import Path

from common.config.processes import ProcessWatch


def write_stat(proc: Path, pid: int, state: str, start: int) -> None:
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    fields = [state, *(str(number) for number in range(18)), str(start), "0"]
    (folder / "stat").write_text(f"{pid} (a ) name) {' '.join(fields)}")


def test_a_process_is_gone_when_it_ended_is_a_zombie_or_its_id_was_reused(tmp_path: Path) -> None:
    watch = ProcessWatch(tmp_path)
    for pid in (1, 2, 3):
        write_stat(tmp_path, pid, "S", 500)
    assert watch.gone_of([1, 2, 3, 4]) == {4}
    write_stat(tmp_path, 1, "Z", 500)
    write_stat(tmp_path, 2, "S", 501)
    (tmp_path / "3" / "stat").unlink()
    assert watch.gone_of([1, 2, 3]) == {1, 2, 3}


def test_a_real_process_runs_until_it_is_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = ProcessWatch()
    assert watch.gone_of([child.pid, os.getpid()]) == set()
    child.kill()
    child.wait()
    assert watch.gone_of([child.pid, os.getpid()]) == {child.pid}
    assert child.stdin is not None
    child.stdin.close()
