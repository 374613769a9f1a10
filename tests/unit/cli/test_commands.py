import io
import json
import logging
import socket
import stat
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import structlog
from typer.main import get_command

from common.config.environment import environment
from common.config.settings import Settings
from common.ids import WorkerId
from common.messages.admin import OrderDrain, OrderRole, OrderRoles, RoleControl
from common.messages.fields import Role
from common.models.default_names import FOLDER_NAME
from common.transport.security import Keys, make_keys
from services.cli import check
from services.cli.admin import Order
from services.cli.main import app
from services.cli.supervisor.serve import told_dtype
from tests.support.held_port import held_port

COMMAND = get_command(app)
"""Made once: it has every setting as a flag of every program."""

MODEL_CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(environment):
        if name.startswith(("FLOWPATH_", "FLOWKV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FLOWPATH_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("FLOWPATH_LOG_DIR", str(tmp_path / "log"))
    monkeypatch.setenv("FLOWPATH_CACHE_DIR", str(tmp_path / "cache"))


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        COMMAND.main(list(arguments), prog_name="flowpath")
    assert isinstance(ended.value.code, int)
    return ended.value.code, out.getvalue(), err.getvalue()


def test_version_is_printed() -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("flowpath ")


def test_check_prints_every_setting_with_its_value_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f.toml"
    file.write_text('kv_bytes = "2GiB"\n')
    monkeypatch.setenv("FLOWPATH_DECODE", "3")
    monkeypatch.setenv("FLOWPATH_PORTT", "3")
    code, out, _ = run("serve", "--config", str(file), "--port", "9", "--combined", "--check")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows[1:-1]] == list(Settings.model_fields)
    assert ["port", "9", "flag", "--port"] in rows
    assert ["combined", "true", "flag", "--combined"] in rows
    assert ["decode", "3", "environment", "FLOWPATH_DECODE"] in rows
    assert ["kv_bytes", "2GiB", "file", str(file)] in rows
    assert ["max_num_seqs", "0", "default"] in rows
    assert out.splitlines()[-1] == (
        "note: environment FLOWPATH_PORTT names no setting and is ignored"
    )


@pytest.mark.parametrize("is_default", [False, True])
def test_check_tells_of_a_context_that_is_longer_than_the_model_s(
    tmp_path: Path, is_default: bool
) -> None:
    folder = tmp_path / "cache" / "models" / FOLDER_NAME if is_default else tmp_path / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    model = () if is_default else ("--model", str(folder))
    for asked, is_told in ((257, True), (256, False), (0, False)):
        code, out, _ = run("serve", *model, "--max-model-len", str(asked), "--check")
        assert code == 0
        told = f"note: max_model_len {asked} is more than the model's 256, which holds"
        assert (told in out.splitlines()) == is_told


def test_check_refuses_what_no_worker_could_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    model = ("--model", str(tmp_path))
    heads = MODEL_CONFIG["num_key_value_heads"]
    assert isinstance(heads, int)
    code, _, err = run("serve", *model, "--tensor-parallel", str(heads + 1), "--check")
    assert code == 2
    assert f"tensor_parallel {heads + 1}" in err
    monkeypatch.setattr(check, "is_nixl_installed", lambda: False)
    code, _, err = run("serve", *model, "--transport", "rdma", "--check")
    assert code == 2
    assert "needs NIXL" in err
    code, _, _ = run("gateway", *model, "--transport", "rdma", "--check")
    assert code == 0, "a gateway moves no KV"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--store", "ftp://host"), "say none, file:DIR or redis://HOST:PORT"),
        (("--store", "file:/nowhere?depth=0"), "depth is 1 to 1024"),
        (("--store", "none", "--host-tier-bytes", "1GiB"), "setting host_tier_bytes: there is no"),
        (("--store", "redis://h:1/0", "--store-preload", "/nowhere"), "store_preload /nowhere: "),
    ],
)
def test_check_reads_what_names_the_store_and_opens_none(
    arguments: tuple[str, ...], told: str
) -> None:
    code, _, err = run("serve", *arguments, "--check")
    assert code == 2
    assert told in err
    assert run("gateway", *arguments, "--check")[0] == 0, "a gateway has no store"
    assert run("serve", "--store", "redis://nowhere.invalid:1/0", "--check")[0] == 0


@pytest.mark.parametrize("program", ["serve", "gateway", "controller", "prefill", "decode"])
def test_every_program_takes_the_same_flags_and_refuses_a_bad_value_with_code_2(
    program: str,
) -> None:
    code, _, err = run(program, "--block-size", "7", "--check")
    assert code == 2
    assert err.startswith("flowpath: setting block_size = '7' (flag --block-size)")


