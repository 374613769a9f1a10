"""``flowpath keygen``: the keys of a host."""

from pathlib import Path

from common.transport.security import (
    ALLOWED_NAME,
    PUBLIC_NAME,
    SECRET_NAME,
    make_keys,
    read_public_key,
)
from services.cli.terminal import out


def make_key_folder(folder: Path) -> None:
    """Make a key folder and say what to do with it. ConfigError when one is there already."""
    public = make_keys(folder)
    console = out()
    secret = f"made {folder / SECRET_NAME} (secret, never leaves this host)"
    console.print(secret, soft_wrap=True, markup=False)
    console.print(f"made {public} (public)", soft_wrap=True, markup=False)
    console.print(
        f"A controller on this host is joined with --controller 'tcp://ADDRESS:7400?key="
        f"{read_public_key(public).hex()}'",
        soft_wrap=True,
        markup=False,
    )
    console.print(
        f"Each host needs a folder of its own. Copy every other host's {PUBLIC_NAME} into "
        f"{folder / ALLOWED_NAME}/ under a name ending in .key, then start FlowPath with "
        f"--keys {folder} --cluster-host ADDRESS.",
        soft_wrap=True,
        markup=False,
    )
