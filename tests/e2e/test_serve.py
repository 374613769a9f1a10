"""``flowpath serve`` as a user runs it: its words, its exit codes, and what it leaves behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import save_file

from common.messages.admin import RoleControl
from common.messages.fields import Role
from common.telemetry.story import read_log_folder
from tests.support.answers import Answer, Json, events_of, gather_stream
from tests.support.cluster import REPOSITORY
from tests.support.served import (
    Served,
    ServedClient,
    client_of,
    leftovers,
    serving,
    wait_gone,
)
from tests.support.tiny_llama import WEIGHTS, tiny_config, tiny_tensors, write_tiny_llama

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
HELLO: Json = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
EXIT_SECONDS = 20.0
KV_NAMES = ("total", "free", "referenced", "cached", "in_transfer")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_llama(folder, model_folder)
    return folder


def flowpath(served: Served, *arguments: str) -> str:
    """Run a command as the operator of a served cluster; returns what it printed."""
    done = try_flowpath(served, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def try_flowpath(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = served.settings
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "FLOWPATH_PORT": str(settings.port),
            "FLOWPATH_RUN_DIR": str(settings.run_dir),
            "FLOWPATH_LOG_DIR": str(settings.log_dir),
        },
        capture_output=True,
        text=True,
        timeout=EXIT_SECONDS,
        check=False,
    )


async def stream(client: ServedClient, max_tokens: int, began: asyncio.Event) -> Answer:
    """Read a stream to its end; ``began`` is set at its first event."""
    body = {"model": client.model, **HELLO, "stream": True, "max_tokens": max_tokens}
    async with client.http.stream("POST", CHAT, json={**body, "ignore_eos": True}) as response:
        events = []
        async for event in events_of(response):
            events.append(event)
            began.set()
    return gather_stream(events, response.headers["x-request-id"])


async def test_a_session_from_the_ready_line_to_ctrl_c(model_folder: Path) -> None:
    # By itself a prompt as short as this one is not worth a transfer.
    values = {"model": str(model_folder), "dtype": "bfloat16", "roles": "manual"}
    async with serving(values) as served:
        assert served.lines[0].startswith("FlowPath ")
        for told in (
            f"url        {served.url}/v1",
            "processes  controller, prefill-0, decode-0, gateway-0",
            "transport  auto (shared memory",
            "store      none",
            f"logs       {served.settings.log_dir}",
        ):
            assert told in served.output
        ready = await served.line("ready after")
        assert ready.endswith(f"{served.url}/v1")

        async with client_of(served) as client:
            answer = await client.ask(CHAT, {**HELLO, "max_tokens": 8})
            assert answer.choices[0].text
            _check_status(served)
            story = await asyncio.to_thread(
                flowpath, served, "logs", "--request", answer.request_id
            )
            for word in ("request_placed", "prefill_started", "handoff_accepted", "request_ended"):
                assert word in story, word

            began = [asyncio.Event() for _ in range(3)]
            async with asyncio.TaskGroup() as group:
                streams = [group.create_task(stream(client, 24, event)) for event in began]
                for event in began:
                    await event.wait()
                held = served.footprint()
                served.interrupt()
            answers = [task.result() for task in streams]
        assert [answer.choices[0].finish_reason for answer in answers] == ["length"] * 3
        assert await served.ended() == 0
        assert served.lines[-1] == "stopped"
        assert len(held.pids) == 5
        assert len(held.memory_files) == 2
        assert leftovers(served.settings, held) == []


def _check_status(served: Served) -> None:
    report = json.loads(flowpath(served, "status", "--json"))
    assert report["is_ready"] is True
    assert [(worker["id"], worker["role"]) for worker in report["workers"]] == [
        ("decode-0", "decode"),
        ("prefill-0", "prefill"),
    ]
    pids = served.footprint().pids
    for worker in report["workers"]:
        assert worker["pid"] in pids
        assert worker["state"] == "ready"
        counts = [worker["kv"][name] for name in KV_NAMES]
        assert counts[0] == sum(counts[1:]) > 0
    table = flowpath(served, "status")
    for word in ("prefill-0", "decode-0", "gateway-0", "ready", served.settings.model_name):
        assert word in table, word


async def test_two_combined_workers_share_the_requests(tiny_model: Path) -> None:
    values = {"model": str(tiny_model), "combined": True, "combined_workers": 2}
    async with serving(values) as served, client_of(served) as client:
        assert "processes  controller, combined-0, combined-1, gateway-0" in served.output
        report = await served.wait_until("both are there", lambda found: len(found.workers) == 2)
        assert [(worker.id, worker.role) for worker in report.workers] == [
            ("combined-0", Role.COMBINED),
            ("combined-1", Role.COMBINED),
        ]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(client.ask(CHAT, _question(n))) for n in range(8)]
        assert [task.result().choices[0].finish_reason for task in asked] == ["length"] * 8
        entries = list(read_log_folder(served.settings.log_dir))
        started = {e.process for e in entries if e.event == "prefill_started"}
        assert started == {"combined-0", "combined-1"}
        assert not [e for e in entries if e.event == "handoff_accepted"], "nothing moves"
        served.interrupt()
        assert await served.ended() == 0


def _question(number: int) -> Json:
    """Ask what shares no block with another question and takes a while."""
    words = f"{number} " * 200
    body: Json = {"messages": [{"role": "user", "content": words}], "temperature": 0}
    return {**body, "max_tokens": 60, "ignore_eos": True}


async def test_the_operator_gives_roles_and_takes_workers_out_of_work(tiny_model: Path) -> None:
    async with serving({"model": str(tiny_model), "prefill": 2}) as served:
        await served.wait_until("three workers", lambda report: len(report.workers) == 3)

        async def order(*arguments: str) -> str:
            return await asyncio.to_thread(flowpath, served, *arguments)

        async def refused(*arguments: str) -> str:
            done = await asyncio.to_thread(try_flowpath, served, *arguments)
            assert done.returncode == 2
            return done.stderr

        await order("roles", "manual")
        told = await order("switch-role", "prefill-1", "decode", "--wait")
        assert told.splitlines()[-1] == "prefill-1 is decode"
        report = await served.status()
        assert report is not None
        assert report.role_control is RoleControl.MANUAL
        assert {worker.id: str(worker.role) for worker in report.workers} == {
            "decode-0": "decode",
            "prefill-0": "prefill",
            "prefill-1": "decode",
        }
        assert "prefill-0" in await refused("switch-role", "prefill-0", "decode")
        assert "nobody" in await refused("switch-role", "nobody", "decode")

        told = await order("drain", "decode-0", "--wait")
        assert told.splitlines()[-1] == "decode-0 has nothing to do"
        async with client_of(served) as client:
            answer = await client.ask(CHAT, {**HELLO, "max_tokens": 4})
        story = await order("logs", "--request", answer.request_id)
        assert "prefill-1" in story
        assert " decode-0 " not in story
        told = await order("drain", "decode-0", "--undo", "--wait")
        assert told.splitlines()[-1] == "decode-0 takes work again"
        served.interrupt()
        assert await served.ended() == 0


async def test_sigterm_lets_streams_finish_and_takes_no_new_ones(tiny_model: Path) -> None:
    async with serving({"model": str(tiny_model)}) as served, client_of(served) as client:
        began = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stream(client, 2000, began))
            await began.wait()
            held = served.footprint()
            os.kill(served.pid, signal.SIGTERM)
            await served.line("stopping: running requests have 30 s to finish")
            await _until_refused(served)
            assert not running.done(), "the stream was too short to see the drain"
        assert running.result().choices[0].finish_reason == "length"
        assert await served.ended() == 0
        assert leftovers(served.settings, held) == []


async def _until_refused(served: Served) -> None:
    """Wait until new requests are refused by name."""
    async with asyncio.timeout(EXIT_SECONDS), httpx.AsyncClient(trust_env=False) as client:
        while (await client.get(f"{served.url}/health")).status_code != 503:
            pass
        refused = await client.post(f"{served.url}{CHAT}", json=HELLO)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"


async def test_a_second_ctrl_c_kills_at_once(tiny_model: Path) -> None:
    async with serving({"model": str(tiny_model)}) as served, client_of(served) as client:
        began = asyncio.Event()
        running = asyncio.get_running_loop().create_task(stream(client, 30_000, began))
        await began.wait()
        held = served.footprint()
        served.interrupt()
        await served.line("(again to kill)")
        assert not running.done()
        served.interrupt()
        await served.ended(EXIT_SECONDS)
        assert "killing" in served.output
        with pytest.raises((httpx.HTTPError, ValueError)):
            await running
        assert leftovers(served.settings, held) == []


async def test_ctrl_c_before_it_is_ready_ends_it_in_order(tiny_model: Path) -> None:
    async with serving({"model": str(tiny_model)}, is_ready=False) as served:
        await served.line("logs ")
        held = served.footprint()
        served.interrupt()
        assert await served.ended() == 0
        await wait_gone(served.settings, held)
        assert leftovers(served.settings, held) == []


async def test_after_kill_9_of_the_whole_group_a_new_start_works_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with serving({"model": str(tiny_model)}, folder=tmp_path) as served:
        values = {"model": str(tiny_model), "port": served.settings.port}
        killed = served.footprint()
        served.interrupt(signal.SIGKILL)
        assert await served.ended() == -signal.SIGKILL
        await wait_gone(served.settings, killed)
        left = leftovers(served.settings, killed)
        assert all("run" in name for name in left), left  # files alone, and only in its folder
    async with serving(values, folder=tmp_path) as served:
        async with client_of(served) as client:
            assert (await client.ask(CHAT, {**HELLO, "max_tokens": 4})).choices
        held = served.footprint()
        assert not held.pids & killed.pids
        served.interrupt()
        assert await served.ended() == 0
        assert leftovers(served.settings, held) == []


async def test_a_port_in_use_is_refused_by_its_number(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        values = {"model": str(tiny_model), "port": port}
        async with serving(values, is_ready=False) as served:
            assert await served.ended(EXIT_SECONDS) == 2
            assert f"port {port}" in served.output


async def test_a_second_serve_in_the_same_folder_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with serving({"model": str(tiny_model)}, folder=tmp_path, is_ready=False) as served:
        await served.line("logs ")
        async with serving({"model": str(tiny_model)}, folder=tmp_path, is_ready=False) as second:
            assert await second.ended(EXIT_SECONDS) == 2
            assert f"process {served.pid}" in second.output
        served.interrupt()
        assert await served.ended() == 0


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("block_size", "48", "block_size"),
        ("dtype", "int4", "dtype"),
        ("kv_bytes", "1.5 parsecs", "kv_bytes"),
        ("host", "0.0.0.0", "host"),
        ("death_seconds", "0.1", "heartbeat_seconds"),
    ],
)
def test_a_bad_setting_is_refused_by_its_name(
    tmp_path: Path, variable: str, value: str, told: str
) -> None:
    name = f"FLOWPATH_{variable.upper()}"
    code, output = _serve_and_fail({name: value, "FLOWPATH_RUN_DIR": str(tmp_path / "run")})
    assert code == 2, output
    assert told in output


def _serve_and_fail(environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "serve"],
        cwd=REPOSITORY,
        env={**os.environ, "FLOWPATH_PORT": "0", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


# ---- broken model folders ------------------------------------------------------------------------


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _of_an_unknown_family(folder: Path) -> None:
    config = {**_config(folder), "model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


def _without_a_tensor(folder: Path) -> None:
    tensors = tiny_tensors(_config(folder)["vocab_size"])
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS)


def _with_a_tensor_of_another_shape(folder: Path) -> None:
    tensors = tiny_tensors(_config(folder)["vocab_size"])
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-1].copy()
    save_file(tensors, folder / WEIGHTS)


def _cut_short(folder: Path) -> None:
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1000])


def _config(folder: Path) -> Json:
    found: Json = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (_without_config, ("config.json",)),
        (_of_an_unknown_family, ("config.json", "mamba")),
        (_without_a_tensor, ("missing: model.layers.1.mlp.up_proj.weight",)),
        (_with_a_tensor_of_another_shape, ("model.layers.0.self_attn.k_proj.weight (31, 32)",)),
        (_cut_short, (WEIGHTS,)),
    ],
)
async def test_a_broken_model_folder_is_refused_with_what_is_wrong_in_it(
    tmp_path: Path,
    model_folder: Path,
    broken: Callable[[Path], None],
    told: tuple[str, ...],
) -> None:
    folder = tmp_path / "model"
    write_tiny_llama(folder, model_folder)
    broken(folder)
    async with serving({"model": str(folder)}, is_ready=False) as served:
        assert await served.ended() == 2
        for word in (str(folder), *told):
            assert word in served.output, served.output
        assert "Traceback" not in served.output


def test_the_tiny_model_has_the_real_vocabulary(tiny_model: Path, model_folder: Path) -> None:
    assert _config(tiny_model) == tiny_config(_config(model_folder)["vocab_size"])
