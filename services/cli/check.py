"""``--check``: the effective settings with their sources, and the files that they name."""

from pathlib import Path

from common.config.api_key_file import load_api_keys
from common.config.load import LoadedSettings
from common.config.preload_file import read_prompts
from common.config.settings import Settings
from common.config.sizes import format_size
from common.config.storage import AUTO_STORE
from common.config.value_types import is_size
from common.engine.shard import Shard
from common.errors import ConfigError
from common.models.config import ModelConfig
from common.models.default_names import FOLDER_NAME
from common.storage.store_url import parse_store_url
from common.transfer.nixl_packages import HOW_TO_INSTALL, is_nixl_installed
from common.transport.addresses import load_keys
from common.transport.security import ALLOWED_NAME
from services.cli.terminal import grid, out


def print_settings(loaded: LoadedSettings, *, has_gateway: bool, has_workers: bool) -> None:
    """Open the files that the settings name and print a line per setting.

    ``has_gateway`` says that the program to check reads the file of API keys, ``has_workers`` that
    it computes and moves KV. Raises ConfigError for a model folder, ranks, a transport, a key
    folder, a file of API keys, a store or a file of prompts that would end the program.
    """
    settings = loaded.settings
    config = _model_config(settings)
    if has_workers and config is not None:
        Shard(0, settings.tensor_parallel).config(config)
    if has_workers and settings.transport == "rdma" and not is_nixl_installed():
        raise ConfigError(f"transport rdma needs NIXL; {HOW_TO_INSTALL}")
    if has_workers:
        _check_store(settings)
    if has_gateway and settings.api_key_file is not None:
        load_api_keys(settings.api_key_file)
    keys = load_keys(settings)
    table = grid("setting", "value", "source")
    for name in Settings.model_fields:
        table.add_row(name, format_value(settings, name), loaded.sources[name])
    console = out()
    console.print(table)
    for variable in loaded.ignored_variables:
        console.print(f"note: environment {variable} names no setting and is ignored")
    if config is not None and settings.max_model_len > config.max_model_len:
        console.print(
            f"note: max_model_len {settings.max_model_len} is more than the model's "
            f"{config.max_model_len}, which holds"
        )
    if keys is not None and not keys.allowed:
        console.print(
            f"note: {keys.folder / ALLOWED_NAME} holds no *.key file, so nobody may connect to "
            "this host over TCP, its own processes neither"
        )


def _check_store(settings: Settings) -> None:
    """Read what names the store and what is loaded from it; the store itself is not opened."""
    if settings.store != AUTO_STORE:
        settings.refuse_without_store()
        parse_store_url(settings.store)
    if settings.store_preload:
        read_prompts(Path(settings.store_preload))


def _model_config(settings: Settings) -> ModelConfig | None:
    """Return the served model's; None for the default model where it is not made yet."""
    if settings.model:
        return ModelConfig.load(Path(settings.model))
    folder = settings.cache_dir / "models" / FOLDER_NAME
    return ModelConfig.load(folder) if folder.exists() else None


def format_value(settings: Settings, name: str) -> str:
    """Return one setting as it would be written in a config file."""
    value = getattr(settings, name)
    if is_size(Settings.model_fields[name]):
        return format_size(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or '""'
