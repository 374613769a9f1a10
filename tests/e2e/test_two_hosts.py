"""A cluster over two hosts: the same answers, over slow and cut links, and for nobody unknown."""

import asyncio
import platform
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import monotonic

import pytest
import pytest_asyncio

from common.messages.admin import StatusReport
from common.transport.security import Keys, make_keys, shown_key, with_key
from common.worker.decode_peer import PAIRING_SECONDS
from tests.e2e.conftest import split_cluster
from tests.support.answers import Json
from tests.support.cluster import Cluster
from tests.support.prompts import Encode, exact_prompt
from tests.support.tiny_llama import write_tiny_llama
from tests.support.two_hosts import (
    Cable,
    Host,
    HostedCluster,
    exchange_keys,
    hosted_cluster,
    two_hosts,
    why_no_hosts,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LEASE_SECONDS = 5.0
ERROR_MARGIN_SECONDS = 10.0
HEAL_SECONDS = 30.0
SLOW_MEGABITS = 160
CUT_AFTER_BYTES = 6_000_000
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
EXIT_CONFIG_ERROR = 2

REAL = {
    "dtype": "float32",
    "kv_bytes": "512M",
    "max_num_batched_tokens": 256,
    "roles": "manual",
    "max_resumes": 0,
}
"""As the cluster on one host that the answers are compared with; ``transport`` is ``auto``. What is
decoded crosses the hosts, and what a cut ends is told by name."""


@pytest.fixture(scope="module", autouse=True)
def _hosts() -> None:
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)


@pytest.fixture
def tiny_model(tmp_path: Path, model_folder: Path) -> Path:
    write_tiny_llama(tmp_path / "tiny", model_folder)
    return tmp_path / "tiny"


@pytest.fixture
def cable() -> Iterator[Cable]:
    """Two hosts that know each other's keys."""
    with two_hosts() as made:
        for host in (made.a, made.b):
            make_keys(host.keys)
        exchange_keys(made)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def split(model_folder: Path) -> AsyncIterator[Cluster]:
    """The cluster on one host of these tests alone: the other tests run in another process."""
    async with split_cluster(model_folder) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hosted(model_folder: Path) -> AsyncIterator[HostedCluster]:
    """Controller, gateway and prefill on A, decode on B."""
    with two_hosts() as made:
        for host in (made.a, made.b):
            make_keys(host.keys)
        exchange_keys(made)
        with hosted_cluster(made, {**REAL, "model": str(model_folder)}) as cluster:
            for name in ("controller", "prefill-0", "gateway-0"):
                cluster.start(made.a, name)
            cluster.start(made.b, "decode-0")
            await cluster.wait_ready("prefill-0", "decode-0")
            yield cluster
            await cluster.stop("gateway-0", "prefill-0", "decode-0", "controller")


def _completion(encode: Encode, num_tokens: int, first: int, /, **fields: object) -> Json:
    prompt = exact_prompt("", num_tokens, first=first).token_ids(encode)
    shown = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return {"prompt": prompt, **shown, **fields}


def _assert_nothing_leaked(report: StatusReport) -> None:
    for worker in report.workers:
        assert worker.kv is not None
        assert worker.kv.free + worker.kv.cached == worker.kv.total, f"{worker.id}: {worker.kv}"


async def test_two_hosts_answer_as_one_host_does(
    hosted: HostedCluster, split: Cluster, encode: Encode
) -> None:
    bodies = [
        _completion(encode, 1, 8000),
        _completion(encode, 64, 8100, logprobs=2),
        _completion(encode, 130, 8200, temperature=0.8, seed=7, n=2),
        _completion(encode, 600, 8300, max_tokens=24),
    ]
    chat = {
        "messages": [{"role": "user", "content": "Which animals live in the sea?"}],
        "temperature": 0,
        "max_tokens": 12,
        "return_token_ids": True,
    }
    for path, body in [(TEXT, body) for body in bodies] + [(CHAT, chat)]:
        here, there = await asyncio.gather(split.ask(path, body), hosted.ask(path, body))
        assert [choice.token_ids for choice in there.choices] == [
            choice.token_ids for choice in here.choices
        ]
        assert there.choices[0].text == here.choices[0].text
        assert there.usage == here.usage
    paired = hosted.logged(hosted.cable.a, "prefill-0", "paired")
    assert {entry.fact("transport") for entry in paired} == {"tcp"}
    assert '"transport": "shm"' in (split.log_dir / "prefill-0.jsonl").read_text()
    _assert_nothing_leaked(await hosted.wait_idle())


