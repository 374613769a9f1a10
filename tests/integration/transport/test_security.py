"""CURVE on TCP: who gets in, who is told why not, and what never happens without keys."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.errors import ConfigError
from common.ids import Epoch
from common.messages.codec import Codec
from common.messages.control import (
    ControllerToWorker,
    Goodbye,
    HeartbeatAnswered,
    WorkerToController,
)
from common.transport import security, sockets
from common.transport.channels import CONTROL
from common.transport.security import (
    ALLOWED_NAME,
    PUBLIC_NAME,
    SECRET_NAME,
    Keys,
    make_keys,
    read_public_key,
    shown_key,
    split_key,
    with_key,
)
from common.transport.sockets import Context, DealerLink, Identity, RouterHub, new_context

DEADLINE_SECONDS = 10.0
Up: Codec[WorkerToController] = Codec(WorkerToController)
Down: Codec[ControllerToWorker] = Codec(ControllerToWorker)
WORKER = ("worker-0", Epoch(7))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    make_keys(tmp_path / "here")
    return Keys.load(tmp_path / "here")


@pytest.fixture
def stranger(tmp_path: Path) -> Keys:
    make_keys(tmp_path / "there")
    return Keys.load(tmp_path / "there")


Hub = RouterHub[ControllerToWorker, WorkerToController]
Link = DealerLink[WorkerToController, ControllerToWorker]
opened: list[Hub | Link] = []


@pytest.fixture
async def contexts() -> AsyncIterator[list[Context]]:
    made: list[Context] = []
    yield made
    while opened:
        opened.pop().close()
    for context in made:
        context.destroy(linger=0)


def hub_of(context: Context) -> Hub:
    identity = Identity("controller", Epoch(1))
    hub: Hub = RouterHub(context, CONTROL, "tcp://127.0.0.1:0", identity, Down, Up)
    opened.append(hub)
    return hub


def link_of(context: Context, endpoint: str) -> Link:
    link: Link = DealerLink(context, CONTROL, endpoint, Identity(*WORKER), Up, Down)
    opened.append(link)
    return link


async def first_of(messages: AsyncIterator[object]) -> object:
    """Wait for one message."""
    return await anext(messages)


async def test_a_key_in_the_allow_list_speaks_both_ways(
    keys: Keys, contexts: list[Context]
) -> None:
    contexts += [new_context(keys), new_context(keys)]
    hub = hub_of(contexts[0])
    link = link_of(contexts[1], hub.endpoint)
    link.try_send(Goodbye(reason="hello"), "test")
    async with asyncio.timeout(DEADLINE_SECONDS):
        first = await anext(hub.received())
        assert first.message == Goodbye(reason="hello")
        assert hub.try_send(WORKER, HeartbeatAnswered(sequence=3), "test")
        assert (await anext(link.received())).message == HeartbeatAnswered(sequence=3)


@pytest.mark.parametrize("wrong", ["client's", "server's"])
async def test_a_wrong_key_is_never_answered_and_the_log_says_which(
    keys: Keys, stranger: Keys, contexts: list[Context], wrong: str
) -> None:
    contexts += [new_context(keys), new_context(stranger if wrong == "client's" else keys)]
    hub = hub_of(contexts[0])
    address, server = split_key(hub.endpoint)
    assert server == keys.public
    named = hub.endpoint if wrong == "client's" else with_key(address, stranger.public)
    link = link_of(contexts[1], named)
    link.try_send(Goodbye(reason="hello"), "test")
    with capture_logs() as logs:
        async with asyncio.TaskGroup() as tasks:
            receiving = [
                tasks.create_task(first_of(hub.received())),
                tasks.create_task(first_of(link.received())),
            ]
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not any(log["event"] == "handshake_refused" for log in logs):
                    await asyncio.sleep(0.02)
            assert not any(task.done() for task in receiving), "somebody got a message"
            for task in receiving:
                task.cancel()
    refused = [log for log in logs if log["event"] == "handshake_refused"]
    expected = "let our key in" if wrong == "client's" else "its key may be another one"
    assert any(expected in log["reason"] for log in refused), refused
    if wrong == "client's":
        rejected = [log["key"] for log in logs if log["event"] == "key_rejected"]
        assert set(rejected) == {shown_key(stranger.public)}, "the binder names the key"
        assert refused[0]["our_key"] == rejected[0]
    else:
        assert refused[0]["its_key"] == shown_key(stranger.public)


async def test_a_key_that_is_let_in_later_speaks_from_then_on(
    keys: Keys, stranger: Keys, contexts: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "REFUSED_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(security, "READ_AGAIN_SECONDS", 0.1)
    contexts += [new_context(keys), new_context(stranger)]
    hub = hub_of(contexts[0])
    link = link_of(contexts[1], hub.endpoint)
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(DEADLINE_SECONDS):
        answers = tasks.create_task(first_of(link.received()))
        while link.num_connects < 3:  # asked again, and refused again
            await asyncio.sleep(0.02)
        assert "let our key in" in str(link.refusal)
        shutil.copy(stranger.folder / PUBLIC_NAME, keys.folder / ALLOWED_NAME / "later.key")
        heard = tasks.create_task(first_of(hub.received()))
        while not heard.done():
            link.try_send(Goodbye(reason="hello"), "test")
            await asyncio.sleep(0.02)
        assert hub.try_send(WORKER, HeartbeatAnswered(sequence=3), "test")
        await answers
        num_connects = link.num_connects
        await asyncio.sleep(2 * sockets.REFUSED_AGAIN_SECONDS)
        assert link.try_send(Goodbye(reason="again"), "test")
        assert link.refusal is None
        assert link.num_connects == num_connects, "it is connected"


async def test_tcp_without_keys_is_refused_on_both_sides(
    keys: Keys, contexts: list[Context]
) -> None:
    contexts.append(new_context())
    with pytest.raises(ConfigError, match=r"needs keys.*flowpath keygen"):
        hub_of(contexts[0])
    with pytest.raises(ConfigError, match="needs keys"):
        link_of(contexts[0], with_key("tcp://127.0.0.1:9", keys.public))


async def test_a_tcp_endpoint_without_a_key_is_refused(keys: Keys, contexts: list[Context]) -> None:
    contexts.append(new_context(keys))
    with pytest.raises(ConfigError, match="names no key"):
        link_of(contexts[0], "tcp://127.0.0.1:9")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:9",
        with_key("tcp://no host:1", bytes(32)),
        with_key("tcp://127.0.0.1:notaport", bytes(32)),
        "ipc:///" + "x" * 200,
        "ipc://",
    ],
)
async def test_an_endpoint_that_a_peer_told_wrongly_harms_nobody_else(
    keys: Keys, contexts: list[Context], endpoint: str
) -> None:
    contexts.append(new_context(keys))
    identity = Identity(*WORKER)
    with pytest.raises(ConfigError, match=r"cannot connect|names no key|longer than"):
        DealerLink(contexts[0], CONTROL, endpoint, identity, Up, Down)
    with capture_logs() as logs:
        link: Link = DealerLink.to_peer(contexts[0], CONTROL, endpoint, identity, Up, Down)
    assert link.endpoint == endpoint, "a repeat of it is recognized"
    assert not link.try_send(Goodbye(reason="hello"), "test")
    assert [received async for received in link.received()] == []
    link.close()
    assert [entry["event"] for entry in logs] == ["endpoint_unusable"]


async def test_a_port_in_use_is_a_configuration_error_that_names_it(
    keys: Keys, contexts: list[Context]
) -> None:
    contexts.append(new_context(keys))
    address, _ = split_key(hub_of(contexts[0]).endpoint)
    with pytest.raises(ConfigError, match=f"cannot bind control to {address}"):
        RouterHub(contexts[0], CONTROL, address, Identity("other", Epoch(2)), Down, Up)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path)
    with pytest.raises(ConfigError, match="it is kept"):
        make_keys(tmp_path)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / SECRET_NAME).chmod(0o640)
    with pytest.raises(ConfigError, match="others can read this secret; chmod 600"):
        Keys.load(tmp_path)


def test_a_missing_or_broken_key_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such key; make one with"):
        Keys.load(tmp_path)
    make_keys(tmp_path)
    (tmp_path / ALLOWED_NAME / "other.key").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"other\.key: not a key file"):
        Keys.load(tmp_path)


def test_the_public_key_is_what_others_allow(tmp_path: Path) -> None:
    public = make_keys(tmp_path)
    assert public.name == PUBLIC_NAME
    keys = Keys.load(tmp_path)
    assert keys.allowed == {read_public_key(public)} == {keys.public}
    assert replace(keys, allowed=frozenset()) != keys
