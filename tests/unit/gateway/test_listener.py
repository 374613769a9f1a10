import selectors
import socket

import pytest

from common.errors import ConfigError
from services.cli.supervisor.prepare import claim_port, shared_port
from services.gateway.listener import bind_listener
from tests.support.held_port import held_port

HOST = "127.0.0.1"
SECONDS = 30.0


def test_gateways_share_a_port_that_their_supervisor_holds():
    with (
        held_port(HOST) as port,
        shared_port(HOST, port),
        bind_listener(HOST, port, is_shared=True) as first,
        bind_listener(HOST, port, is_shared=True) as second,
    ):
        clients = [socket.create_connection((HOST, port), timeout=SECONDS) for _ in range(64)]
        counts = _nums_accepted([first, second], len(clients))
        for client in clients:
            client.close()
    assert sum(counts) == 64, "the socket that only holds the port must take no connection"
    assert min(counts) > 0, f"one gateway got none of 64 connections: {counts}"


def test_a_free_port_can_be_claimed_by_its_number_or_by_none():
    with held_port(HOST) as port:
        assert claim_port(HOST, port) == port
    assert claim_port(HOST, 0) > 0


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


def _nums_accepted(listeners: list[socket.socket], total: int) -> list[int]:
    """Accept so many connections in all; fewer where no more come for long."""
    counts = [0] * len(listeners)
    with selectors.DefaultSelector() as selector:
        for number, listener in enumerate(listeners):
            selector.register(listener, selectors.EVENT_READ, number)
        while sum(counts) < total and (ready := selector.select(SECONDS)):
            for key, _ in ready:
                listeners[key.data].accept()[0].close()
                counts[key.data] += 1
    return counts
