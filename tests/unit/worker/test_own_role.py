"""A worker's role: what orders change, and what its hello and envelopes tell."""

from dataclasses import replace

from common.ids import Epoch, WorkerId
from common.messages.control import SwitchRole, WorkerHello
from common.messages.fields import PeerInfo, Role
from common.transport.sockets import Identity
from common.worker.known_peers import KnownPeers
from common.worker.own_role import OwnRole
from tests.support.message_builders import an_example
from tests.support.running_worker import peer_info


def info_of(name: str, role: Role) -> PeerInfo:
    return peer_info(name, role, Identity(name, Epoch(7)), "ipc:///tmp/x")


def own_role(role: Role) -> tuple[OwnRole, Identity]:
    identity = Identity("decode-0", Epoch(7))
    hello = replace(an_example(WorkerHello), peer=info_of("decode-0", role))
    return OwnRole(identity, hello), identity


def test_a_newer_order_changes_the_role_in_hello_and_envelope() -> None:
    own, identity = own_role(Role.DECODE)
    own.take(Role.DECODE, 1)
    before = own.hello
    assert own.switch(SwitchRole(role=Role.PREFILL, role_generation=2))
    assert (own.role, own.generation) == (Role.PREFILL, 2)
    assert identity.envelope("x").role_generation == 2
    assert own.info.role is Role.PREFILL
    assert replace(own.hello, peer=before.peer) == before
    assert replace(own.info, role=Role.DECODE) == before.peer


def test_a_stale_order_changes_nothing() -> None:
    own, identity = own_role(Role.DECODE)
    own.take(Role.DECODE, 3)
    for generation in (0, 2, 3):
        assert not own.switch(SwitchRole(role=Role.PREFILL, role_generation=generation))
    assert (own.role, own.generation) == (Role.DECODE, 3)
    assert identity.role_generation == 3


def test_peers_are_known_with_their_newest_role_until_they_leave() -> None:
    peers = KnownPeers()
    peers.replace((info_of("a", Role.DECODE), info_of("b", Role.PREFILL)))
    assert names(peers, Role.DECODE) == ["a"]
    peers.add(info_of("b", Role.DECODE))
    assert names(peers, Role.DECODE) == ["a", "b"]
    peers.discard(WorkerId("a"), Epoch(7))
    peers.discard(WorkerId("nobody"), Epoch(7))
    assert names(peers, Role.DECODE) == ["b"]
    peers.replace(())
    assert names(peers, Role.DECODE) == names(peers, Role.PREFILL) == []


def names(peers: KnownPeers, role: Role) -> list[str]:
    return [info.worker_id for info in peers.of_role(role)]
