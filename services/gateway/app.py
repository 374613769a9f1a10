"""The gateway's HTTP application."""

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from services.gateway.backend import Backend, ServedModel
from services.gateway.completions import CompletionExchange, CompletionService
from services.gateway.http_errors import HTTP_MAPPINGS, error_body, request_error_response
from services.gateway.http_settings import HttpSettings
from services.gateway.metrics import GatewayMetrics
from services.gateway.observer import RequestObserver
from services.gateway.openapi import ERROR_RESPONSES, body_of, install_openapi
from services.gateway.schema import ChatRequest, TextRequest
from services.gateway.tokenizer import ModelTokenizer


def build_app(backend: Backend, settings: HttpSettings) -> FastAPI:
    """Build the application over ``backend``.

    Reads the tokenizer of the served model's folder; raises ``ModelError`` when it is unusable.
    """
    model = backend.model
    metrics = GatewayMetrics()
    tokenizer = ModelTokenizer.load(model.folder, model.max_model_len)
    service = CompletionService(backend, settings, tokenizer, metrics)
    app = FastAPI(title="FlowPath", redirect_slashes=False)
    app.add_middleware(RequestObserver, metrics=metrics)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_completion_routes(app, service)
    _add_model_routes(app, model)
    _add_operator_routes(app, backend, metrics)
    install_openapi(app, (ChatRequest, TextRequest))
    return app


def _add_completion_routes(app: FastAPI, service: CompletionService) -> None:
    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest), responses=ERROR_RESPONSES)
    async def create_chat_completion() -> Response:
        return CompletionExchange(service, ChatRequest)

    @app.post("/v1/completions", openapi_extra=body_of(TextRequest), responses=ERROR_RESPONSES)
    async def create_completion() -> Response:
        return CompletionExchange(service, TextRequest)


def _add_model_routes(app: FastAPI, model: ServedModel) -> None:
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created_seconds,
        "owned_by": "flowpath",
        "max_model_len": model.max_model_len,
    }

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{model_id:path}", responses=ERROR_RESPONSES)
    async def retrieve_model(model_id: str) -> JSONResponse:
        if model_id != model.name:
            raise RequestError(
                ErrorCode.MODEL_NOT_FOUND,
                f"the model {model_id[:128]!r} does not exist; this server has {model.name!r}",
                param="model",
            )
        return JSONResponse(card)


def _add_operator_routes(app: FastAPI, backend: Backend, metrics: GatewayMetrics) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        is_ready, reason = backend.readiness()
        if is_ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)

    @app.get("/metrics")
    async def prometheus_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    structlog.get_logger().info(
        "request_failed" if request.state.is_admitted else "request_refused",
        request_id=request.state.request_id,
        code=str(error.code),
        param=error.param,
        status=HTTP_MAPPINGS[error.code].status,
    )
    return request_error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer what the router refuses (no such route, wrong method) in the same shape."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:256]}: {error.detail}"
    body = error_body(message, "invalid_request_error", None, None)
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")
