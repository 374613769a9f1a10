import socket

import pytest

from common.errors import ConfigError
from services.cli.supervisor.prepare import claim_port, shared_port
from services.gateway.listener import bind_listener

HOST = "127.0.0.1"


def test_gateways_share_a_port_that_their_supervisor_holds():
    port = claim_port(HOST, 0)
    with (
        shared_port(HOST, port),
        bind_listener(HOST, port, is_shared=True) as first,
        bind_listener(HOST, port, is_shared=True) as second,
    ):
        first.setblocking(False)
        second.setblocking(False)
        clients = [socket.create_connection((HOST, port), timeout=5) for _ in range(64)]
        counts = [_num_accepted(listener) for listener in (first, second)]
        for client in clients:
            client.close()
    assert sum(counts) == 64, "the socket that only holds the port must take no connection"
    assert min(counts) > 0, f"one gateway got none of 64 connections: {counts}"


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared by others"])
def test_a_port_that_somebody_else_listens_on_is_refused_by_name(is_shared):
    with (
        bind_listener(HOST, 0, is_shared=is_shared) as others,
        pytest.raises(ConfigError, match=f"port {others.getsockname()[1]} on"),
        shared_port(HOST, others.getsockname()[1]),
    ):
        pass


def test_one_gateway_alone_refuses_a_port_in_use():
    with (
        bind_listener(HOST, 0, is_shared=True) as others,
        pytest.raises(ConfigError, match="in use"),
    ):
        bind_listener(HOST, others.getsockname()[1], is_shared=False)


def _num_accepted(listener: socket.socket) -> int:
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1
