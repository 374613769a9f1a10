"""Transport ``rdma`` on NIXL, which finds a way between two pools with UCX.

The one module that imports NIXL. No thread of its own runs: NIXL's progress thread would take much
of a core from the engine all the time, so work moves on when somebody who waits for it looks. UCX's
own environment variables hold, such as which adapters and transports it uses.
"""

import secrets
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

# NIXL has no types: its objects are Any throughout this file.
from typing import Any

from common.config.environment import environment
from common.errors import ConfigError, TransferError
from common.transfer.nixl_packages import HOW_TO_INSTALL, PACKAGES
from common.transfer.rdma_agent import MemoryKind, Piece, SourcePool
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_ports import fastest_port_rate

BACKEND = "UCX"
_SEGMENTS = {MemoryKind.HOST: "DRAM", MemoryKind.GPU: "VRAM"}


class NixlRead:
    """One transfer request. Its handle lives until all is there, or with the agent: letting go of
    it would end nothing, and NIXL may tell of a failure while other parts are under way.
    """

    def __init__(self, agent: "NixlAgent", handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def is_done(self) -> bool:
        """Whether all bytes are there (see ``Read``)."""
        if self._state == "PROC":
            self._state = self._agent.state_of(self._handle)
        if self._state == "PROC":
            return False
        if self._state != "DONE":
            raise TransferError(f"NIXL's read failed: {self._state}")
        self.drop()
        return True

    def drop(self) -> None:
        """Let go of the handle; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._agent.drop(self, handle)


class NixlAgent:
    """``RdmaAgent`` on NIXL."""

    def __init__(self, api: Any, memory: RdmaMemory) -> None:
        bindings = api.nixlBind
        self._errors = tuple(
            error
            for name in dir(bindings)
            if name.startswith("nixl") and name.endswith("Error")
            for error in [getattr(bindings, name)]
        )
        self._memory = memory
        self._reads: set[NixlRead] = set()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
        try:
            self._agent = api.nixl_agent(f"flowpath-{secrets.token_hex(8)}", config)
            if BACKEND not in self._agent.backends:
                raise TransferError(f"this build of NIXL has no {BACKEND}")
            regions = [(*region, memory.device, "") for region in memory.regions]
            self._agent.register_memory(regions, _SEGMENTS[memory.kind], backends=[BACKEND])
            self.metadata: bytes = self._agent.get_agent_metadata()
        except (*self._errors, RuntimeError) as error:
            raise TransferError(f"NIXL cannot register the KV pool: {error}") from error

    def connect(self, metadata: bytes) -> str:
        """Take a peer's metadata (see ``RdmaAgent``)."""
        try:
            name: bytes = self._agent.add_remote_agent(metadata)
        except (*self._errors, RuntimeError) as error:
            raise TransferError(f"NIXL cannot use the peer's metadata: {error}") from error
        return name.decode("utf-8", "replace")

    def forget(self, name: str) -> None:
        """Let go of a peer."""
        try:
            self._agent.remove_remote_agent(name)
        except self._errors:
            return  # it was gone

    def read(self, name: str, source: SourcePool, pieces: Sequence[Piece]) -> NixlRead:
        """Begin one transfer request for all pieces."""
        agent, device = self._agent, self._memory.device
        own = [(to, num_bytes, device) for to, _, num_bytes in pieces]
        theirs = [(at, num_bytes, source.device) for _, at, num_bytes in pieces]
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(own, _SEGMENTS[self._memory.kind]),
                agent.get_xfer_descs(theirs, _SEGMENTS[source.kind]),
                name,
                b"",
                backends=[BACKEND],
            )
        except self._errors as error:
            raise TransferError(f"NIXL cannot read from the peer: {error}") from error
        try:
            state: str = agent.transfer(handle)
        except self._errors as error:
            state = str(error)
        read = NixlRead(self, handle, state)
        self._reads.add(read)
        return read

    def progress(self) -> None:
        """Do our part of what peers do with our memory: asking for news does it."""
        try:
            self._agent.agent.getNotifs({}, [])
        except self._errors as error:
            raise TransferError(f"NIXL: {error}") from error

    def close(self) -> None:
        """Let go of everything that holds the agent; with the last of it goes UCX's worker."""
        for read in list(self._reads):
            read.drop()
        del self._agent

    def state_of(self, handle: Any) -> str:
        """Return a request's state: PROC, DONE, or what went wrong."""
        try:
            state: str = self._agent.check_xfer_state(handle)
        except self._errors as error:
            return str(error)
        return state

    def drop(self, read: NixlRead, handle: Any) -> None:
        """Let go of a request."""
        self._reads.discard(read)
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            raise RuntimeError(f"NIXL does not let go of a request: {error}") from error


class NixlLibrary:
    """``RdmaLibrary`` on NIXL. ConfigError where NIXL is missing or does not load."""

    def __init__(self, memory: RdmaMemory) -> None:
        environment.setdefault("NIXL_LOG_LEVEL", "ERROR")
        environment.setdefault("UCX_LOG_LEVEL", "error")
        self._memory = memory
        self._api = _import_nixl()
        self.port_rate = fastest_port_rate()

    def new_agent(self) -> NixlAgent:
        """Register the memory with a new agent (see ``RdmaLibrary``)."""
        return NixlAgent(self._api, self._memory)


def _import_nixl() -> Any:
    for package in PACKAGES:
        if find_spec(package) is None:
            continue
        try:
            return import_module(f"{package}._api")
        except (ImportError, OSError) as error:
            raise ConfigError(f"transport rdma: NIXL does not load: {error}") from error
    raise ConfigError(f"transport rdma needs NIXL; {HOW_TO_INSTALL}")
