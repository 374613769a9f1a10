"""Real gateway processes between a played cluster and lean HTTP clients, all on one host.

``PlayedCluster`` speaks the control channel as the controller does and the tokens channel as a
worker does; ``LeanStream`` is a streamed completion over a bare socket. Both live in the caller's
loop, so a token's way through the gateway is measured with one clock: from the moment before its
message is handed to the transport to the moment at which the client's bytes are read.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import cast

import numpy as np
from safetensors.numpy import save_file

from common.config.load import save_settings
from common.config.settings import Settings
from common.ids import GatewayId, RequestId, WorkerId, new_epoch
from common.messages.codec import Codec
from common.messages.control import (
    CancelRequest,
    ClusterState,
    ControllerToGateway,
    GatewayAccepted,
    GatewayHeartbeat,
    GatewayHello,
    GatewayToController,
    Goodbye,
    RequestPlaced,
    SubmitRequest,
)
from common.messages.tokens import TokenDelta, TokensGenerated, WorkerToGateway
from common.sampling import FinishReason, SampledToken
from common.transport.channels import CONTROL, TOKENS
from common.transport.sockets import DealerLink, Identity, RouterHub, new_context
from tests.support.fake_backend import plain_tokenizer, write_tiny_model

REPOSITORY = Path(__file__).parents[2]
HOST = "127.0.0.1"
MARK = "@"
"""The text of every token that is played: it stands nowhere else in an answer."""
START_SECONDS = 60.0
MAX_POSITIONS = 2**20


def write_served_model(folder: Path) -> Path:
    """Write what a gateway reads of a model: a configuration and a tiny tokenizer."""
    write_tiny_model(folder)
    config = {
        "model_type": "llama",
        "vocab_size": plain_tokenizer(folder).get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": MAX_POSITIONS,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"model.embed_tokens.weight": np.zeros((1, 1), np.float32)}  # for the fingerprint
    save_file(weights, folder / "model.safetensors")
    return folder


@dataclass(slots=True, eq=False)
class PlayedStream:
    """One request as the played worker sees it."""

    request_id: RequestId
    gateway_id: GatewayId
    max_tokens: int
    sent_at: list[float] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        """Whether no more tokens are to come."""
        return self.is_cancelled or len(self.sent_at) >= self.max_tokens


class PlayedCluster:
    """A controller that places everything, and one worker that sends what it is told to."""

    def __init__(self, settings: Settings, token_id: int) -> None:
        self.streams: dict[RequestId, PlayedStream] = {}
        self.gateways: dict[GatewayId, str] = {}
        self._token = SampledToken(token_id)
        self._context = new_context()
        self._identity = Identity("controller", new_epoch())
        self._hub: RouterHub[ControllerToGateway, GatewayToController] = RouterHub(
            self._context,
            CONTROL,
            settings.control_address,
            self._identity,
            Codec(ControllerToGateway),
            Codec(GatewayToController),
        )
        self._worker = Identity("decode-0", new_epoch())
        self._tokens: Codec[WorkerToGateway] = Codec(WorkerToGateway)
        self._links: dict[GatewayId, DealerLink[WorkerToGateway, WorkerToGateway]] = {}
        self.changed = asyncio.Condition()

    async def serve(self) -> None:
        """Answer the gateways until closed."""
        async for received in self._hub.received():
            envelope, message = received.envelope, received.message
            peer = (envelope.sender, envelope.epoch)
            answer = self._answer(GatewayId(envelope.sender), message)
            if answer is not None:
                self._hub.try_send(peer, answer, "played")
            if not isinstance(message, GatewayHeartbeat):
                async with self.changed:
                    self.changed.notify_all()

    def _answer(
        self, gateway_id: GatewayId, message: GatewayToController
    ) -> ControllerToGateway | None:
        match message:
            case GatewayHello():
                self.gateways[gateway_id] = message.url
                self._links[gateway_id] = DealerLink(
                    self._context,
                    TOKENS,
                    message.tokens_endpoint,
                    self._worker,
                    self._tokens,
                    self._tokens,
                )
                return GatewayAccepted(heartbeat_seconds=0.2)
            case GatewayHeartbeat():
                return ClusterState(
                    is_ready=True,
                    reason="",
                    num_prefill=1,
                    num_decode=1,
                    num_combined=0,
                    max_request_tokens=MAX_POSITIONS,
                )
            case SubmitRequest():
                stream = PlayedStream(message.request_id, gateway_id, message.params.max_tokens)
                self.streams[message.request_id] = stream
                worker = WorkerId("decode-0")
                return RequestPlaced(
                    request_id=message.request_id, prefill_worker=worker, decode_worker=worker
                )
            case CancelRequest():
                self.streams[message.request_id].is_cancelled = True
                return None
            case Goodbye():
                self.gateways.pop(gateway_id, None)
                return None

    async def wait_for_streams(self, count: int) -> None:
        """Wait until so many requests were submitted."""
        async with asyncio.timeout(START_SECONDS), self.changed:
            await self.changed.wait_for(lambda: len(self.streams) >= count)

    def send(self, streams: list[PlayedStream], num_tokens: int = 1) -> None:
        """Play one engine step: ``num_tokens`` more tokens of each stream."""
        deltas: dict[GatewayId, list[TokenDelta]] = {}
        for stream in streams:
            index = len(stream.sent_at)
            count = min(num_tokens, stream.max_tokens - index)
            is_last = index + count == stream.max_tokens
            delta = TokenDelta(
                request_id=stream.request_id,
                choice=0,
                index=index,
                tokens=(self._token,) * count,
                finish_reason=FinishReason.LENGTH if is_last else None,
                num_cached_tokens=None if index else 0,
            )
            deltas.setdefault(stream.gateway_id, []).append(delta)
        for gateway_id, of_gateway in deltas.items():
            now = perf_counter()
            message = TokensGenerated(deltas=tuple(of_gateway))
            assert self._links[gateway_id].try_send(message, "step"), f"{gateway_id} is full"
            for delta in of_gateway:
                self.streams[delta.request_id].sent_at += [now] * len(delta.tokens)

    def close(self) -> None:
        """Close every socket."""
        for link in self._links.values():
            link.close()
        self._hub.close()
        self._context.destroy(linger=0)


class LeanStream(asyncio.Protocol):
    """A streamed completion that counts ``MARK`` and reads the clock, and parses nothing."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._head = b""
        self._tail = b""
        self.request_id: RequestId | None = None
        self.received_at: list[float] = []
        self.first_line = ""
        self.is_complete = False
        self.is_lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio.Transport in all but name
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._raw)

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        if self.request_id is None:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            head, _, data = self._head.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            self.first_line = lines[0]
            names = dict(line.lower().split(": ", 1) for line in lines[1:])
            self.request_id = RequestId(names["x-request-id"])
        count = data.count(MARK.encode())
        if count:
            self.received_at += [now] * count
        self._tail = (self._tail + data)[-32:]
        if b"[DONE]" in self._tail:
            self.is_complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost.set()


