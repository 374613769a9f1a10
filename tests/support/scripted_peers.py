"""The other side of a handoff, played word by word by a test."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import numpy as np

from common.ids import Epoch, RequestId, TransferId, new_epoch
from common.kv.pool import KVPool
from common.messages.codec import Codec
from common.messages.fields import Role
from common.messages.handoff import (
    Abort,
    Aborted,
    AbortReason,
    Commit,
    DecodeToPrefill,
    FirstToken,
    LeasesRenewed,
    PairAccepted,
    PairRequest,
    PrefillToDecode,
    RenewLeases,
    Reserve,
    Reserved,
)
from common.sampling import SampledToken, SamplingParams
from common.transfer.shm import ShmBackend
from common.transport.channels import HANDOFF
from common.transport.sockets import Identity, RouterHub
from common.worker.payload import pack_checksums, pack_ids
from tests.support.running_worker import LAYOUT, MODEL, NO_PROCESS, handoff_link, peer_info
from tests.support.worker_harness import GATEWAY, Harness, expected

M = TypeVar("M")

LEASE_SECONDS = 1.5
"""Long enough for a machine that leaves a process alone for a second."""


class ScriptedDecode:
    """A decode side that pairs and renews leases by itself, and says the rest when told to."""

    def __init__(self, harness: Harness, name: str, num_blocks: int = 64) -> None:
        self.name = name
        self.is_renewing = True
        self.pool = KVPool(num_blocks, LAYOUT.block_bytes)
        self.got: list[PrefillToDecode] = []
        self._harness = harness
        self._peer: tuple[str, Epoch] | None = None
        self._identity = Identity(name, new_epoch())
        self._hub: RouterHub[DecodeToPrefill, PrefillToDecode] = RouterHub(
            harness.context,
            HANDOFF,
            f"ipc://{harness.folder}/{name}",
            self._identity,
            Codec(DecodeToPrefill),
            Codec(PrefillToDecode),
        )
        harness.introduce(peer_info(name, Role.DECODE, self._identity, self._hub.endpoint))

    async def play(self) -> None:
        """Answer until closed."""
        async for received in self._hub.received():
            self._peer = (received.envelope.sender, received.envelope.epoch)
            match received.message:
                case PairRequest():
                    accepted = PairAccepted(
                        epoch=self._identity.epoch,
                        transport="shm",
                        pool=self.pool.handle(),
                        lease_seconds=LEASE_SECONDS,
                    )
                    self.say(accepted)
                case RenewLeases(transfer_ids=ids):
                    if self.is_renewing:
                        self.say(LeasesRenewed(transfer_ids=ids, unknown_ids=()))
                case _:
                    self.got.append(received.message)
            self._harness.board.post()

    def say(self, message: DecodeToPrefill, payload: tuple[bytes, ...] = ()) -> None:
        """Send a message to the prefill side."""
        assert self._peer is not None
        assert self._hub.try_send(self._peer, message, "test", payload)

    def reserve(self, reserve: Reserve, block_ids: Sequence[int]) -> None:
        """Answer a reservation with these blocks."""
        reserved = Reserved(transfer_id=reserve.transfer_id, num_cached_blocks=0)
        self.say(reserved, (pack_ids(block_ids),))

    async def is_understood(self) -> None:
        """Wait until the prefill side has read all that was said to it so far.

        It answers the end of a transfer that it does not know, as of one that is over.
        """
        unknown = TransferId("tr-unknown")
        answer = Aborted(transfer_id=unknown)
        self.say(Abort(transfer_id=unknown, reason=AbortReason.CANCELLED))
        await self._harness.board.wait_for("it is understood", lambda: answer in self.got)
        self.got.remove(answer)

    async def hears(self, kind: type[M]) -> M:
        """Wait for the first message of a kind."""

        def find() -> M | None:
            return next((message for message in self.got if isinstance(message, kind)), None)

        await self._harness.board.wait_for(
            f"{self.name} hears {kind.__name__}; got {self.got}", lambda: find() is not None
        )
        found = find()
        assert found is not None
        return found

    def close(self) -> None:
        """Go silent for good."""
        self._hub.close()
        self.pool.close()


class ScriptedPrefill:
    """A prefill side that says nothing but what it is told to say."""

    def __init__(
        self, harness: Harness, name: str, decode_endpoint: str, pid: int = NO_PROCESS
    ) -> None:
        self.got: list[DecodeToPrefill] = []
        self.reserved_ids: tuple[int, ...] = ()
        self.name = name
        self._harness = harness
        self._identity = Identity(name, new_epoch())
        endpoint = f"ipc://{harness.folder}/{name}"
        self._info = peer_info(name, Role.PREFILL, self._identity, endpoint, pid=pid)
        self._link = handoff_link(harness.context, decode_endpoint, self._identity)
        self._pool = KVPool(8, LAYOUT.block_bytes)
        harness.introduce(self._info)

    async def play(self) -> None:
        """Listen until closed."""
        async for received in self._link.received():
            if isinstance(received.message, Reserved):
                self.reserved_ids = tuple(np.frombuffer(received.payload[0], "<i4").tolist())
            self.got.append(received.message)
            self._harness.board.post()

    def say(self, message: PrefillToDecode, payload: tuple[bytes, ...] = ()) -> None:
        """Send a message to the decode side."""
        assert self._link.try_send(message, "test", payload)

    async def pair(self) -> PairAccepted:
        """Pair with the decode side."""
        self.say(PairRequest(peer=self._info, model_fingerprint=MODEL))
        return await self.hears(PairAccepted)

    async def reserve(
        self, request: str, prompt: Sequence[int], params: SamplingParams
    ) -> TransferId:
        """Reserve blocks, and wait until they are held."""
        transfer = self.send_reserve(request, prompt, params)
        await self.hears(Reserved)
        return transfer

    def send_reserve(
        self, request: str, prompt: Sequence[int], params: SamplingParams
    ) -> TransferId:
        """Ask for blocks."""
        transfer = TransferId(f"tr-{request}")
        reserve = Reserve(
            transfer_id=transfer,
            request_id=RequestId(request),
            gateway_id=GATEWAY,
            tokens_endpoint=f"ipc://{self._harness.folder}/g",
            params=params,
            num_prompt_tokens=len(prompt),
        )
        self.say(reserve, (pack_ids(prompt),))
        return transfer

    async def write_and_commit(
        self, request: str, prompt: Sequence[int], params: SamplingParams
    ) -> TransferId:
        """Write blocks that hold nothing of use, and commit them with their checksums."""
        accepted = await self.pair()
        await self.reserve(request, prompt, params)
        link = ShmBackend(self._pool).open_peer(accepted.pool)
        report = link.write([0] * len(self.reserved_ids), self.reserved_ids)
        link.close()
        return self.commit(request, prompt, params, [int(c) for c in report.checksums])

    def commit(
        self, request: str, prompt: Sequence[int], params: SamplingParams, checksums: Sequence[int]
    ) -> TransferId:
        """Commit a reservation with its right first token and these checksums."""
        transfer = TransferId(f"tr-{request}")
        commit = Commit(
            transfer_id=transfer,
            num_tokens=len(prompt),
            num_cached_tokens=0,
            first_tokens=(FirstToken(choice=0, token=SampledToken(expected(prompt, params)[0])),),
            prefill_done_at=0.0,
        )
        self.say(commit, (pack_checksums(checksums),))
        return transfer

    async def hears(self, kind: type[M]) -> M:
        """Wait for the first message of a kind."""

        def find() -> M | None:
            return next((message for message in self.got if isinstance(message, kind)), None)

        await self._harness.board.wait_for(
            f"{self.name} hears {kind.__name__}; got {self.got}", lambda: find() is not None
        )
        found = find()
        assert found is not None
        return found

    def close(self) -> None:
        """Go silent for good."""
        self._link.close()
        self._pool.close()


@asynccontextmanager
async def scripted_decode(harness: Harness, name: str = "decode") -> AsyncIterator[ScriptedDecode]:
    """Play a decode side as long as the block."""
    decode = ScriptedDecode(harness, name)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(decode.play())
        try:
            yield decode
        finally:
            decode.close()


@asynccontextmanager
async def scripted_prefill(
    harness: Harness, decode: str, name: str = "prefill", pid: int = NO_PROCESS
) -> AsyncIterator[ScriptedPrefill]:
    """Play a prefill side of a running decode worker as long as the block."""
    prefill = ScriptedPrefill(harness, name, f"ipc://{harness.folder}/{decode}", pid)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(prefill.play())
        try:
            yield prefill
        finally:
            prefill.close()
