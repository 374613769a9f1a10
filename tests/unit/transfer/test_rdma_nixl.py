"""The adapter to NIXL, with a stand-in for NIXL's own module, and what is offered without it."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.errors import ConfigError, TransferError
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.transfer import nixl_packages, rdma_nixl
from common.transfer.rdma_agent import MemoryKind, SourcePool
from common.transfer.rdma_memory import SCRATCH_BYTES, RdmaMemory
from common.transfer.rdma_nixl import NixlAgent
from common.transfer.rdma_ports import fastest_port_rate
from common.worker import transports
from common.worker.transports import open_transports

# ---- a stand-in for NIXL -------------------------------------------------------------------------


class nixlBackendError(Exception):  # noqa: N801 - NIXL's own name
    pass


class Bindings:
    nixlBackendError = nixlBackendError  # noqa: N815 - NIXL's own name


@dataclass
class Config:
    enable_prog_thread: bool
    backends: list[str]


@dataclass(eq=False)
class Inner:
    num_turns: int = 0

    def getNotifs(self, known: dict[str, list[bytes]], backends: list[str]) -> None:  # noqa: N802
        self.num_turns += 1


@dataclass(eq=False)
class ScriptedAgent:
    """NIXL's agent: says what a test tells it to."""

    name: str
    config: Config
    backends: dict[str, int] = field(default_factory=lambda: {"UCX": 1})
    registered: list[tuple[int, int, int, str]] = field(default_factory=list)
    began: list[tuple[str, object, object, str]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    failing: str = ""
    agent: Inner = field(default_factory=Inner)

    def register_memory(
        self, regions: list[tuple[int, int, int, str]], segment: str, backends: list[str]
    ) -> None:
        self._may_fail("register")
        self.registered += regions
        self.segment = segment

    def get_agent_metadata(self) -> bytes:
        return b"about " + self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._may_fail("add")
        return metadata.removeprefix(b"about ")

    def remove_remote_agent(self, name: str) -> None:
        self._may_fail("remove")

    def get_xfer_descs(self, pieces: list[tuple[int, int, int]], segment: str) -> object:
        return (segment, pieces)

    def initialize_xfer(
        self, operation: str, own: object, theirs: object, name: str, note: bytes, *,
        backends: list[str],
    ) -> int:  # fmt: skip
        self._may_fail("initialize")
        self.began.append((operation, own, theirs, name))
        return len(self.began)

    def transfer(self, handle: int) -> str:
        self._may_fail("transfer")
        return self.states.pop(0)

    check_xfer_state = transfer

    def release_xfer_handle(self, handle: int) -> None:
        self._may_fail("release")
        self.released.append(handle)

    def _may_fail(self, call: str) -> None:
        if self.failing == call:
            raise nixlBackendError(f"{call} went wrong")


class Api:
    nixlBind = Bindings  # noqa: N815 - NIXL's own name
    nixl_agent_config = Config

    def __init__(self) -> None:
        self.agents: list[ScriptedAgent] = []
        self.failing = ""

    def nixl_agent(self, name: str, config: Config) -> ScriptedAgent:
        self.agents.append(ScriptedAgent(name, config, failing=self.failing))
        return self.agents[-1]


MEMORY = RdmaMemory(MemoryKind.GPU, 2, 4096, 3, 8192, ((4096, 32768),), (28672, 8192))
SOURCE = SourcePool(MemoryKind.HOST, 0, 50_000, 9, b"about peer")


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def agent(api: Api) -> NixlAgent:
    return NixlAgent(api, MEMORY)


def test_an_agent_registers_the_memory_once_and_runs_no_thread(api: Api, agent: NixlAgent) -> None:
    (inner,) = api.agents
    assert inner.registered == [(4096, 32768, 2, "")]
    assert inner.segment == "VRAM"
    assert inner.config == Config(enable_prog_thread=False, backends=["UCX"])
    assert agent.metadata == b"about " + inner.name.encode()
    NixlAgent(api, MEMORY)
    assert api.agents[1].name != inner.name
    agent.progress()
    assert inner.agent.num_turns == 1


def test_a_read_names_both_sides_memory_and_is_let_go_once_it_is_done(
    api: Api, agent: NixlAgent
) -> None:
    (inner,) = api.agents
    inner.states = ["PROC", "PROC", "DONE"]
    name = agent.connect(b"about peer")
    read = agent.read(name, SOURCE, [(4096, 50_000, 8192), (20_480, 90_000, 4096)])
    assert inner.began == [
        (
            "READ",
            ("VRAM", [(4096, 8192, 2), (20_480, 4096, 2)]),
            ("DRAM", [(50_000, 8192, 0), (90_000, 4096, 0)]),
            "peer",
        )
    ]
    assert not read.is_done()
    assert inner.released == []
    assert read.is_done()
    assert read.is_done()
    assert inner.released == [1]


def test_a_read_that_failed_says_so_every_time_and_is_kept_until_the_agent_ends(
    api: Api, agent: NixlAgent
) -> None:
    (inner,) = api.agents
    inner.states = ["PROC", "ERR"]
    read = agent.read(agent.connect(b"about peer"), SOURCE, [(4096, 50_000, 8192)])
    for _ in range(2):
        with pytest.raises(TransferError, match="NIXL's read failed: ERR"):
            read.is_done()
    assert inner.released == []
    agent.close()
    assert inner.released == [1]


@pytest.mark.parametrize("call", ["add", "initialize"])
def test_what_nixl_refuses_is_the_transfers_error(api: Api, agent: NixlAgent, call: str) -> None:
    api.agents[0].failing = call
    with pytest.raises(TransferError, match=f"{call} went wrong"):
        agent.read(agent.connect(b"about peer"), SOURCE, [(4096, 50_000, 8192)])


def test_a_request_that_fails_as_it_is_begun_may_be_under_way(api: Api, agent: NixlAgent) -> None:
    api.agents[0].failing = "transfer"
    read = agent.read("peer", SOURCE, [(4096, 50_000, 8192)])
    with pytest.raises(TransferError, match="transfer went wrong"):
        read.is_done()
    assert api.agents[0].released == []


def test_a_peer_that_is_gone_is_forgotten_without_a_word(api: Api, agent: NixlAgent) -> None:
    api.agents[0].failing = "remove"
    agent.forget("peer")


def test_an_agent_that_keeps_a_request_has_not_ended(api: Api, agent: NixlAgent) -> None:
    (inner,) = api.agents
    inner.states = ["PROC"]
    agent.read("peer", SOURCE, [(4096, 50_000, 8192)])
    inner.failing = "release"
    with pytest.raises(RuntimeError, match="does not let go"):
        agent.close()


def test_a_pool_that_cannot_be_registered_is_told_of(api: Api) -> None:
    api.failing = "register"
    with pytest.raises(TransferError, match="cannot register the KV pool: register went wrong"):
        NixlAgent(api, MEMORY)


# ---- pools and adapters --------------------------------------------------------------------------


def test_a_pool_in_host_memory_is_registered_whole_and_probes_have_room_beside_it() -> None:
    pool = KVPool(3, 8192)
    memory = RdmaMemory.of_pool(pool)
    assert (memory.kind, memory.num_blocks, memory.block_bytes) == (MemoryKind.HOST, 3, 8192)
    assert memory.regions == ((memory.address, 3 * 8192), memory.scratch)
    assert memory.scratch[1] == SCRATCH_BYTES
    pool.close()


def lay_port(folder: Path, adapter: str, state: str, rate: str) -> None:
    port = folder / adapter / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    (port / "rate").write_text(rate)


def test_the_fastest_active_port_counts(tmp_path: Path) -> None:
    assert fastest_port_rate(tmp_path / "none") == 0
    lay_port(tmp_path, "mlx5_0", "4: ACTIVE\n", "100 Gb/sec (4X EDR)\n")
    lay_port(tmp_path, "mlx5_1", "1: DOWN\n", "400 Gb/sec (4X NDR)\n")
    lay_port(tmp_path, "mlx5_2", "4: ACTIVE\n", "unknown\n")
    assert fastest_port_rate(tmp_path) == 12.5
    lay_port(tmp_path, "mlx5_3", "4: ACTIVE\n", "200 Gb/sec (4X HDR)\n")
    assert fastest_port_rate(tmp_path) == 25.0


# ---- what a worker offers ------------------------------------------------------------------------


@pytest.fixture
def pool() -> KVPool:
    return KVPool(4, 4096)


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nixl_packages, rdma_nixl):
        monkeypatch.setattr(module, "PACKAGES", ("no_such_nixl",))


