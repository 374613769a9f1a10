"""One short value that says whether two processes serve the same model."""

import hashlib
from pathlib import Path

from common.errors import ModelError
from common.models.checkpoint import INDEX_NAME, checkpoint_files, read_header

NUM_SAMPLES = 64
SAMPLE_BYTES = 1024


def model_fingerprint(folder: Path, *, has_weights: bool = True) -> str:
    """Return 16 hex digits over what makes the model: its files, sampled, not read in full.

    Where the weights come from elsewhere (``has_weights`` false), their files are not looked for.

    Covered are config.json, tokenizer.json (where there is one), the index, and of each
    safetensors file the size, the header, and 64 samples spread over the weights: fine-tunes of
    one model share shapes and headers, and only their numbers differ. ModelError names a missing
    or damaged file.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", INDEX_NAME):
        path = folder / name
        _add(digest, name, path.read_bytes() if path.exists() else b"")
    for path in checkpoint_files(folder) if has_weights else ():
        header = read_header(path)
        _add(digest, path.name, str(path.stat().st_size).encode())
        _add(digest, "header", header)
        _add(digest, "samples", _samples(path, 8 + len(header)))
    return digest.hexdigest()[:16]


def _add(digest: "hashlib._Hash", name: str, data: bytes) -> None:
    digest.update(f"{name}:{len(data)}:".encode())
    digest.update(data)


def _samples(path: Path, start: int) -> bytes:
    try:
        size = path.stat().st_size
        step = max((size - start) // NUM_SAMPLES, SAMPLE_BYTES)
        parts = []
        with path.open("rb") as file:
            for offset in range(start, size, step):
                file.seek(offset)
                parts.append(file.read(SAMPLE_BYTES))
        return b"".join(parts)
    except OSError as error:
        raise ModelError(f"{path}: {error}") from error
