"""``--check``: the effective settings with their sources."""

from pathlib import Path

from rich.table import Table

from common.config.load import LoadedSettings
from common.config.settings import Settings
from common.config.sizes import format_size
from common.models.config import ModelConfig
from services.cli.terminal import out

_SIZES = ("segment_min_size", "kv_bytes", "max_body_bytes")


def print_settings(loaded: LoadedSettings) -> None:
    """Check the model folder, where one is named, and print a line per setting.

    Raises ModelError for a folder that cannot be served.
    """
    if loaded.settings.model:
        ModelConfig.load(Path(loaded.settings.model))
    table = Table("setting", "value", "source", box=None, pad_edge=False)
    for name in Settings.model_fields:
        table.add_row(name, format_value(loaded.settings, name), loaded.sources[name])
    console = out()
    console.print(table)
    for variable in loaded.ignored_variables:
        console.print(f"note: environment {variable} names no setting and is ignored")


def format_value(settings: Settings, name: str) -> str:
    """Return one setting as it would be written in a config file."""
    value = getattr(settings, name)
    if name in _SIZES:
        return format_size(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or '""'
