"""Every message of the catalogue: Hypothesis strategies and one fixed example of each."""

import dataclasses
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from common.messages import admin, control, handoff, tokens
from common.messages.codec import Codec
from common.sampling import MAX_CHOICES, SamplingParams

DIRECTIONS: dict[ModuleType, dict[str, UnionType | type]] = {
    control: {
        "WorkerToController": control.WorkerToController,
        "GatewayToController": control.GatewayToController,
        "ControllerToWorker": control.ControllerToWorker,
        "ControllerToGateway": control.ControllerToGateway,
    },
    handoff: {
        "PrefillToDecode": handoff.PrefillToDecode,
        "DecodeToPrefill": handoff.DecodeToPrefill,
    },
    tokens: {"WorkerToGateway": tokens.WorkerToGateway},
    admin: {"CliToController": admin.CliToController, "ControllerToCli": admin.ControllerToCli},
}
"""Conversation → name of a direction → its messages."""

Bounds = dict[str, Any]  # Any: the bounds of ints, floats, texts and patterns
Hint = Any  # Any: what a field is annotated with has no common type


def members(union: UnionType | type) -> tuple[type, ...]:
    """List the message classes of one direction."""
    return get_args(union) or (union,)


def all_messages() -> dict[str, type]:
    """Return every message class by ``conversation.Name``."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{message.__name__}": message
        for module, directions in DIRECTIONS.items()
        for union in directions.values()
        for message in members(union)
    }


def codec_of(message: type) -> Codec[Any]:  # Any: whichever conversation the message is of
    """Return a codec of a direction that carries the message."""
    unions = [union for directions in DIRECTIONS.values() for union in directions.values()]
    return Codec(next(union for union in unions if message in members(union)))


def fields_of(message: type) -> Iterator[tuple[str, Hint]]:
    """Yield each field's name and annotation."""
    hints = get_type_hints(message, include_extras=True)
    for entry in dataclasses.fields(message):
        yield entry.name, hints[entry.name]


def a_message(message: type) -> st.SearchStrategy[Any]:
    """Strategy for valid instances of a message, nested structs and bounds included."""
    fields = {name: _strategy(hint, {}) for name, hint in fields_of(message)}
    return st.fixed_dictionaries(fields).map(lambda values: message(**_fitting(message, values)))


def _fitting(message: type, values: dict[str, Any]) -> dict[str, Any]:  # Any: fields of all types
    """Make fields fit each other where a class asks for it."""
    if message is not SamplingParams:
        return values
    num_drawn = values["num_drawn"] % values["max_tokens"]
    first_choice = values["first_choice"] % (MAX_CHOICES - values["num_choices"] + 1)
    return {**values, "num_drawn": num_drawn, "first_choice": first_choice}


def an_example(message: type) -> Any:  # Any: an instance of the class that was given
    """Return one fixed instance whose fields all differ from their defaults."""
    return message(**{name: _example(hint, {}, name) for name, hint in fields_of(message)})


def _origin(hint: Hint) -> Hint:
    return get_origin(hint)


def _split(hint: Hint, bounds: Bounds) -> tuple[Hint, Bounds]:
    while True:
        if _origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            bounds = {**bounds, **_bounds_of(notes)}
        elif isinstance(hint, NewType):
            hint = hint.__supertype__
        else:
            return hint, bounds


def _bounds_of(notes: list[Any]) -> Bounds:  # Any: annotations are of many libraries
    found: Bounds = {}
    for note in notes:
        for part in note.metadata if isinstance(note, FieldInfo) else (note,):
            for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern"):
                value = getattr(part, name, None)
                if value is not None:
                    found[name] = value
    return found


def _strategy(hint: Hint, bounds: Bounds) -> st.SearchStrategy[Any]:
    hint, bounds = _split(hint, bounds)
    origin = _origin(hint)
    if origin in (Union, UnionType):
        return st.one_of(*(_strategy(part, {}) for part in get_args(hint)))
    if origin is Literal:
        return st.sampled_from(get_args(hint))
    if origin is dict:
        key, value = get_args(hint)
        return st.dictionaries(_strategy(key, {}), _strategy(value, {}), max_size=4)
    if origin is tuple:
        first, *others = get_args(hint)
        if others == [...]:
            least = bounds.get("min_length", 0)
            return st.lists(_strategy(first, {}), min_size=least, max_size=least + 3).map(tuple)
        return st.tuples(*(_strategy(part, {}) for part in (first, *others)))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return a_message(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return _scalar(hint, bounds)


def _scalar(hint: type, bounds: Bounds) -> st.SearchStrategy[Any]:
    makers: dict[type, Callable[[], st.SearchStrategy[Any]]] = {
        bool: st.booleans,
        NoneType: st.none,
        int: lambda: st.integers(
            bounds.get("ge", bounds.get("gt", -1) + 1),
            bounds.get("le", bounds.get("lt", 2**31) - 1),
        ),
        float: lambda: st.floats(
            bounds.get("ge", bounds.get("gt", -1e6)),
            bounds.get("le", 1e9),
            exclude_min="gt" in bounds,
        ),
        bytes: lambda: st.binary(min_size=bounds["min_length"], max_size=bounds["max_length"]),
        str: lambda: _text(bounds),
    }
    return makers[hint]()


def _text(bounds: Bounds) -> st.SearchStrategy[str]:
    if "pattern" in bounds:
        return st.from_regex(bounds["pattern"].replace(r"\z", r"\Z")).filter(lambda s: len(s) < 500)
    least = bounds.get("min_length", 0)
    return st.text(st.characters(exclude_categories=["Cs"]), min_size=least, max_size=least + 12)


def _example(hint: Hint, bounds: Bounds, name: str) -> Any:  # Any: a value of the annotated type
    hint, bounds = _split(hint, bounds)
    origin = _origin(hint)
    if origin in (Union, UnionType):
        return _example(get_args(hint)[0], {}, name)
    if origin is Literal:
        return get_args(hint)[0]
    if origin is dict:
        return {7: 1.5, 50256: -100.0}
    if origin is tuple:
        first, *others = get_args(hint)
        if others == [...]:
            return (_example(first, {}, f"{name}_0"), _example(first, {}, f"{name}_1"))
        return tuple(_example(part, {}, name) for part in (first, *others))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return an_example(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return list(hint)[-1]
    # A number of the name's letters, so that two fields that were swapped encode differently.
    number = min(sum(name.encode()) % 97 + 2, bounds.get("le", 99))
    scalars: dict[type, Any] = {
        bool: True,
        int: number,
        float: number - 0.5,
        bytes: bytes(range(bounds.get("min_length", 4))),
        str: _example_text(bounds, name),
    }
    return scalars[hint]


def _example_text(bounds: Bounds, name: str) -> str:
    if "pattern" not in bounds:
        return f"{name} é"
    return "ipc:///run/socket" if "ipc" in bounds["pattern"] else "0123456789abcdef"
