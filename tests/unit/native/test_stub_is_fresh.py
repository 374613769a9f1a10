"""The hand-written type stub and the built extension must tell the same story."""

import ast
import re
from pathlib import Path

import flowpath_native

STUB = Path(__file__).parents[3] / "native" / "stubs" / "flowpath_native.pyi"


def stub_signatures() -> dict[str, list[str]]:
    """Map each public name of the stub to its parameter names."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = names_of(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = []
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    found[f"{node.name}.{member.name}"] = names_of(member)
    return found


def names_of(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def parameters_of(function: object) -> list[str]:
    """Read the parameter names from the signature that nanobind keeps; a property has ``self``."""
    signatures = getattr(function, "__nb_signature__", None)
    if signatures is None:
        return ["self"]
    return re.findall(r"[(,] *(\w+)(?=[:,)])", signatures[-1][0].split(" -> ")[0])


def built_signatures() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in vars(flowpath_native).items():
        if name.startswith("_"):
            continue
        if not isinstance(value, type):
            found[name] = parameters_of(value)
            continue
        found[name] = []
        for member_name, member in vars(value).items():
            if not member_name.startswith("_"):
                found[f"{name}.{member_name}"] = parameters_of(member)
    return found


def without_constructors(signatures: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: args for name, args in signatures.items() if not name.endswith("__init__")}


def test_stub_names_everything_that_the_extension_has_and_nothing_else() -> None:
    assert without_constructors(stub_signatures()) == built_signatures()
