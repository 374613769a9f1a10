"""The gateway's process: ``python -m services.gateway``."""

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

import structlog
import uvicorn
import uvloop

from common.config.api_key_file import load_api_keys
from common.config.folders import prepare_run_dir
from common.config.host import host_id
from common.config.program import run_program
from common.config.settings import Settings
from common.errors import ConfigError
from common.ids import GatewayId, new_epoch
from common.messages.control import GatewayHello
from common.models.config import ModelConfig
from common.telemetry.exposition import metrics_served
from common.telemetry.logging import configure_logging
from common.transport.addresses import controller_endpoint, load_keys
from common.transport.sockets import new_context
from services.gateway.app import build_app
from services.gateway.backend import ServedModel
from services.gateway.cluster import ClusterBackend
from services.gateway.http_protocol import stall_aware_protocol
from services.gateway.http_settings import HttpSettings
from services.gateway.listener import BACKLOG, bind_listener
from services.gateway.server import GatewayServer

log = structlog.get_logger()

LAST_WORDS_SECONDS = 0.5


def serve(settings: Settings, gateway_id: str) -> int:
    """Serve HTTP until SIGTERM or SIGINT; return the exit code."""
    file = configure_logging(
        gateway_id, settings.log_dir, settings.log_level, to_stderr=settings.log_stderr
    )
    try:
        prepare_run_dir(settings.run_dir)
        uvloop.run(_serve(settings, GatewayId(gateway_id)))
    except* ConfigError as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        log.error("cannot_serve", reason=str(first))
        raise first from None
    finally:
        file.close()
    return 0


async def _serve(settings: Settings, gateway_id: GatewayId) -> None:
    if not settings.model:
        raise ConfigError("FLOWPATH_MODEL names no model folder; `flowpath serve` prepares one")
    key_file = settings.api_key_file
    api_keys = load_api_keys(key_file) if key_file is not None else frozenset()
    listener = bind_listener(settings.host, settings.port, is_shared=settings.gateways > 1)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = ModelConfig.load(Path(settings.model))
    model = ServedModel(
        name=settings.model_name,
        folder=config.folder,
        max_model_len=min(config.max_model_len, settings.max_model_len or config.max_model_len),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        created_seconds=int((config.folder / "config.json").stat().st_mtime),
    )
    if settings.max_model_len > model.max_model_len:
        log.warning("max_model_len_lowered", asked=settings.max_model_len, to=model.max_model_len)
    keys = load_keys(settings)
    context = new_context(keys)
    tokens_endpoint = settings.socket_address(f"{gateway_id}.tokens")
    hello = GatewayHello(
        gateway_id=gateway_id,
        epoch=new_epoch(),
        pid=os.getpid(),
        host=host_id(),
        tokens_endpoint=tokens_endpoint,
        model_fingerprint=config.fingerprint(has_weights=settings.has_weights),
        url=url,
    )
    backend = ClusterBackend(
        context,
        gateway_id,
        model,
        controller_endpoint(settings, keys),
        tokens_endpoint,
        hello,
        settings.request_timeout_seconds,
    )
    backend.max_resumes = settings.max_resumes
    limits = HttpSettings(
        max_body_bytes=settings.max_body_bytes,
        max_open_requests=settings.max_open_requests,
        api_keys=api_keys,
    )
    app = build_app(backend, limits)
    gc.freeze()  # what lives as long as the process is not walked again in the middle of a burst
    server = GatewayServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=stall_aware_protocol(settings.stalled_client_seconds),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,  # nothing runs any more: the drain is over
            backlog=BACKLOG,
        )
    )
    stop_asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_asked.set)

    async def stopping() -> None:
        await stop_asked.wait()
        backend.drain()
        await server.drain(
            app.state.admission, settings.drain_seconds, is_alone=settings.gateways == 1
        )

    log.info("gateway_listening", url=url, model=model.name)
    registry = app.state.metrics.registry
    try:
        with metrics_served(registry, settings.metrics_port(gateway_id)):
            async with asyncio.TaskGroup() as tasks:
                channels = tasks.create_task(backend.run(), name="cluster")
                stop = tasks.create_task(stopping(), name="stop")
                await server.serve(sockets=[listener])
                stop.cancel()
                channels.cancel()
    finally:
        backend.close(LAST_WORDS_SECONDS)
        listener.close()
        context.destroy(linger=int(LAST_WORDS_SECONDS * 1000))
    log.info("stopped")


if __name__ == "__main__":
    sys.exit(run_program("gateway", "gateway-0", sys.argv[1:], serve))