async def test_a_slow_link_makes_an_answer_late_and_nothing_else(
    hosted: HostedCluster, split: Cluster, encode: Encode
) -> None:
    body = _completion(encode, 500, 9000)
    expected = await split.ask(TEXT, body)
    cable = hosted.cable
    before = cable.num_bytes_to_b()
    cable.slow_down(SLOW_MEGABITS)
    try:
        began = monotonic()
        answer = await hosted.ask(TEXT, body)
        seconds = monotonic() - began
    finally:
        cable.speed_up()
    num_bytes = cable.num_bytes_to_b() - before
    assert answer.choices[0].token_ids == expected.choices[0].token_ids
    assert num_bytes > 500 * KV_BYTES_PER_TOKEN, "the prompt's KV went over the cable"
    assert seconds > 0.8 * num_bytes * 8 / (SLOW_MEGABITS * 1e6), "the link was slow"
    report = await hosted.wait_idle()
    assert [worker.id for worker in report.workers] == ["decode-0", "prefill-0"], "nobody was lost"
    _assert_nothing_leaked(report)


@pytest.mark.parametrize("end", ["prefill's", "decode's"])
async def test_a_link_cut_in_the_middle_of_a_transfer_fails_by_name_and_leaks_nothing(
    hosted: HostedCluster, split: Cluster, encode: Encode, end: str
) -> None:
    cable = hosted.cable
    where, first = (cable.a, 9500) if end == "prefill's" else (cable.b, 10500)
    num_closed = len(hosted.logged(cable.b, "decode-0", "handoff_closed"))
    num_registered = len(hosted.logged(cable.b, "decode-0", "registered"))
    num_silent = len(hosted.logged(cable.b, "decode-0", "controller_silent"))
    before = cable.num_bytes_to_b()
    cable.slow_down(SLOW_MEGABITS)  # so that the transfer lasts for seconds
    try:
        request = asyncio.create_task(hosted.http(TEXT, _completion(encode, 1500, first)))
        while cable.num_bytes_to_b() - before < CUT_AFTER_BYTES:
            assert not request.done(), request.result()
            await asyncio.sleep(0.02)
        cable.cut(where)
        cut_at = monotonic()
        told = await request
        seconds = monotonic() - cut_at
        assert told["status"] == 502, told
        assert told["body"]["error"]["code"] in ("worker_died", "transfer_failed"), told
        assert seconds < LEASE_SECONDS + ERROR_MARGIN_SECONDS, f"told after {seconds:.1f} s"
        assert cable.num_bytes_to_b() - before < 1400 * KV_BYTES_PER_TOKEN, "it was not whole"
        # The decode side lets go by itself, while nobody can reach it.
        closed = await hosted.wait_logged(cable.b, "decode-0", "handoff_closed", num_closed + 1)
        assert closed.fact("outcome") != "HandedOver"
        await hosted.wait_logged(cable.b, "decode-0", "controller_silent", num_silent + 1)
    finally:
        cable.mend(where)
        cable.speed_up()
    mended_at = monotonic()
    await hosted.wait_logged(cable.b, "decode-0", "registered", num_registered + 1, HEAL_SECONDS)
    await hosted.wait_ready("prefill-0", "decode-0")
    assert monotonic() - mended_at < HEAL_SECONDS
    _assert_nothing_leaked(await hosted.wait_idle())
    body = _completion(encode, 200, first + 500)
    answer = await hosted.ask(TEXT, body)
    assert answer.choices == (await split.ask(TEXT, body)).choices
    _assert_nothing_leaked(await hosted.wait_idle())


