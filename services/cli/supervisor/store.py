"""The store of KV blocks that ``flowpath serve`` gives its workers when nobody says which."""

from urllib.parse import quote

from common.config import processor
from common.config.settings import Settings
from common.config.storage import AUTO_STORE, NO_STORE

DEFAULT_CAPACITY = "10GiB"


def choose_store(settings: Settings) -> Settings:
    """Return settings that name a store or none, where they said ``auto``.

    It is a folder of this user's own, which is made where it is missing. None where the workers
    may be on GPUs, or there can be no such folder. ConfigError for what needs a store then.
    """
    if settings.store == AUTO_STORE:
        settings = settings.model_copy(update={"store": _default_store(settings)})
    settings.refuse_without_store()
    return settings


def _default_store(settings: Settings) -> str:
    is_on_cpus = settings.device == "cpu" or (
        settings.device == "auto" and not processor.may_have_gpu()
    )
    if not is_on_cpus:
        return NO_STORE
    folder = settings.cache_dir / "store"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # what people asked can be told from what is in it
    except OSError:
        return NO_STORE
    return f"file:{quote(str(folder))}?capacity={DEFAULT_CAPACITY}"
