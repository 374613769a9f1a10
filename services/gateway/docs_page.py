"""The OpenAPI document as one plain page: no script, nothing from any other host."""

import json
from html import escape

from services.gateway.openapi import Document

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
code, .method { font-family: ui-monospace, monospace }
.method { font-weight: bold; text-transform: uppercase }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #8884; padding: .25rem .5rem; text-align: left;
  vertical-align: top }
section { border-top: 2px solid #8884; margin-top: 1.5rem }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } a { color: #8bf } }
"""
_BOUNDS = (
    *("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
)


def render_docs(document: Document) -> str:
    """Return the page of an OpenAPI document."""
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    operations = "".join(
        _operation(path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "".join(
        _schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1><p>{escape(info.get('description', ''))}</p>"
        '<p>For machines: <a href="openapi.json">openapi.json</a></p>'
        f"{operations}<h1>Schemas</h1>{schemas}</body></html>"
    )


def _operation(path: str, method: str, operation: Document) -> str:
    body = operation.get("requestBody")
    asked = "" if body is None else f"<p>Body: {_content(body)}</p>"
    rows = "".join(
        f"<tr><td>{status}</td><td>{escape(answer['description'])}</td>"
        f"<td>{_content(answer)}</td></tr>"
        for status, answer in sorted(operation["responses"].items())
    )
    return (
        f'<section><h2><span class="method">{method}</span> <code>{escape(path)}</code></h2>'
        f"<p>{escape(operation.get('description', ''))}</p>{asked}"
        f"<table><tr><th>Status</th><th>When</th><th>Answer</th></tr>{rows}</table></section>"
    )


def _content(holder: Document) -> str:
    return "<br>".join(
        f"<code>{escape(media_type)}</code> {_type(media['schema'])}"
        for media_type, media in holder.get("content", {}).items()
    )


def _schema(name: str, schema: Document) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in required else ''}</td>"
        f"<td>{_type(found)}</td></tr>"
        for field, found in schema.get("properties", {}).items()
    )
    return (
        f'<section id="{escape(name)}"><h3>{escape(name)}</h3>'
        f"<p>{escape(schema.get('description', ''))}</p><table>{rows}</table></section>"
    )


def _type(schema: Document) -> str:
    """Describe a schema in one line, with links to the schemas that it names."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(_value(value) for value in schema["enum"])
    if "const" in schema:
        return _value(schema["const"])
    kind = escape(schema.get("type", "any"))
    if "items" in schema:
        kind += f" of {_type(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        kind += f" of {_type(schema['additionalProperties'])}"
    bounds = ", ".join(f"{bound} {schema[bound]}" for bound in _BOUNDS if bound in schema)
    text = f"{kind} ({bounds})" if bounds else kind
    return f"{text}: {escape(schema['description'])}" if "description" in schema else text


def _value(value: object) -> str:
    return f"<code>{escape(json.dumps(value))}</code>"
