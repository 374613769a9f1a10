import stat
from pathlib import Path

import pytest

from common.config.environment import environment
from common.config.folders import (
    default_run_dir,
    lock_file,
    prepare_run_dir,
    write_private,
)
from common.config.load import (
    flag_of,
    load_settings,
    read_settings,
    save_settings,
    variable_of,
)
from common.config.settings import GROUPS, Settings
from common.config.sizes import format_size, parse_size
from common.config.value_types import is_size
from common.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(environment):
        if name.startswith(("FLOWPATH_", "FLOWKV_")):
            monkeypatch.delenv(name)


def error_of(flags: dict[str, object], config: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, config)
    return str(caught.value)


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flowpath.toml"
    file.write_text("port = 1\nprefill = 2\ndecode = 3\n")
    monkeypatch.setenv("FLOWPATH_CONFIG", str(file))
    monkeypatch.setenv("FLOWPATH_PORT", "4")
    monkeypatch.setenv("FLOWPATH_PREFILL", "5")
    loaded = load_settings({"port": "6", "model": None})
    settings = loaded.settings
    assert (settings.port, settings.prefill, settings.decode, settings.max_num_seqs) == (
        6,
        5,
        3,
        0,
    )
    assert {name: loaded.sources[name] for name in ("port", "prefill", "decode", "model")} == {
        "port": "flag --port",
        "prefill": "environment FLOWPATH_PREFILL",
        "decode": f"file {file}",
        "model": "default",
    }


def test_settings_made_directly_do_not_read_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOWPATH_PORT", "4")
    assert Settings().port == 8000


def test_the_allocator_s_log_has_its_one_exact_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWPATH_DEBUG_ALLOC", "1")
    loaded = load_settings()
    assert not loaded.settings.debug_alloc
    assert loaded.ignored_variables == ("FLOWPATH_DEBUG_ALLOC",)
    monkeypatch.setenv("FLOWKV_DEBUG_ALLOC", "1")
    loaded = load_settings()
    assert loaded.settings.debug_alloc
    assert loaded.sources["debug_alloc"] == "environment FLOWKV_DEBUG_ALLOC"


def test_an_empty_variable_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWPATH_PORT", "")
    assert load_settings().settings.port == 8000


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"port": "x"}, ["setting port = 'x' (flag --port)", "integer"]),
        ({"port": "65536"}, ["port", "65535"]),
        ({"host": "0.0.0.0"}, ["setting host", "api_key_file", "open_http"]),
        ({"cluster_host": "10.0.0.1"}, ["cluster_host", "flowpath keygen"]),
        ({"controller": "tcp://10.0.0.1:7400?key=0"}, ["controller", "64 hex digits"]),
        (
            {"controller": f"tcp://10.0.0.1:7400?key={'0' * 64}", "keys": "/k"},
            ["needs cluster_host"],
        ),
        ({"block_size": "100"}, ["block_size", "no power of two"]),
        ({"block_size": "4"}, ["block_size", "8"]),
        ({"max_num_batched_tokens": "100"}, ["max_num_batched_tokens 100", "block_size 64"]),
        ({"kv_bytes": "3 parsecs"}, ["kv_bytes = '3 parsecs'", "MiB"]),
        ({"dtype": "int3"}, ["dtype = 'int3'", "'auto', 'float32', 'bfloat16' or 'float16'"]),
        ({"run_dir": "/tmp/" + "x" * 80}, ["run_dir", "the kernel cuts"]),
        ({"death_seconds": "0.3"}, ["death_seconds 0.3", "three heartbeat_seconds"]),
        ({"max_workers": "2", "decode": "2"}, ["max_workers 2", "3 workers", "set it to 0"]),
        ({"max_workers": "1", "combined": True, "combined_workers": "2"}, ["max_workers 1"]),
        ({"policy": "fastest"}, ["policy = 'fastest'", "'flowkv' or 'dualpath'"]),
        ({"port": "x", "prefill": "0"}, ["setting port", "setting prefill"]),
    ],
)
def test_a_bad_value_is_told_with_its_setting_source_and_what_is_right(
    flags: dict[str, object], parts: list[str]
) -> None:
    told = error_of(flags)
    for part in parts:
        assert part in told


def test_a_bad_variable_is_told_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWPATH_DECODE", "many")
    assert "(environment FLOWPATH_DECODE)" in error_of({})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1\nb = 2\n", "has unknown settings: b, prot"),
        ("port = ", "is not TOML"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "flowpath.toml"
    if text is not None:
        file.write_text(text)
    error = error_of({}, file)
    assert str(file) in error
    assert told in error


def test_settings_reach_a_child_process_whole_and_unreadable_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(
        {"port": 0, "kv_bytes": "2GB", "combined": True, "run_dir": tmp_path, "model": "m"}
    ).settings
    save_settings(settings, tmp_path / "settings.json")
    monkeypatch.setenv("FLOWPATH_PORT", "9")
    assert read_settings(tmp_path / "settings.json") == settings
    assert stat.S_IMODE((tmp_path / "settings.json").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read"):
        read_settings(tmp_path / "gone.json")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("64MB", 64_000_000),
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2k", 2000),
        (7, 7),
    ],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "1 XB", "-1", "1e9", None, True, 1.5])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(("num_bytes", "text"), [(2**30, "1GiB"), (3 * 2**19, "1536KiB"), (5, "5")])
