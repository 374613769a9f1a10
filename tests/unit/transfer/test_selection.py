from dataclasses import replace

import pytest

from common.ids import Epoch, WorkerId
from common.messages.fields import PeerInfo, Role
from common.transfer.cuda_ipc import CUDA_IPC, GATHER_BUFFER, LAYERWISE
from common.transfer.local import LocalBackend
from common.transfer.ranks_transport import RANKS
from common.transfer.rdma import RDMA
from common.transfer.selection import (
    COMPARISONS,
    PREFERENCE,
    TransportChosen,
    TransportRefused,
    select_transport,
)
from common.transfer.shm import ShmBackend
from common.transfer.tcp import TcpBackend

OWN = PeerInfo(
    worker_id=WorkerId("prefill-0"),
    epoch=Epoch(1),
    role=Role.PREFILL,
    pid=10,
    host="alpha",
    handoff_endpoint="ipc:///run/p",
    dtype="float32",
    layout_fingerprint="0" * 16,
    transports=("local", "shm"),
)
PEER = replace(OWN, worker_id=WorkerId("decode-0"), epoch=Epoch(2), role=Role.DECODE, pid=11)


def test_every_transport_has_a_backend_and_a_place_in_the_order() -> None:
    names = (LocalBackend.name, CUDA_IPC, ShmBackend.name, RANKS, RDMA, "nccl", TcpBackend.name)
    assert names == PREFERENCE
    assert COMPARISONS == (LAYERWISE, GATHER_BUFFER)


def test_workers_of_different_numbers_of_ranks_meet_over_their_ranks() -> None:
    split = replace(OWN, transports=("ranks",))
    near = replace(PEER, transports=("shm", "ranks"))
    chosen = select_transport(split, near)
    assert isinstance(chosen, TransportChosen)
    assert chosen.name == "ranks"
    assert isinstance(select_transport(split, replace(near, host="beta")), TransportRefused)


def test_a_worker_and_itself_share_their_pool() -> None:
    chosen = select_transport(OWN, OWN)
    assert isinstance(chosen, TransportChosen)
    assert chosen.name == "local"


def test_two_workers_of_one_host_use_shared_memory() -> None:
    assert select_transport(OWN, PEER) == TransportChosen(
        "shm", "best that both sides report; here [local, shm], there [local, shm]"
    )


def test_workers_of_two_hosts_use_tcp_where_both_offer_it() -> None:
    own = replace(OWN, transports=("shm", "tcp"))
    chosen = select_transport(own, replace(PEER, host="beta", transports=("shm", "tcp")))
    assert isinstance(chosen, TransportChosen)
    assert chosen.name == "tcp"
    near = select_transport(own, replace(PEER, transports=("shm", "tcp")))
    assert isinstance(near, TransportChosen)
    assert near.name == "shm", "shared memory is better within a host"


def test_workers_with_pools_on_gpus_map_each_others_memory_within_a_host() -> None:
    own, peer = (replace(side, transports=("cuda_ipc", "nccl", "tcp")) for side in (OWN, PEER))
    near = select_transport(own, peer)
    assert isinstance(near, TransportChosen)
    assert near.name == "cuda_ipc"
    far = select_transport(own, replace(peer, host="beta"))
    assert isinstance(far, TransportChosen)
    assert far.name == "nccl"


def test_adapters_join_two_hosts_where_both_have_them_and_nothing_within_one() -> None:
    own, peer = (replace(side, transports=("shm", "rdma", "nccl", "tcp")) for side in (OWN, PEER))
    near = select_transport(own, peer)
    assert isinstance(near, TransportChosen)
    assert near.name == "shm"
    far = select_transport(own, replace(peer, host="beta"))
    assert isinstance(far, TransportChosen)
    assert far.name == "rdma"
    without = select_transport(own, replace(peer, host="beta", transports=("shm", "tcp")))
    assert isinstance(without, TransportChosen)
    assert without.name == "tcp"


def test_a_pool_on_a_gpu_and_one_on_the_host_meet_where_both_offer_the_same() -> None:
    own = replace(OWN, transports=("cuda_ipc",))
    refused = select_transport(own, PEER)
    assert isinstance(refused, TransportRefused)
    assert "cuda_ipc: decode-0 does not offer it" in refused.message


def test_a_transport_for_comparison_is_chosen_where_both_sides_are_told_to_offer_it() -> None:
    own, peer = (replace(side, transports=("layerwise",)) for side in (OWN, PEER))
    chosen = select_transport(own, peer)
    assert isinstance(chosen, TransportChosen)
    assert chosen.name == "layerwise"
    far = select_transport(own, replace(peer, host="beta"))
    assert isinstance(far, TransportRefused)


def test_a_restarted_worker_with_the_same_pid_is_not_the_same_process() -> None:
    chosen = select_transport(OWN, replace(OWN, epoch=Epoch(9)))
    assert isinstance(chosen, TransportChosen)
    assert chosen.name == "shm"


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (replace(PEER, host="beta"), "shm: the workers are on different hosts"),
        (replace(PEER, transports=("local",)), "shm: decode-0 does not offer it"),
        (replace(PEER, transports=()), "local: decode-0 does not offer it"),
    ],
)
def test_a_pair_that_nothing_joins_is_refused_with_both_lists(peer: PeerInfo, why: str) -> None:
    refused = select_transport(OWN, peer)
    assert isinstance(refused, TransportRefused)
    assert refused.field == "transports"
    assert refused.expected == "[local, shm] on host alpha"
    assert refused.actual == f"[{', '.join(peer.transports)}] on host {peer.host}"
    assert why in refused.message
    assert refused.expected.split(" on ")[0] in refused.message
    assert refused.actual.split(" on ")[0] in refused.message


def test_a_forced_transport_is_used_even_where_a_better_one_exists() -> None:
    chosen = select_transport(OWN, OWN, forced="shm")
    assert isinstance(chosen, TransportChosen)
    assert chosen.name == "shm"
    assert chosen.reason.startswith("forced")


@pytest.mark.parametrize(
    ("forced", "why"),
    [
        ("local", "local: the workers are different processes"),
        (
            "pigeon",
            (
                "pigeon: unknown; there are local, cuda_ipc, shm, ranks, rdma, nccl, tcp,"
                " layerwise, gather_buffer"
            ),
        ),
    ],
)
def test_a_forced_transport_that_cannot_work_is_refused_and_never_replaced(
    forced: str, why: str
) -> None:
    refused = select_transport(OWN, PEER, forced=forced)
    assert isinstance(refused, TransportRefused)
    assert refused.message.endswith(why)
    assert refused.expected.endswith(f"forced {forced}")