def test_a_broken_model_folder_ends_serve_with_code_2_and_the_file_s_name(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{")
    for extra in ((), ("--check",)):
        code, _, err = run("serve", "--port", "0", "--model", str(model), *extra)
        assert code == 2
        assert str(model / "config.json") in err
    assert not (tmp_path / "run").exists()


def _api_key_file(folder: Path, text: str, mode: int) -> Path:
    path = folder / "api-keys"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        ("sk-0123456789\n", 0o644, "has mode 0644: others may read or change it"),
        ("", 0o600, "holds no key"),
        ("short\n", 0o600, "line 1"),
    ],
)
def test_check_refuses_a_file_of_api_keys_that_serve_would_refuse(
    tmp_path: Path, text: str, mode: int, told: str
) -> None:
    path = str(_api_key_file(tmp_path, text, mode))
    for program in ("serve", "gateway"):
        code, out, err = run(program, "--api-key-file", path, "--check")
        assert (code, out) == (2, "")
        assert path in err
        assert told in err
    assert run("decode", "--api-key-file", path, "--check")[0] == 0  # it reads no such file


def test_check_refuses_a_file_of_api_keys_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        code, _, err = run("serve", "--api-key-file", str(path), "--check")
        assert code == 2
        assert f"api_key_file {path} cannot be read" in err


def _key_folder(folder: Path, fault: str) -> Path:
    keys = folder / "keys"
    make_keys(keys)
    secret = keys / "node.key_secret"
    match fault:
        case "missing":
            secret.unlink()
        case "unreadable":
            secret.unlink()
            secret.symlink_to(secret)
        case "open to others":
            secret.chmod(0o640)
        case "empty":
            secret.write_text("")
        case "broken peer":
            (keys / "allowed" / "peer.key").write_text("no key")
    return keys


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("missing", "node.key_secret: no such key; make one with `flowpath keygen"),
        ("unreadable", "node.key_secret: cannot be read"),
        ("open to others", "node.key_secret: others can read this secret"),
        ("empty", "node.key_secret: not a key file"),
        ("broken peer", "allowed/peer.key: not a key file"),
    ],
)
@pytest.mark.parametrize("program", ["serve", "gateway", "controller", "prefill", "decode"])
def test_check_refuses_a_key_folder_that_the_program_would_refuse(
    tmp_path: Path, program: str, fault: str, told: str
) -> None:
    keys = _key_folder(tmp_path, fault)
    code, out, err = run(program, "--keys", str(keys), "--check")
    assert (code, out) == (2, "")
    assert told in err


def test_check_passes_good_key_files_and_tells_of_an_empty_allow_list(tmp_path: Path) -> None:
    keys = _key_folder(tmp_path, "none")
    path = str(_api_key_file(tmp_path, "sk-0123456789\n", 0o600))
    arguments = ("serve", "--keys", str(keys), "--api-key-file", path, "--check")
    code, out, _ = run(*arguments)
    assert code == 0
    assert "note:" not in out
    assert "sk-0123456789" not in out
    (keys / "allowed" / "node.key").unlink()
    code, out, _ = run(*arguments)
    assert code == 0
    assert f"note: {keys}/allowed holds no *.key file" in out


def test_a_port_in_use_ends_serve_with_code_2_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("serve", "--port", str(port))
    assert code == 2
    assert f"port {port} on 127.0.0.1 cannot be used: Address already in use" in err
    assert "--port or FLOWPATH_PORT" in err
    assert not (tmp_path / "run").exists()


def test_a_run_dir_that_others_can_enter_ends_serve_with_code_2(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o755)
    code, _, err = run("serve", "--port", "0")
    assert code == 2
    assert f"chmod 700 {run_dir}" in err
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--json"),
        ("switch-role", "decode-0", "prefill", "--wait"),
        ("roles", "manual"),
        ("drain", "decode-0"),
    ],
)
def test_a_command_without_a_controller_ends_with_code_2_and_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("services.cli.admin.DEADLINE_SECONDS", 0.05)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert f"no controller answered at {tmp_path / 'run'}" in err


