import socket
from pathlib import Path

import pytest

from common.config.settings import Settings
from common.errors import ConfigError
from common.messages.fields import Role
from services.cli.supervisor.plan import (
    LONGEST_WAIT_SECONDS,
    Backoff,
    Stage,
    plan_processes,
    plan_worker,
)
from services.cli.supervisor.prepare import clean_run_dir
from services.cli.supervisor.serve import serve, tidy


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
    assert names(Settings(combined=True, combined_workers=2)) == [
        "controller",
        "combined-0",
        "combined-1",
        "gateway-0",
    ]
    assert names(Settings(combined=True, gateways=3))[2:] == ["gateway-0", "gateway-1", "gateway-2"]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(prefill=2, decode=3, gateways=2, metrics_port_base=9000),
        Settings(combined=True, combined_workers=3, metrics_port_base=9000),
    ],
)
def test_every_process_has_a_metrics_port_of_its_own(settings: Settings) -> None:
    ports = [settings.metrics_port(name) for name in names(settings)]
    assert sorted(ports, key=str) == list(range(9000, 9000 + len(ports)))


def test_the_gateway_ends_first_and_the_controller_last() -> None:
    specs = sorted(plan_processes(Settings()), key=lambda spec: spec.stage)
    assert [spec.role for spec in specs] == ["gateway", "prefill", "decode", "controller"]
    assert list(Stage) == sorted(Stage)


def test_waits_double_up_to_a_bound_and_start_anew_after_a_steady_life() -> None:
    backoff = Backoff()
    waits = [backoff.after(1.0) for _ in range(8)]
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS]
    assert backoff.num_quick_ends == 8
    assert backoff.after(60.0) == 0.25
    assert (backoff.num_ends, backoff.num_quick_ends) == (9, 0)


def test_a_worker_starts_in_the_program_of_its_role() -> None:
    specs = [plan_worker(f"w-{role}", role, is_elastic=True) for role in Role]
    assert [spec.module for spec in specs] == [
        "services.prefill",
        "services.decode",
        "services.prefill",
    ]
    assert {spec.stage for spec in specs} == {Stage.WORKER}
    assert not any(spec.is_elastic for spec in plan_processes(Settings()))


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))


def test_sockets_of_a_killed_cluster_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    ours = ["controller.admin", "controller.control", "decode-0.handoff", "gateway-0.tokens"]
    for name in (*ours, "bus"):
        bind_socket(tmp_path / name)
    (tmp_path / "note.tokens").write_text("")
    assert clean_run_dir(tmp_path) == ours
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["bus", "controller.lock", "note.tokens"]


def test_nothing_of_ours_is_left_in_a_folder_that_was_there_before(tmp_path: Path) -> None:
    bind_socket(tmp_path / "decode-0.handoff")
    for name in ("settings.json", "serve.lock", "note.txt"):
        (tmp_path / name).write_text("")
    tidy(tmp_path, remove_folder=False)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_a_folder_made_for_the_sockets_is_removed_but_never_what_else_lies_in_it(
    tmp_path: Path,
) -> None:
    log = tmp_path / "run" / "logs" / "serve.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("kept")
    (tmp_path / "run" / "settings.json").write_text("")
    bind_socket(tmp_path / "run" / "gateway-0.tokens")
    tidy(tmp_path / "run", remove_folder=True)
    assert log.read_text() == "kept"
    assert list((tmp_path / "run").iterdir()) == [log.parent]
    log.unlink()
    log.parent.rmdir()
    tidy(tmp_path / "run", remove_folder=True)
    assert not (tmp_path / "run").exists()
    tidy(tmp_path / "run", remove_folder=True)  # gone already: nothing to do


def test_serve_refuses_an_unusable_log_dir_by_name_and_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log_dir = tmp_path / "file" / "logs"
    settings = Settings(port=1, run_dir=tmp_path / "run", log_dir=log_dir)
    with pytest.raises(ConfigError, match=f"log_dir {log_dir} cannot be used"):
        serve(settings, is_port_free=True)
    assert not (tmp_path / "run").exists()