@pytest.fixture
def light(cable: Cable, tiny_model: Path) -> Iterator[HostedCluster]:
    """Two hosts with a model that starts fast; a test starts the programs.

    Roles are by hand: by load, a decode worker that nobody reaches would serve short prompts alone.
    """
    values = {"model": str(tiny_model), "dtype": "float32", "kv_bytes": "16M", "roles": "manual"}
    with hosted_cluster(cable, values) as cluster:
        yield cluster


async def _assert_nobody_is_known(cluster: HostedCluster) -> None:
    report = await cluster.wait_until("the controller answers its operator", lambda _: True)
    assert report.workers == ()
    assert report.gateways == ()


async def test_a_key_that_is_not_let_in_is_named_on_both_hosts_and_never_answered(
    light: HostedCluster,
) -> None:
    a, b = light.cable.a, light.cable.b
    stranger = b.folder / "stranger"
    make_keys(stranger)
    light.start(a, "controller")
    program = light.start(b, "decode-0", keys=stranger)
    refused = await light.wait_logged(b, "decode-0", "handshake_refused")
    rejected = await light.wait_logged(a, "controller", "key_rejected")
    key = shown_key(Keys.load(stranger).public)
    assert refused.fact("our_key") == rejected.fact("key") == key
    assert key in (stranger / "node.key").read_text(), "it is shown as its file has it"
    assert "allowed/" in str(refused.fact("reason"))
    await light.wait_logged(b, "decode-0", "waiting_for_controller", number=2)
    await _assert_nobody_is_known(light)
    assert light.logged(b, "decode-0", "registered") == []
    told = [line for line in program.output.splitlines() if line.startswith("notice: ")]
    assert len(told) == 2, "each thing once"
    assert "waiting for the controller at tcp://10.77.0.1:7400" in program.output
    assert f"it does not let our key in: add our node.key to its allowed/ (our_key {key}" in (
        program.output
    )
    assert f"key {key} is turned away" in light.programs["controller"].output
    assert f"--controller '{light.join()}' on other hosts" in light.programs["controller"].output


async def test_a_pair_whose_key_is_not_let_in_is_told_and_serves_once_it_is(
    light: HostedCluster,
) -> None:
    a, b = light.cable.a, light.cable.b
    key_of_a = b.keys / "allowed" / "other.key"
    kept = key_of_a.read_bytes()
    key_of_a.unlink()
    for host, name in ((a, "controller"), (a, "prefill-0"), (a, "gateway-0"), (b, "decode-0")):
        light.start(host, name)
    failed = await light.wait_logged(a, "prefill-0", "pairing_failed")
    assert "allowed/" in str(failed.fact("reason"))
    await light.wait_logged(b, "decode-0", "key_rejected")
    report = await light.wait_until("it is known", lambda one: "allowed/" in one.reason)
    assert not report.is_ready
    pairs = {worker.id: worker.pairs for worker in report.workers}
    assert [(pair.worker_id, pair.transport) for pair in pairs["prefill-0"]] == [("decode-0", "")]
    light.url = report.gateways[0].url
    while (health := await light.http("/health"))["status"] == 200:
        await asyncio.sleep(0.02)  # the gateway learns it with its next heartbeat
    assert (health["status"], "allowed/" in str(health["body"])) == (503, True)
    key_of_a.write_bytes(kept)
    began = monotonic()
    await light.wait_ready("prefill-0", "decode-0")
    assert monotonic() - began < PAIRING_SECONDS, "no pairing was given up first"
    assert len(light.logged(a, "prefill-0", "pairing_failed")) == 1, "told once"
    await light.stop("gateway-0", "prefill-0", "decode-0", "controller")