class Given:
    """Notes the order that a command gives, in the controller's place."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    async def __call__(self, _settings: Settings, order: Order) -> str:
        self.orders.append(order)
        return "[ordered]"


@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        (("switch-role", "w-1", "decode"), OrderRole(worker_id=WorkerId("w-1"), role=Role.DECODE)),
        (("roles", "auto"), OrderRoles(control=RoleControl.AUTO)),
        (("drain", "w-1"), OrderDrain(worker_id=WorkerId("w-1"), is_draining=True)),
        (("drain", "w-1", "--undo"), OrderDrain(worker_id=WorkerId("w-1"), is_draining=False)),
    ],
)
def test_a_command_gives_its_order_and_prints_the_answer(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], order: Order
) -> None:
    given = Given()
    monkeypatch.setattr("services.cli.orders.give_order", given)
    assert run(*arguments) == (0, "[ordered]\n", "")
    assert given.orders == [order]


def test_a_worker_cannot_be_told_to_be_combined() -> None:
    code, _, err = run("switch-role", "w-1", "combined")
    assert code == 2
    assert "'prefill'" in err


def test_an_address_of_another_host_ends_a_worker_before_it_loads_anything(
    tmp_path: Path,
) -> None:
    make_keys(tmp_path / "keys")
    flags = ("--keys", str(tmp_path / "keys"), "--cluster-host", "192.0.2.1")
    for program in ("decode", "serve"):
        code, _, err = run(program, "--port", "0", *flags)
        assert code == 2
        assert "cannot bind to tcp://192.0.2.1:0" in err
        assert "cluster_host must be an address of this host" in err
        assert not (tmp_path / "cache").exists(), "no model was made"


def test_what_looks_like_markup_or_an_emoji_is_printed_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "a:x:[bold]b"
    code, out, _ = run("keygen", str(folder))
    assert code == 0
    assert out.count(str(folder)) >= 3
    code, _, err = run("serve", "--check", "--store", "bogus:x:[bold]")
    assert code == 2
    assert "bogus:x:[bold]" in err


def test_keygen_prints_the_key_as_an_endpoint_names_it(tmp_path: Path) -> None:
    code, out, _ = run("keygen", str(tmp_path / "keys"))
    assert code == 0
    key = Keys.load(tmp_path / "keys").public
    assert f"--controller 'tcp://ADDRESS:7400?key={key.hex()}'" in out


@pytest.mark.parametrize(
    ("dtype", "device", "is_native", "has_gpu", "expected"),
    [
        ("float32", "auto", True, True, "float32"),
        ("auto", "auto", True, False, "auto (bfloat16)"),
        ("auto", "cpu", False, True, "auto (float32)"),
        ("auto", "auto", False, True, "auto (bfloat16 on a GPU, float32 on this processor)"),
    ],
)
def test_the_banner_names_the_type_that_auto_is(
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    device: str,
    is_native: bool,
    has_gpu: bool,
    expected: str,
) -> None:
    monkeypatch.setattr("common.config.processor.has_native_bfloat16", lambda: is_native)
    monkeypatch.setattr("common.config.processor.may_have_gpu", lambda: has_gpu)
    assert told_dtype(Settings(dtype=dtype, device=device)) == expected


LINES = [
    {"ts": "2026-01-01T00:00:01.000001+00:00", "process": "gateway-0", "pid": 1, "level": "info",
     "event": "request_received", "request_id": "r"},
    {"ts": "2026-01-01T00:00:03.000001+00:00", "process": "gateway-0", "pid": 1, "level": "error",
     "event": "request_failed", "request_id": "r", "reason": "[bold] is no mark"},
    {"ts": "2026-01-01T00:00:02.000001+00:00", "process": "prefill-0", "pid": 2, "level": "info",
     "event": "other", "request_id": "x"},
]  # fmt: skip


def write_logs(folder: Path) -> None:
    folder.mkdir()
    for line in LINES:
        with (folder / f"{line['process']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_logs_are_merged_by_time(tmp_path: Path) -> None:
    write_logs(tmp_path / "log")
    code, out, _ = run("logs")
    assert code == 0
    assert out == (
        "00:00:01.000001 gateway-0    request_received request_id=r\n"
        "00:00:02.000001 prefill-0    other request_id=x\n"
        "00:00:03.000001 gateway-0    request_failed request_id=r reason=[bold] is no mark\n"
    )


def test_logs_of_one_request_leave_the_others_out(tmp_path: Path) -> None:
    write_logs(tmp_path / "log")
    code, out, _ = run("logs", "--request", "r")
    assert code == 0
    assert [line.split()[2] for line in out.splitlines()] == ["request_received", "request_failed"]


def test_logs_say_when_there_is_nothing(tmp_path: Path) -> None:
    assert run("logs")[0] == 2
    write_logs(tmp_path / "log")
    code, _, err = run("logs", "--request", "nobody")
    assert code == 2
    assert "tells of request nobody" in err


def test_chat_without_a_gateway_says_how_to_start_one() -> None:
    with held_port() as port:
        code, _, err = run("chat", "--port", str(port))
    assert code == 2
    assert "start one with `flowpath serve`, or name its port with --port" in err
