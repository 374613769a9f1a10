"""One flag per setting, made from the settings themselves."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from common.config.load import LoadedSettings, flag_of, load_settings
from common.config.settings import Settings

_CONFIG = Annotated[
    Path | None, typer.Option("--config", help="TOML file of settings (FLOWPATH_CONFIG).")
]
_CHECK = Annotated[
    bool, typer.Option("--check", help="Print the effective settings and their sources, and exit.")
]
_METAVARS = {int: "N", float: "NUMBER", Path: "FOLDER", str: "TEXT"}

Load = Callable[[], LoadedSettings]


def with_settings(
    command: Callable[[Load, bool], None],
) -> Callable[..., None]:
    """Return the command with a flag for each setting, ``--config`` and ``--check``.

    The command gets a function that loads the settings, and whether only to check them. Values
    stay texts: the settings parse them, whatever layer they come from.
    """

    def run(**given: object) -> None:
        config, check = given.pop("config"), given.pop("check")
        path = config if isinstance(config, Path) else None
        command(lambda: load_settings(given, path), bool(check))

    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, annotation, default in [
            *((name, _option(name), None) for name in Settings.model_fields),
            ("config", _CONFIG, None),
            ("check", _CHECK, False),
        ]
    ]
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    # typer reads the signature, and resolves the annotations on its own.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # PEP 362
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option(name: str) -> object:
    field = Settings.model_fields[name]
    help_text = field.description or ""
    if isinstance(field.default, bool):
        flag = flag_of(name)
        declaration = f"{flag}/--no-{flag.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(declaration, help=help_text)]
    kind = field.annotation if isinstance(field.annotation, type) else str
    metavar = "SECONDS" if name.endswith("_seconds") else _METAVARS.get(kind, "TEXT")
    return Annotated[str | None, typer.Option(flag_of(name), help=help_text, metavar=metavar)]