@pytest.mark.skipif(shutil.which("iptables") is None, reason="there is no iptables")
async def test_a_worker_that_cannot_be_reached_gets_no_requests_and_is_told_of(
    light: HostedCluster,
) -> None:
    a, b = light.cable.a, light.cable.b
    b.run("iptables", "-A", "INPUT", "-p", "tcp", "--syn", "-j", "DROP")
    for name in ("controller", "prefill-0", "gateway-0", "decode-0"):
        light.start(a, name)
    light.start(b, "decode-b")
    await light.wait_ready("prefill-0", "decode-0", "decode-b")

    def is_known(report: StatusReport) -> bool:
        pairs = [pair for worker in report.workers for pair in worker.pairs if pair.reason]
        return [(pair.worker_id, pair.reason) for pair in pairs] == [
            ("decode-b", "not paired within 3 s")
        ]

    report = await light.wait_until("decode-b is known to be unpaired", is_known)
    assert report.is_ready
    began = monotonic()
    body: Json = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    told = await asyncio.gather(*(light.http(TEXT, body) for _ in range(8)))
    assert [one["status"] for one in told] == [200] * 8
    assert monotonic() - began < PAIRING_SECONDS, "nobody waited for it"
    placed = light.logged(a, "controller", "request_placed")
    assert {entry.fact("decode") for entry in placed} == {"decode-0"}
    await light.kill("decode-0")
    light.programs.pop("decode-0")
    report = await light.wait_until("nobody is left", lambda one: not one.is_ready)
    assert report.reason == "prefill-0 cannot hand over to decode-b: not paired within 3 s"


async def test_a_controller_that_does_not_hold_the_named_key_is_told_by_name(
    light: HostedCluster,
) -> None:
    a, b = light.cable.a, light.cable.b
    make_keys(b.folder / "stranger")
    wrong = Keys.load(b.folder / "stranger").public
    address = f"tcp://{a.address}:7400"
    light.start(a, "controller")
    await light.wait_logged(a, "controller", "controller_started")
    light.start(b, "gateway-0", controller=with_key(address, wrong))
    refused = await light.wait_logged(b, "gateway-0", "handshake_refused")
    assert refused.fact("endpoint") == address
    assert refused.fact("its_key") == shown_key(wrong)
    assert "another one than the endpoint names" in str(refused.fact("reason"))
    await _assert_nobody_is_known(light)


async def test_an_address_where_nobody_listens_is_told_again_and_again(
    light: HostedCluster,
) -> None:
    b = light.cable.b
    nobody = light.join().replace(":7400?", ":7999?")
    light.start(b, "decode-0", controller=nobody)
    waiting = await light.wait_logged(b, "decode-0", "waiting_for_controller", number=2)
    assert waiting.fact("endpoint") == nobody
    assert light.logged(b, "decode-0", "handshake_refused") == []
    await light.stop("decode-0")


async def test_a_key_that_is_taken_back_is_refused_by_the_next_controller(
    light: HostedCluster,
) -> None:
    a, b = light.cable.a, light.cable.b
    light.start(a, "controller")
    light.start(b, "gateway-0")
    await light.wait_logged(b, "gateway-0", "registered")
    await light.stop("controller")
    (a.keys / "allowed" / "other.key").unlink()
    light.start(a, "controller")
    rejected = await light.wait_logged(a, "controller", "key_rejected")
    assert rejected.fact("key") == shown_key(Keys.load(b.keys).public)
    await light.wait_logged(b, "gateway-0", "handshake_refused")
    await _assert_nobody_is_known(light)
    assert len(light.logged(b, "gateway-0", "registered")) == 1


async def test_a_second_worker_of_a_name_ends_by_name_and_disturbs_nobody(
    light: HostedCluster,
) -> None:
    a, b = light.cable.a, light.cable.b
    light.start(a, "controller")
    light.start(a, "decode-0")
    await light.wait_logged(a, "decode-0", "registered")
    first = light.programs.pop("decode-0")
    second = light.start(b, "decode-0")
    assert await light.ended("decode-0") == EXIT_CONFIG_ERROR
    assert f"the name decode-0 is taken by {platform.node()} pid {first.popen.pid}" in second.output
    assert "--worker-id" in second.output
    light.programs["decode-0"] = first
    assert len(light.logged(a, "decode-0", "registered")) == 1
    assert light.logged(a, "decode-0", "fenced") == []
    await light.stop("decode-0", "controller")


async def test_a_worker_that_is_killed_on_the_other_host_is_back_after_its_silence(
    light: HostedCluster,
) -> None:
    a, b = light.cable.a, light.cable.b
    light.start(a, "controller")
    light.start(b, "decode-0")
    await light.wait_logged(b, "decode-0", "registered")
    await light.kill("decode-0")
    light.start(b, "decode-0")
    await light.wait_logged(b, "decode-0", "registered", number=2)
    await light.stop("decode-0", "controller")


