"""Whether NIXL is there, without importing it."""

from importlib.util import find_spec

PACKAGES = ("nixl_cu12", "nixl_cu13")
"""NIXL's builds, one for each version of CUDA; both work without a GPU as well."""
HOW_TO_INSTALL = "install it with `.venv/bin/pip install '.[rdma]'` (or nixl-cu13 for CUDA 13)"


def is_nixl_installed() -> bool:
    """Whether any build of NIXL can be imported."""
    return any(find_spec(package) is not None for package in PACKAGES)