def test_a_size_is_written_as_it_can_be_read(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text
    assert parse_size(text) == num_bytes


def test_threads_share_the_cores_evenly_and_are_at_least_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    assert Settings(prefill=1, decode=1).num_threads == 4
    assert Settings(prefill=3, decode=6).num_threads == 1
    assert Settings(combined=True).num_threads == 8
    assert Settings(combined=True, combined_workers=2).num_threads == 4
    assert Settings(threads=3).num_threads == 3


def test_a_worker_that_may_be_started_later_finds_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    assert Settings(prefill=1, decode=1, max_workers=4).num_threads == 2
    assert Settings(prefill=1, decode=1, max_workers=100).num_threads == 1


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "SmolLM2-135M-Instruct"),
        ({"model": "/models/qwen/"}, "qwen"),
        ({"model": "/models/qwen", "served_model_name": "mine"}, "mine"),
    ],
)
def test_the_model_is_named_after_its_folder_unless_told(values: dict[str, str], name: str) -> None:
    assert Settings.model_validate(values).model_name == name


def test_the_folder_of_sockets_differs_by_port_and_prefers_the_runtime_folder(
    tmp_path: Path,
) -> None:
    assert default_run_dir({}, 1) != default_run_dir({}, 2)
    short = Path("/tmp")
    assert default_run_dir({"XDG_RUNTIME_DIR": str(short)}, 1) == short / "flowpath-1"
    long = tmp_path / ("x" * 60)
    long.mkdir()
    assert default_run_dir({"XDG_RUNTIME_DIR": str(long)}, 1) == default_run_dir({}, 1)


def test_the_folder_of_sockets_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    prepare_run_dir(folder)
    prepare_run_dir(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_sockets_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 0755.*chmod 700"):
        prepare_run_dir(tmp_path)


def test_a_folder_of_sockets_that_is_a_link_or_file_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        prepare_run_dir(tmp_path / "link")
    with pytest.raises(ConfigError, match="cannot be made"):
        prepare_run_dir(tmp_path / "file")


def test_a_folder_of_sockets_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to user id"):
        prepare_run_dir(tmp_path)


def test_a_lock_has_one_holder_and_names_it(tmp_path: Path) -> None:
    with (
        lock_file(tmp_path / "lock", "another controller"),
        pytest.raises(ConfigError, match=r"another controller \(process \d+\) is running"),
        lock_file(tmp_path / "lock", "another controller"),
    ):
        raise AssertionError("both hold it")
    with lock_file(tmp_path / "lock", "another controller"):
        assert (tmp_path / "lock").exists()


def test_a_private_file_is_replaced_whole(tmp_path: Path) -> None:
    write_private(tmp_path / "f", "old")
    write_private(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("FLOWPATH_PREFILL_THRESHOLD", "12", "prefill_threshold", 12),
        ("FLOWPATH_DECODE_SLA", "80.5", "decode_sla", 80.5),
        ("FLOWPATH_TTFT_SLO_SECONDS", "4", "ttft_slo_seconds", 4.0),
        ("FLOWPATH_POLICY", "prefix_aware", "policy", "prefix_aware"),
        ("FLOWPATH_ROLES", "manual", "roles", "manual"),
        ("FLOWPATH_MAX_WORKERS", "3", "max_workers", 3),
        ("FLOWPATH_SWAP_BYTES", "2GiB", "swap_bytes", 2**31),
        ("FLOWPATH_SLOW_DOWN", "2.5", "slow_down", 2.5),
        ("FLOWPATH_COMBINED_WORKERS", "2", "combined_workers", 2),
        ("FLOWPATH_MAX_RESUMES", "0", "max_resumes", 0),
    ],
)
def test_scheduling_is_set_by_variables_of_the_settings_names(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    loaded = load_settings()
    assert getattr(loaded.settings, name) == value != getattr(Settings(), name)
    assert loaded.sources[name] == f"environment {variable}"
    assert loaded.ignored_variables == ()


def test_scheduling_starts_from_the_papers_numbers_and_goes_on_after_a_death() -> None:
    settings = Settings()
    assert (settings.prefill_threshold, settings.decode_sla) == (8, 50.0)
    assert (settings.policy, settings.roles, settings.max_workers) == ("flowkv", "auto", 0)
    assert settings.max_resumes == 3


def test_a_budget_of_as_many_workers_as_are_started_is_taken_whatever_their_kind() -> None:
    assert Settings(prefill=2, decode=1, max_workers=3).max_workers == 3
    assert Settings(combined=True, combined_workers=2, max_workers=2, policy="flowkv").combined


def test_settings_stand_by_subject_and_begin_with_where_to_listen() -> None:
    names = list(Settings.model_fields)
    assert names[:2] == ["host", "port"]
    assert names == [name for group in GROUPS for name in group.model_fields]


def test_a_size_is_told_from_a_number_by_its_setting() -> None:
    sizes = [name for name, field in Settings.model_fields.items() if is_size(field)]
    assert sizes == [
        "max_body_bytes",
        "segment_min_size",
        "kv_bytes",
        "swap_bytes",
        "layer_ring",
        "host_tier_bytes",
        "store_buffer_bytes",
        "emulated_store_bandwidth",
        "emulated_fabric_bandwidth",
    ]


def test_every_setting_is_documented_and_has_a_variable_and_a_flag() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
    assert variable_of("port") == "FLOWPATH_PORT"
    assert flag_of("max_num_seqs") == "--max-num-seqs"