@pytest.mark.parametrize("name", ["gateway-0", "decode-0"])
async def test_a_host_without_its_key_ends_at_once_and_says_how_to_make_one(
    light: HostedCluster, name: str
) -> None:
    b = light.cable.b
    program = light.start(b, name, keys=b.folder / "nowhere", controller=light.join())
    assert await light.ended(name) == EXIT_CONFIG_ERROR
    assert light.logged(b, name, "worker_built") == []
    assert f"{b.folder}/nowhere/node.key_secret: no such key" in program.output
    assert "flowpath keygen" in program.output


@pytest.mark.parametrize("program", ["controller", "serve", "decode", "prefill", "gateway"])
async def test_nothing_listens_beyond_loopback_without_keys(
    light: HostedCluster, program: str
) -> None:
    a = light.cable.a
    command = [sys.executable, "-m", "services.cli", program, "--cluster-host", a.address]
    started = light.run(a, program, [*command, "--run-dir", str(a.folder / "run")])
    assert await light.ended(program) == EXIT_CONFIG_ERROR
    assert "needs keys: make them with `flowpath keygen FOLDER`" in " ".join(started.output.split())
    assert not (a.folder / "run").exists(), "it was refused before anything was made"


def _is_paired_with_both(report: StatusReport) -> bool:
    (prefill,) = [worker for worker in report.workers if worker.id == "prefill-0"]
    return {pair.worker_id for pair in prefill.pairs if pair.transport} == {"decode-0", "decode-b"}


async def test_the_commands_of_the_manual_join_a_second_host_over_tcp(
    model_folder: Path, split: Cluster, encode: Encode
) -> None:
    with two_hosts() as cable, hosted_cluster(cable, {"model": str(model_folder)}) as cluster:
        a, b = cable.a, cable.b
        flowpath = [sys.executable, "-m", "services.cli"]
        for host in (a, b):
            host.run(*flowpath, "keygen", str(host.keys))
        exchange_keys(cable)
        cluster.run(a, "serve", [*flowpath, "serve", *_flags(cluster, a, model_folder)])
        join = await cluster.wait_printed("serve", "join")
        endpoint = re.search(r"--controller '(.+)' on other hosts", join)
        assert endpoint is not None, f"one line to copy: {join!r}"
        told = ["--controller", endpoint[1], "--worker-id", "decode-b"]
        cluster.run(b, "decode-b", [*flowpath, "decode", *_flags(cluster, b, model_folder), *told])
        await cluster.wait_ready("prefill-0", "decode-0", "decode-b")
        await cluster.wait_printed("decode-b", "notice: registered with the controller")
        await cluster.wait_until("both decode workers are paired with", _is_paired_with_both)
        bodies = [_completion(encode, 200, 7000 + 100 * n, max_tokens=24) for n in range(4)]
        answers = await asyncio.gather(*(cluster.ask(TEXT, body) for body in bodies))
        for body, answer in zip(bodies, answers, strict=True):
            assert answer.choices[0].token_ids == (await split.ask(TEXT, body)).choices[0].token_ids
        paired = {
            entry.fact("peer"): entry.fact("transport")
            for entry in cluster.logged(a, "prefill-0", "paired")
        }
        assert paired == {"decode-0": "shm", "decode-b": "tcp"}
        assert cluster.logged(b, "decode-b", "handoff_accepted"), "the second host decoded"
        _assert_nothing_leaked(await cluster.wait_idle())
        await cluster.stop("decode-b", "serve")


def _flags(cluster: HostedCluster, host: Host, model_folder: Path) -> list[str]:
    """Return what the manual gives every program, and what keeps tests small and apart."""
    return [
        *("--cluster-host", host.address, "--keys", str(host.keys)),
        *("--model", str(model_folder), "--dtype", "float32", "--max-num-batched-tokens", "256"),
        *("--kv-bytes", "256M", "--threads", "1", "--port", "8000", "--store", "none"),
        *("--run-dir", str(cluster.settings_of(host).run_dir), "--log-dir", str(host.log_dir)),
    ]
