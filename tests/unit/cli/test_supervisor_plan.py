import socket
from pathlib import Path

from common.config.settings import Settings
from services.cli.supervisor.plan import LONGEST_WAIT_SECONDS, Backoff, Stage, plan_processes
from services.cli.supervisor.prepare import clean_run_dir
from services.cli.supervisor.serve import tidy


def names(settings: Settings) -> list[str]:
    return [spec.name for spec in plan_processes(settings)]


def test_every_worker_gets_a_process_between_controller_and_gateway() -> None:
    assert names(Settings(prefill=2, decode=1)) == [
        "controller",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "gateway-0",
    ]
    assert names(Settings(prefill=2, combined=True)) == ["controller", "combined-0", "gateway-0"]
    assert names(Settings(combined=True, gateways=3))[2:] == ["gateway-0", "gateway-1", "gateway-2"]


def test_the_gateway_ends_first_and_the_controller_last() -> None:
    specs = sorted(plan_processes(Settings()), key=lambda spec: spec.stage)
    assert [spec.role for spec in specs] == ["gateway", "prefill", "decode", "controller"]
    assert list(Stage) == sorted(Stage)


def test_waits_double_up_to_a_bound_and_start_anew_after_a_steady_life() -> None:
    backoff = Backoff()
    waits = [backoff.after(1.0) for _ in range(8)]
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS]
    assert backoff.after(60.0) == 0.25
    assert backoff.num_ends == 9


def test_sockets_of_a_killed_cluster_are_removed_and_other_files_stay(tmp_path: Path) -> None:

    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "decode-0.handoff"))
    (tmp_path / "note.txt").write_text("")
    assert clean_run_dir(tmp_path) == ["decode-0.handoff"]
    assert (tmp_path / "note.txt").exists()
    assert not (tmp_path / "decode-0.handoff").exists()


def test_nothing_of_ours_is_left_in_a_folder_that_was_there_before(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "decode-0.handoff"))
    for name in ("settings.json", "serve.lock", "note.txt"):
        (tmp_path / name).write_text("")
    tidy(tmp_path, remove_folder=False)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    tidy(tmp_path, remove_folder=True)
    assert not tmp_path.exists()
