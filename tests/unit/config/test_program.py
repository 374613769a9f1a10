import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from common.config.load import save_settings
from common.config.program import run_program
from common.config.settings import Settings
from common.errors import ConfigError
from services.controller import __main__ as controller
from services.decode import __main__ as decode
from services.gateway import __main__ as gateway
from services.prefill import __main__ as prefill


def test_a_program_gets_its_settings_and_name_and_returns_its_code(tmp_path: Path) -> None:
    settings = Settings(port=7, run_dir=tmp_path)
    save_settings(settings, tmp_path / "s.json")
    seen: list[tuple[Settings, str]] = []

    def body(given: Settings, name: str) -> int:
        seen.append((given, name))
        return 5

    argv = ["--settings", str(tmp_path / "s.json"), "--id", "decode-3"]
    assert run_program("decode", "decode-0", argv, body) == 5
    assert seen == [(settings, "decode-3")]


def test_a_config_error_is_told_and_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def body(_settings: Settings, _name: str) -> int:
        raise ConfigError("model.safetensors is missing")

    assert run_program("decode", "decode-0", [], body) == 2
    where, why = capsys.readouterr().err.splitlines()
    assert where.startswith("flowpath decode: logs to ")
    assert where.endswith("decode-0.jsonl")
    assert why == "flowpath decode: model.safetensors is missing"


@pytest.fixture
def bad_log_dir(tmp_path: Path) -> Path:
    """Name a log folder that cannot be made; ``s.json`` has the settings that name it."""
    (tmp_path / "file").write_text("")
    settings = Settings(port=7, run_dir=tmp_path / "run", log_dir=tmp_path / "file" / "logs")
    save_settings(settings, tmp_path / "s.json")
    return settings.log_dir


@pytest.mark.parametrize(
    "main",
    [
        controller.main,
        partial(run_program, "gateway", "gateway-0", body=gateway.serve),
        prefill.main,
        decode.main,
    ],
    ids=["controller", "gateway", "prefill", "decode"],
)
def test_an_unusable_log_dir_is_told_by_every_program(
    tmp_path: Path,
    bad_log_dir: Path,
    main: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(argv=["--settings", str(tmp_path / "s.json")]) == 2
    assert f"log_dir {bad_log_dir} cannot be used" in capsys.readouterr().err


def test_an_unusable_log_dir_ends_a_program_with_code_2_and_no_traceback(
    tmp_path: Path, bad_log_dir: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.controller", "--settings", str(tmp_path / "s.json")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"log_dir {bad_log_dir} cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("body", "code"),
    [("return 3", 3), ("sys.exit(2)", 2), ("sys.exit()", 0), ("raise KeyError('what')", 1)],
)
def test_a_process_ends_with_the_code_of_its_program_whatever_its_threads_do(
    body: str, code: int
) -> None:
    program = f"""
import sys, threading
from common.config.program import run_and_end
threading.Thread(target=threading.Event().wait).start()
def main():
    print("said")
    {body}
run_and_end(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, "said\n")
    assert ("KeyError: 'what'" in done.stderr) == (code == 1)


def test_a_closed_output_does_not_change_the_code() -> None:
    program = "from common.config.program import run_and_end; run_and_end(lambda: 0)"
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, program], check=False, timeout=60
    )
    assert done.returncode == 0


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=sys.stdout)
child.wait()
"""
CHILD = """
import signal, sys
from common.config.program import die_with_parent
die_with_parent(int(sys.argv[1]))
print(__import__("os").getpid(), flush=True)
signal.pause()
"""


def test_a_child_dies_with_its_parent_however_that_ends() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    assert int(parent.stdout.readline()) > 0
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    # The pipe ends when the last process that holds it has ended: the child.
    assert parent.stdout.read() == b""
    parent.stdout.close()


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, "1"], check=False, capture_output=True)
    assert done.returncode == 1
