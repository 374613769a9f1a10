"""Typed reading of a JSON object, with errors that name the file and the field."""

import json
import math
from pathlib import Path
from typing import TypeGuard

from common.errors import ModelError


def load_object(path: Path) -> "JsonFields":
    """Read a file that holds one JSON object; ModelError where it cannot be read or is no object.

    Numbers that JSON does not know (``NaN``, ``Infinity``) are refused.
    """
    try:
        data: object = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: a JSON object is expected, not {type(data).__name__}")
    return JsonFields(data, str(path))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


class JsonFields:
    """A JSON object whose fields are read by name and type; ``null`` counts as absent.

    Every accessor raises ModelError when the field has another type, or when it is absent and no
    default is given.
    """

    def __init__(self, data: dict[str, object], where: str) -> None:
        self._data = data
        self._where = where

    def has(self, name: str) -> bool:
        """Tell whether the field is there and not null."""
        return self._data.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Tell whether the field is there and null."""
        return name in self._data and self._data[name] is None

    def error(self, name: str, reason: str) -> ModelError:
        """Return the error that says what is wrong with a field."""
        return ModelError(f"{self._where}: {name} {reason}")

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least ``minimum``."""
        value = self._value(name, default)
        if not _is_int(value) or value < minimum:
            raise self.error(name, f"must be an integer of at least {minimum}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(name, f"must be a number, not {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise self.error(name, f"must be finite and above 0, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:  # noqa: FBT001 - a default, not a mode
        """Return a boolean."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"must be a list of strings, not {value!r}")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; empty where the field is absent."""
        value = self._data.get(name)
        if value is None:
            return ()
        found = value if isinstance(value, list) else [value]
        if not all(_is_int(item) and item >= 0 for item in found):
            raise self.error(name, f"must be a token id or a list of them, not {value!r}")
        return tuple(found)

    def nested(self, name: str) -> "JsonFields":
        """Return a nested object; an empty one where the field is absent."""
        value = self._data.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {value!r}")
        return JsonFields(value, f"{self._where}: {name}")

    def string_map(self, name: str) -> dict[str, str]:
        """Return a nested object whose values are all strings."""
        value = self._value(name, None)
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self.error(name, "must map names to strings")
        return dict(value)

    def _value(self, name: str, default: object) -> object:
        value = self._data.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
