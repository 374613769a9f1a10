"""Builders for the gateway's tests: a tiny real tokenizer, scripted replies, a served app."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.sampling import SampledToken, SamplingParams
from services.gateway.app import build_app
from services.gateway.backend import ServedModel
from services.gateway.fake_backend import FakeBackend, FakeBehaviour, Script
from services.gateway.http_protocol import stall_aware_protocol
from services.gateway.http_settings import HttpSettings

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog and then the other dog.",
    "user assistant system: hello there, how are you today? Stop here.",
    "안녕하세요 세계, 반갑습니다. 日本語の文章です。 Grüße aus Köln.",
)
MODEL_NAME = "tiny"
MAX_MODEL_LEN = 128
STALLED_CLIENT_SECONDS = 60.0


def write_tiny_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Write tokenizer.json (byte-level BPE) and tokenizer_config.json into ``folder``."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": START, "eos_token": {"content": END}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def plain_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Load the folder's tokenizer as the library has it."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def end_id(folder: Path) -> int:
    """Return the id of the end token."""
    token_id = plain_tokenizer(folder).token_to_id(END)
    assert token_id is not None
    return token_id


def served_model(folder: Path) -> ServedModel:
    """Describe the tiny model."""
    tokenizer = plain_tokenizer(folder)
    return ServedModel(
        name=MODEL_NAME,
        folder=folder,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=(end_id(folder),),
        created_seconds=1_700_000_000,
    )


def scripted(token_ids: Sequence[int]) -> Callable[..., list[SampledToken]]:
    """Return a script that draws these tokens, with logprobs -0.5, -1, ... when asked."""

    def script(prompt: Sequence[int], params: SamplingParams, choice: int) -> list[SampledToken]:
        if params.num_logprobs is None:
            return [SampledToken(token_id) for token_id in token_ids]
        return [
            SampledToken(
                token_id,
                -0.5,
                tuple((token_id + rank, -0.5 * (rank + 1)) for rank in range(params.num_logprobs)),
            )
            for token_id in token_ids
        ]

    return script


def replying(folder: Path, text: str, *, has_end: bool = True) -> Script:
    """Return a script that answers ``text`` and, with ``has_end``, the end token."""
    tokenizer = plain_tokenizer(folder)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    if has_end:
        token_ids = [*token_ids, end_id(folder)]
    return scripted(token_ids)


def fake_backend(
    folder: Path, text: str = "hello there", behaviour: FakeBehaviour | None = None
) -> FakeBackend:
    """Build a backend that answers ``text`` to everything."""
    return FakeBackend(served_model(folder), replying(folder, text), behaviour)


@asynccontextmanager
async def asgi_client(
    backend: FakeBackend, settings: HttpSettings | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """Talk to the app without a socket; a streamed answer arrives whole."""
    app = build_app(backend, settings or HttpSettings())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


@asynccontextmanager
async def served(backend: FakeBackend, settings: HttpSettings | None = None) -> AsyncIterator[int]:
    """Serve the app as the gateway does on a free loopback port, and yield the port."""
    started = asyncio.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            started.set()

    app = build_app(backend, settings or HttpSettings())
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=stall_aware_protocol(STALLED_CLIENT_SECONDS),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    server = Server(config)
    async with asyncio.TaskGroup() as group:
        group.create_task(server._serve())
        async with asyncio.timeout(10):
            await started.wait()
        try:
            yield server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = True
