"""Settings from their layers: flags over environment over file over defaults, with provenance."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from common.config.engine import DEBUG_ALLOC_VARIABLE
from common.config.environment import ENVIRONMENT_PREFIX, environment
from common.config.folders import write_private
from common.config.settings import Settings
from common.errors import ConfigError

CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and for each field in words where its value came from."""

    settings: Settings
    sources: Mapping[str, str]
    ignored_variables: tuple[str, ...]
    """Variables with our prefix that name no setting."""


def load_settings(
    flags: Mapping[str, object] | None = None, config: Path | None = None
) -> LoadedSettings:
    """Merge all layers; a flag that is None was not given.

    ConfigError tells for each bad value the setting, where it came from and what to do.
    """
    values: dict[str, object] = {}
    sources: dict[str, str] = {}

    def put(layer: Mapping[str, object], source: Mapping[str, str]) -> None:
        for name, value in layer.items():
            values[name] = value
            sources[name] = source[name]

    file = config or (Path(given) if (given := environment.get(CONFIG_VARIABLE)) else None)
    if file is not None:
        in_file = _read_file(file)
        put(in_file, dict.fromkeys(in_file, f"file {file}"))
    in_environment = _read_environment()
    put(in_environment, {name: f"environment {variable_of(name)}" for name in in_environment})
    given_flags = {name: value for name, value in (flags or {}).items() if value is not None}
    put(given_flags, {name: f"flag {flag_of(name)}" for name in given_flags})
    settings = _validate(values, sources)
    for name in Settings.model_fields:
        sources.setdefault(name, "default")
    return LoadedSettings(settings, sources, _ignored_variables())


def save_settings(settings: Settings, path: Path) -> None:
    """Write settings for child processes: a file of mode 0600 that ``read_settings`` reads."""
    write_private(path, settings.model_dump_json(indent=2) + "\n")


def read_settings(path: Path) -> Settings:
    """Read what ``save_settings`` wrote, without loss and without the environment."""
    try:
        return Settings.model_validate(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"settings file {path} cannot be read: {error}") from error


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return DEBUG_ALLOC_VARIABLE if name == "debug_alloc" else f"{ENVIRONMENT_PREFIX}{name.upper()}"


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def _read_file(file: Path) -> dict[str, object]:
    try:
        values: dict[str, object] = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"config file {file} is not TOML: {error}") from error
    if unknown := sorted(set(values) - set(Settings.model_fields)):
        raise ConfigError(
            f"config file {file} has unknown settings: {', '.join(unknown)}; "
            "docs/settings.md lists the known ones"
        )
    return values


def _read_environment() -> dict[str, object]:
    found = EnvSettingsSource(Settings)()
    found.pop("debug_alloc", None)  # it has one spelling, the allocator's own
    if given := environment.get(DEBUG_ALLOC_VARIABLE):
        found["debug_alloc"] = given
    return found


def _ignored_variables() -> tuple[str, ...]:
    known = {variable_of(name) for name in Settings.model_fields} | {CONFIG_VARIABLE}
    ours = {name for name in environment if name.startswith(ENVIRONMENT_PREFIX)}
    return tuple(sorted(ours - known))


def _validate(values: Mapping[str, object], sources: Mapping[str, str]) -> Settings:
    try:
        return Settings.model_validate(dict(values))
    except ValidationError as error:
        lines = [
            _explain(str(found["loc"][0]) if found["loc"] else "", found["msg"], values, sources)
            for found in error.errors(include_url=False)
            if found["type"] != "default_factory_not_called"
        ]
        raise ConfigError("\n".join(lines)) from error


def _explain(
    name: str, message: str, values: Mapping[str, object], sources: Mapping[str, str]
) -> str:
    told = message.removeprefix("Value error, ")
    if not name:
        return told
    return f"setting {name} = {str(values.get(name))!r} ({sources.get(name, 'default')}): {told}"
