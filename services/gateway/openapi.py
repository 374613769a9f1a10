"""The OpenAPI document: the bodies and the answers of routes that FastAPI does not read itself."""

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.api_keys import OPEN_PATHS
from services.gateway.response_schema import ANSWERS, Error

Document = dict[str, Any]  # Any: a JSON document, and FastAPI's own type of its parts

_REF_TEMPLATE = "#/components/schemas/{model}"
_ERRORS: Mapping[int, str] = {
    400: "A field is wrong; the error names it",
    404: "No such model",
    413: "The body is over the limit",
    415: "The body is not plain JSON",
    417: "Another Expect than 100-continue",
    429: "Too many requests are open; Retry-After says when to come back",
    500: "A bug of the server",
    502: "A worker was lost",
    503: "No worker can take the request now, or the gateway is shutting down",
    504: "The request's deadline passed",
}
TOKENIZER_STATUSES = (400, 404, 413, 415, 417, 429, 500, 503)
COMPLETION_STATUSES = tuple(_ERRORS)


def operation(
    answer: type[BaseModel],
    *,
    body: type[BaseModel] | None = None,
    chunk: type[BaseModel] | None = None,
    errors: Iterable[int] = (),
) -> Document:
    """Return the ``openapi_extra`` of a route.

    ``answer`` is its success, ``body`` its JSON body, ``chunk`` what each event of its stream
    holds, ``errors`` the statuses with which it may answer an ``Error``.
    """
    content = {"application/json": {"schema": _reference(answer)}}
    if chunk is not None:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "With stream: true. Each event's data is one "
                f"{chunk.__name__}, an Error that ends the stream, or [DONE] at its end.",
            }
        }
    responses: Document = {"200": {"description": "Success", "content": content}}
    for status in errors:
        responses[str(status)] = _response(_ERRORS[status], Error)
    found: Document = {"responses": responses}
    if body is not None:
        schema = {"application/json": {"schema": _reference(body)}}
        found["requestBody"] = {"required": True, "content": schema}
    return found


def also(described: Document, status: int, description: str, answer: type[BaseModel]) -> Document:
    """Return ``described`` with one more answer."""
    responses = {**described["responses"], str(status): _response(description, answer)}
    return {**described, "responses": responses}


def install_openapi(
    app: FastAPI, bodies: tuple[type[BaseModel], ...], *, has_api_keys: bool
) -> None:
    """Make ``app.openapi()`` hold the schemas that ``operation`` refers to."""

    def openapi() -> Document:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, bodies)
            if has_api_keys:
                _ask_for_key(app.openapi_schema)
        return app.openapi_schema

    # FastAPI documents this very assignment as the way to replace the method.
    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, bodies: tuple[type[BaseModel], ...]) -> Document:
    document = get_openapi(
        title=app.title, version=app.version, routes=app.routes, description=app.description
    )
    for operations in document["paths"].values():
        for described in operations.values():
            # What FastAPI answers to arguments that it reads itself; it reads none here.
            described["responses"].pop("422", None)
    _, definitions = models_json_schema(
        [(model, "validation") for model in (*bodies, *ANSWERS)], ref_template=_REF_TEMPLATE
    )
    document["components"] = {"schemas": definitions["$defs"]}
    return document


def _ask_for_key(document: Document) -> None:
    document["components"]["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for described in operations.values():
            if path in OPEN_PATHS:
                continue
            described["security"] = [{"ApiKey": []}]
            described["responses"]["401"] = _response("An API key is missing or wrong", Error)


def _response(description: str, answer: type[BaseModel]) -> Document:
    return {
        "description": description,
        "content": {"application/json": {"schema": _reference(answer)}},
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF_TEMPLATE.format(model=model.__name__)}
