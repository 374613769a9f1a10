"""What a default cluster listens on: the HTTP port on loopback, and nothing else."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from tests.support.listeners import Listener, listeners_of
from tests.support.served import client_of, serving
from tests.support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.e2e


def test_the_list_of_listeners_sees_every_kind_of_them() -> None:
    """Else the test below could not fail."""
    before = set(listeners_of([os.getpid()]))
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as tcp6,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("0.0.0.0", 0))
        found = set(listeners_of([os.getpid()])) - before
        ports = [opened.getsockname()[1] for opened in (tcp, tcp6, udp)]
    assert found == {
        Listener(os.getpid(), "tcp", "127.0.0.1", ports[0]),
        Listener(os.getpid(), "tcp6", "::1", ports[1]),
        Listener(os.getpid(), "udp", "0.0.0.0", ports[2]),
    }


async def test_a_default_cluster_listens_on_the_http_port_of_loopback_alone(
    tmp_path: Path, model_folder: Path
) -> None:
    write_tiny_llama(tmp_path / "tiny", model_folder)
    async with serving({"model": str(tmp_path / "tiny")}) as served:
        async with client_of(served) as client:
            await client.ask("/v1/completions", {"prompt": "once", "max_tokens": 4})
            held = served.footprint()
            assert len(held.pids) == 5, "supervisor, controller, two workers, gateway"
            found = await asyncio.to_thread(listeners_of, held.pids)
        assert [(one.protocol, one.address, one.port) for one in found] == [
            ("tcp", "127.0.0.1", served.settings.port)
        ]
        served.interrupt()
        assert await served.ended() == 0
