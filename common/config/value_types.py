"""Types of values that settings are made of."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator
from pydantic.fields import FieldInfo

from common.config.sizes import parse_size


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _absolute_or_empty(path: str) -> str:
    return str(_absolute(Path(path))) if path else ""


_SIZE = BeforeValidator(parse_size)

Bytes = Annotated[int, _SIZE]
Folder = Annotated[Path, AfterValidator(_absolute)]
FolderOrEmpty = Annotated[str, AfterValidator(_absolute_or_empty)]


def is_size(field: FieldInfo) -> bool:
    """Tell whether a setting is written as a size: 64MiB."""
    return _SIZE in field.metadata