@pytest.mark.usefixtures("without_nixl")
def test_pools_of_a_host_in_memory_of_two_kinds_meet_over_tcp_alone(pool: KVPool) -> None:
    layout = KVLayout(num_layers=1, block_size=8, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    for is_mixed, names in ((False, ("ranks", "shm")), (True, ("shm", "tcp"))):
        offered = open_transports(pool, 5.0, "auto", "", layout=layout, is_mixed=is_mixed)
        assert sorted(offered.names) == sorted(names)
        offered.close()
    pool.close()


@pytest.mark.usefixtures("without_nixl")
def test_without_nixl_rdma_is_not_offered_and_forcing_it_says_how_to_install_it(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "fastest_port_rate", lambda: 25.0)
    offered = open_transports(pool, 5.0, "auto", "127.0.0.1")
    assert offered.names == ("shm", "tcp")
    offered.close()
    with pytest.raises(ConfigError, match=r"needs NIXL; install it with `.venv/bin/pip install"):
        open_transports(pool, 5.0, "rdma", "")
    pool.close()


def test_a_broken_nixl_is_told_of_and_costs_no_other_transport(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_nixl").mkdir()
    (tmp_path / "broken_nixl" / "__init__.py").touch()
    (tmp_path / "broken_nixl" / "_api.py").write_text("raise ImportError('no libucp.so')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rdma_nixl, "PACKAGES", ("broken_nixl",))
    monkeypatch.setattr(transports, "fastest_port_rate", lambda: 25.0)
    offered = open_transports(pool, 5.0, "auto", "127.0.0.1")
    assert offered.names == ("shm", "tcp")
    offered.close()
    with pytest.raises(ConfigError, match=r"NIXL does not load: no libucp\.so"):
        open_transports(pool, 5.0, "rdma", "")
    pool.close()


@pytest.mark.parametrize(
    ("port_rate", "host", "names"),
    [
        (25.0, "127.0.0.1", ("shm", "rdma", "tcp")),
        (0.0, "127.0.0.1", ("shm", "tcp")),
        (25.0, "", ("shm",)),
    ],
)
def test_rdma_is_offered_where_an_adapter_is_and_peers_may_be_elsewhere(
    pool: KVPool,
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    port_rate: float,
    host: str,
    names: tuple[str, ...],
) -> None:
    monkeypatch.setattr(rdma_nixl, "_import_nixl", lambda: api)
    monkeypatch.setattr(transports, "is_nixl_installed", lambda: True)
    monkeypatch.setattr(transports, "fastest_port_rate", lambda: port_rate)
    offered = open_transports(pool, 5.0, "auto", host)
    assert offered.names == names
    offered.close()
    pool.close()
