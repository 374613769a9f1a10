"""As much of JSON Schema as our OpenAPI document uses; an unknown keyword is an error."""

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]  # Any: a JSON document

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SAYS_NOTHING = {"title", "description", "default", "format"}
_KNOWN = {
    *("$ref", "anyOf", "oneOf", "enum", "const", "type", "items", "maxItems", "minItems"),
    *("properties", "required", "additionalProperties", "maxProperties", "propertyNames"),
    *("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}


def schema_problems(document: Json, name: str, value: object) -> list[str]:
    """Return what is wrong with ``value`` as the schema ``name`` of an OpenAPI document."""
    return list(_problems(document, {"$ref": f"#/components/schemas/{name}"}, value, name))


def _problems(document: Json, schema: Json, value: Any, where: str) -> Iterator[str]:
    unknown = set(schema) - _KNOWN - _SAYS_NOTHING
    if unknown:
        raise ValueError(f"{where}: keywords {unknown} are not known here")
    if "$ref" in schema:
        target = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        yield from _problems(document, target, value, where)
    for keyword in ("anyOf", "oneOf"):
        fitting = [
            option
            for option in schema.get(keyword, ())
            if not list(_problems(document, option, value, where))
        ]
        if keyword in schema and (not fitting or (keyword == "oneOf" and len(fitting) > 1)):
            yield f"{where}: {value!r} fits {len(fitting)} of {keyword}"
    if "enum" in schema and not any(_is_same(value, item) for item in schema["enum"]):
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if "const" in schema and not _is_same(value, schema["const"]):
        yield f"{where}: {value!r} is not {schema['const']!r}"
    if "type" in schema and not _has_type(value, schema["type"]):
        yield f"{where}: {value!r} is no {schema['type']}"
        return
    yield from _bound_problems(schema, value, where)
    if isinstance(value, dict):
        yield from _object_problems(document, schema, value, where)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _problems(document, schema["items"], item, f"{where}[{index}]")


def _object_problems(document: Json, schema: Json, value: Json, where: str) -> Iterator[str]:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where}.{name} is missing"
    for name, item in value.items():
        if name in properties:
            yield from _problems(document, properties[name], item, f"{where}.{name}")
        elif others is False:
            yield f"{where}.{name} is not in the schema"
        elif isinstance(others, dict):
            yield from _problems(document, others, item, f"{where}.{name}")


def _bound_problems(schema: Json, value: Any, where: str) -> Iterator[str]:
    if isinstance(value, list | str | dict):
        kind = {list: "Items", str: "Length", dict: "Properties"}[type(value)]
        low, high = schema.get(f"min{kind}", 0), schema.get(f"max{kind}", len(value))
        if not low <= len(value) <= high:
            yield f"{where}: size {len(value)} is not within {low} to {high}"
    elif isinstance(value, int | float):
        fits = (
            value >= schema.get("minimum", value)
            and value <= schema.get("maximum", value)
            and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
            and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        )
        if not fits:
            yield f"{where}: {value} is out of bounds"


def _has_type(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])


def _is_same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other
