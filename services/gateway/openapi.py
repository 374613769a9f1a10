"""The OpenAPI page of routes whose bodies FastAPI does not read itself."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF_TEMPLATE = "#/components/schemas/{model}"
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

# Any: FastAPI's own types for these parts of a JSON document.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for status, description in (
        (400, "A field is wrong; the error names it"),
        (404, "No such model"),
        (413, "The body is over the limit"),
        (429, "Too many requests are open; Retry-After says when to come back"),
        (500, "A bug of the server"),
        (502, "A worker was lost"),
        (503, "No worker can take the request now"),
        (504, "The request's deadline passed"),
    )
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:  # Any: a part of a JSON document
    """Return the ``openapi_extra`` that declares a route's JSON body."""
    schema = {"$ref": _REF_TEMPLATE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI, bodies: tuple[type[BaseModel], ...]) -> None:
    """Make ``app.openapi()`` hold the schemas that ``body_of`` refers to."""

    def openapi() -> dict[str, Any]:  # Any: a JSON document
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema(
                [(body, "validation") for body in bodies], ref_template=_REF_TEMPLATE
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"], Error=_ERROR_SCHEMA)
            app.openapi_schema = document
        return app.openapi_schema

    # FastAPI documents this very assignment as the way to replace the method.
    app.openapi = openapi  # type: ignore[method-assign]
