"""The safetensors files of a model folder: which there are, and what their headers say."""

import json
import os
from pathlib import Path

from common.errors import ModelError
from common.models.json_fields import load_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """Return the folder's safetensors files, sorted by name; ModelError where one is missing."""
    index = folder / INDEX_NAME
    if not index.exists():
        single = folder / SINGLE_NAME
        if not single.is_file():
            raise ModelError(f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there")
        return (single,)
    names = sorted(set(load_object(index).string_map("weight_map").values()))
    if not names:
        raise ModelError(f"{index}: weight_map is empty")
    for name in names:
        if name != Path(name).name:
            raise ModelError(f"{index}: shard {name!r} is not a plain file name")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: the shard is missing ({INDEX_NAME} names it)")
    return tuple(folder / name for name in names)


def read_header(path: Path) -> bytes:
    """Return the JSON header of a safetensors file; ModelError where the file is cut or broken."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{path}: not a safetensors file (its header is cut)")
        header = file.read(length)
    try:
        data: object = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not a safetensors file ({error})") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path}: not a safetensors file (its header is no object)")
    ends = [_data_end(path, name, entry) for name, entry in data.items() if name != "__metadata__"]
    if 8 + length + max(ends, default=0) != size:
        raise ModelError(f"{path}: {size} bytes, but the header speaks of another length")
    return header


def _data_end(path: Path, name: str, entry: object) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(offsets, list) and len(offsets) == 2 and isinstance(offsets[1], int):
        return offsets[1]
    raise ModelError(f"{path}: tensor {name!r} has no data_offsets")