def raw_completion(max_tokens: int, **fields: object) -> bytes:
    """Return the bytes of a streamed completion request."""
    body = json.dumps(
        {"model": "served", "prompt": [5, 6, 7], "max_tokens": max_tokens, "stream": True, **fields}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(frozen=True, slots=True)
class GatewayRig:
    """Running gateways with the cluster that is played to them."""

    cluster: PlayedCluster
    port: int
    pids: tuple[int, ...]
    processes: tuple["subprocess.Popen[bytes]", ...]

    async def open_stream(self, max_tokens: int, **fields: object) -> LeanStream:
        """Ask for a streamed completion."""
        loop = asyncio.get_running_loop()
        raw = raw_completion(max_tokens, **fields)
        _, stream = await loop.create_connection(lambda: LeanStream(raw), HOST, self.port)
        return stream


@asynccontextmanager
async def running_gateways(
    root: Path, num_gateways: int = 1, **settings: object
) -> AsyncIterator[GatewayRig]:
    """Run gateway processes over a played cluster for as long as the block; then end them."""
    model = write_served_model(root / "model")
    token_id = plain_tokenizer(model).token_to_id(MARK)
    # Held, so that nobody takes the port before the gateways share it.
    with socket.socket() as held:
        held.bind((HOST, 0))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = held.getsockname()[1]
        chosen = Settings.model_validate(
            {
                "port": port,
                "gateways": max(num_gateways, 2),
                "model": str(model),
                "served_model_name": "served",
                "run_dir": root / "run",
                "log_dir": root / "log",
                "drain_seconds": 5,
                **settings,
            }
        )
        chosen.run_dir.mkdir(mode=0o700)
        chosen.log_dir.mkdir(mode=0o700)
        save_settings(chosen, root / "settings.json")
        cluster = PlayedCluster(chosen, token_id)
        processes = [
            _start(f"gateway-{number}", root / "settings.json") for number in range(num_gateways)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(cluster.serve())
                async with asyncio.timeout(START_SECONDS), cluster.changed:
                    await cluster.changed.wait_for(lambda: len(cluster.gateways) == num_gateways)
                pids = tuple(process.pid for process in processes)
                yield GatewayRig(cluster, port, pids, tuple(processes))
                for process in processes:
                    process.terminate()
                for process in processes:
                    code = await asyncio.to_thread(process.wait, 20)
                    assert code == 0, f"a gateway ended with exit code {code}"
                cluster.close()
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _start(name: str, settings_file: Path) -> "subprocess.Popen[bytes]":
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FLOWPATH_")}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "services.gateway", "--id", name),
            *("--settings", str(settings_file), "--parent", str(os.getpid())),
        ],
        cwd=REPOSITORY,
        env=kept,
        stdin=subprocess.DEVNULL,
    )


async def play_steadily(
    cluster: PlayedCluster, tokens_per_second: float, burst: int, until: float
) -> None:
    """Send one token of ``burst`` streams at a time, streams in turn, until a clock time.

    A stream whose tokens are over is left out; ends when none is left.
    """
    turn = deque(cluster.streams.values())
    step_seconds = burst / tokens_per_second
    due = perf_counter()
    while turn and perf_counter() < until:
        batch: list[PlayedStream] = []
        for _ in range(min(burst, len(turn))):
            stream = turn.popleft()
            batch.append(stream)
        cluster.send(batch)
        turn.extend(stream for stream in batch if not stream.is_over)
        due += step_seconds
        await asyncio.sleep(max(0.0, due - perf_counter()))


def added_seconds(cluster: PlayedCluster, streams: list[LeanStream]) -> list[float]:
    """Return each token's time from the worker's send to the client's receive."""
    delays: list[float] = []
    for stream in streams:
        assert stream.request_id is not None, "a stream got no answer"
        sent = cluster.streams[stream.request_id].sent_at
        delays += [received - at for at, received in zip(sent, stream.received_at, strict=False)]
    return delays
