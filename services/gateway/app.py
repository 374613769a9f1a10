"""The gateway's HTTP application."""

from importlib.metadata import PackageNotFoundError, version

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.errors import ErrorCode, RequestError
from services.gateway import response_schema as answers
from services.gateway.admission import Admission
from services.gateway.api_keys import ApiKeyGate
from services.gateway.backend import Backend, ServedModel
from services.gateway.completions import CompletionService
from services.gateway.connection import Exchange
from services.gateway.docs_page import SECURITY_POLICY, render_docs
from services.gateway.head_method import HeadAsGet
from services.gateway.http_errors import HTTP_MAPPINGS, error_body, request_error_response
from services.gateway.http_settings import HttpSettings
from services.gateway.metrics import GatewayMetrics
from services.gateway.observer import RequestObserver
from services.gateway.openapi import (
    COMPLETION_STATUSES,
    TOKENIZER_STATUSES,
    also,
    install_openapi,
    operation,
)
from services.gateway.schema import ChatRequest, DetokenizeRequest, TextRequest, TokenizeRequest
from services.gateway.tokenization import TokenizationService
from services.gateway.tokenizer import ModelTokenizer


def build_app(backend: Backend, settings: HttpSettings) -> FastAPI:
    """Build the application over ``backend``.

    Reads the tokenizer of the served model's folder; raises ``ModelError`` when it is unusable.
    There is no CORS: a browser lets no foreign page read an answer.
    """
    model = backend.model
    metrics = GatewayMetrics()
    admission = Admission(settings, metrics)
    tokenizer = ModelTokenizer.load(model.folder, model.max_model_len)
    app = FastAPI(
        title="FlowPath",
        version=_version(),
        description="An OpenAI-compatible server for text models.",
        docs_url=None,
        openapi_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.metrics = metrics
    app.state.admission = admission
    # The last one added is the outermost.
    app.add_middleware(HeadAsGet)
    if settings.api_keys:
        app.add_middleware(ApiKeyGate, api_keys=settings.api_keys)
    app.add_middleware(RequestObserver, metrics=metrics)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_completion_routes(app, CompletionService(backend, settings, tokenizer, admission, metrics))
    _add_tokenizer_routes(app, TokenizationService(model, settings, tokenizer, admission))
    _add_model_routes(app, model)
    _add_operator_routes(app, backend, admission, metrics)
    _add_docs_routes(app)
    install_openapi(
        app,
        (ChatRequest, TextRequest, TokenizeRequest, DetokenizeRequest),
        has_api_keys=bool(settings.api_keys),
    )
    return app


def _version() -> str:
    try:
        return version("flowpath")
    except PackageNotFoundError:
        return "unknown"


def _add_completion_routes(app: FastAPI, service: CompletionService) -> None:
    chat = operation(
        answers.ChatCompletion,
        body=ChatRequest,
        chunk=answers.ChatCompletionChunk,
        errors=COMPLETION_STATUSES,
    )
    text = operation(
        answers.TextCompletion,
        body=TextRequest,
        chunk=answers.TextCompletionChunk,
        errors=COMPLETION_STATUSES,
    )

    @app.post("/v1/chat/completions", openapi_extra=chat)
    async def create_chat_completion() -> Response:
        """Continue a conversation."""
        return Exchange(lambda connection: service.answer(connection, ChatRequest))

    @app.post("/v1/completions", openapi_extra=text)
    async def create_completion() -> Response:
        """Continue one text, or each of a list of texts."""
        return Exchange(lambda connection: service.answer(connection, TextRequest))


def _add_tokenizer_routes(app: FastAPI, service: TokenizationService) -> None:
    tokenizing = operation(answers.Tokenization, body=TokenizeRequest, errors=TOKENIZER_STATUSES)
    joining = operation(answers.Detokenization, body=DetokenizeRequest, errors=TOKENIZER_STATUSES)

    @app.post("/tokenize", openapi_extra=tokenizing)
    async def tokenize() -> Response:
        """Return the token ids that a completion of this prompt or these messages would have."""
        return Exchange(service.tokenize)

    @app.post("/detokenize", openapi_extra=joining)
    async def detokenize() -> Response:
        """Return the text of token ids, special tokens spelled out."""
        return Exchange(service.detokenize)


def _add_model_routes(app: FastAPI, model: ServedModel) -> None:
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created_seconds,
        "owned_by": "flowpath",
        "max_model_len": model.max_model_len,
    }

    @app.get("/v1/models", openapi_extra=operation(answers.ModelList))
    async def list_models() -> JSONResponse:
        """List the one model that is served."""
        return JSONResponse({"object": "list", "data": [card]})

    @app.get(
        "/v1/models/{model_id:path}", openapi_extra=operation(answers.ModelCard, errors=(404,))
    )
    async def retrieve_model(model_id: str) -> JSONResponse:
        """Describe a model."""
        if model_id != model.name:
            raise RequestError(
                ErrorCode.MODEL_NOT_FOUND,
                f"the model {model_id[:128]!r} does not exist; this server has {model.name!r}",
                param="model",
            )
        return JSONResponse(card)


def _add_operator_routes(
    app: FastAPI, backend: Backend, admission: Admission, metrics: GatewayMetrics
) -> None:
    healthy = also(
        operation(answers.Healthy), 503, "Requests cannot be served now", answers.Unhealthy
    )

    @app.get("/ping", openapi_extra=healthy)
    @app.get("/health", openapi_extra=healthy)
    async def health() -> JSONResponse:
        """Tell whether requests can be served, and if not why."""
        is_ready, reason = backend.readiness()
        if admission.drain.has_begun:
            is_ready, reason = False, "the gateway is shutting down"
        if is_ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)

    @app.get("/load", openapi_extra=operation(answers.Load))
    async def load() -> JSONResponse:
        """Count the requests that this gateway has in work."""
        return JSONResponse({"server_load": admission.num_open})

    @app.get("/version", openapi_extra=operation(answers.Version))
    async def tell_version() -> JSONResponse:
        """Tell FlowPath's version."""
        return JSONResponse({"version": app.version})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus_metrics() -> Response:
        """Return this gateway's metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_docs_routes(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        """Lead whoever opens the server's address to its API."""
        told = f"FlowPath {app.version}: an OpenAI-compatible API at /v1, described at /docs\n"
        # Relative: before us may stand a proxy that serves us under a path of its own.
        return PlainTextResponse(told, status_code=307, headers={"location": "docs"})

    # Ours, not FastAPI's: its own does not tell the observer its name.
    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        headers = {"content-security-policy": SECURITY_POLICY}
        return HTMLResponse(render_docs(app.openapi()), headers=headers)


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
    if error.status_code == 404:
        message += "; /docs lists what there is"
    body = error_body(message, "invalid_request_error", None, None)
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")
