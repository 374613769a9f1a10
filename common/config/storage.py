"""Settings of the store of KV blocks, and of the paths by which they are read."""

from typing import Literal

from pydantic import BaseModel, Field

from common.config.value_types import Bytes
from common.errors import ConfigError

NO_STORE = "none"
AUTO_STORE = "auto"


class StorageSettings(BaseModel):
    """Where KV outlives its worker, and which side reads it back."""

    store: str = Field(
        AUTO_STORE,
        description="Store of KV blocks: file:DIR, redis://HOST:PORT/DB or none; docs/storage.md "
        "has the options. auto is a folder in cache_dir of at most 10GiB for `flowpath serve` on "
        "CPUs, and none for everything else.",
    )
    store_read: Literal["dual", "prefill", "decode"] = Field(
        "dual",
        description="Which side reads stored KV: prefill workers, decode workers, or for each "
        "request the one whose queue of reads is shorter.",
    )
    store_load: Literal["auto", "always"] = Field(
        "auto",
        description="Whether stored KV is loaded: auto, where measured rates make that the sooner "
        "way, or always.",
    )
    store_writes: bool = Field(
        default=True, description="Whether computed blocks are written to the store."
    )
    store_codec: Literal["none", "fp8"] = Field(
        "none",
        description="How KV is kept in the store: none, as the pool has it, or fp8, in half or a "
        "quarter of the bytes, which loses digits: answers can differ from those without a store. "
        "Blocks of one codec are not found with another.",
    )
    store_preload: str = Field(
        "",
        description="File of prompts (JSON lines with tokens, as /tokenize answers) that each "
        "worker loads from the store when it starts, up to half of its pool.",
    )
    host_tier_bytes: Bytes = Field(
        0,
        ge=0,
        description="Host memory of each worker (size) for recently used blocks of the store, "
        "which are read from there without asking storage; 0 keeps none.",
    )
    store_prefetch: bool = Field(
        default=True,
        description="Whether stored prefixes that find no room in the pool are brought into a "
        "quarter of host_tier_bytes at most while their requests wait for room, and loaded from "
        "there when it comes. Without a host tier nothing is prefetched, and they are computed.",
    )
    store_path: Literal["direct", "buffered"] = Field(
        "direct",
        description="How blocks get from the store into a pool in host memory and back: direct, or "
        "buffered, by way of a bounded buffer. Those of pools on GPUs and of workers of several "
        "ranks (tensor_parallel) always pass the buffer.",
    )
    store_buffer_bytes: Bytes = Field(
        256 * 2**20,
        gt=0,
        description="Host memory of each worker (size) for the buffer between store and pool, "
        "page-locked for one on a GPU; whoever finds no room there waits.",
    )
    emulated_store_bandwidth: Bytes = Field(
        0,
        ge=0,
        description="Bytes per second that each worker may read from the store (size), to try "
        "slower links than this machine has; 0 does not limit.",
    )
    emulated_fabric_bandwidth: Bytes = Field(
        0,
        ge=0,
        description="Bytes per second that each worker may send to other workers (size), to try "
        "slower links than this machine has; 0 does not limit.",
    )

    @property
    def has_store(self) -> bool:
        """Whether a store is named; ``flowpath serve`` names one for ``auto``."""
        return self.store not in (NO_STORE, AUTO_STORE)

    def refuse_without_store(self) -> None:
        """ConfigError for what was asked of the store where there is none."""
        asked = {
            "host_tier_bytes": self.host_tier_bytes > 0,
            "store_codec": self.store_codec != "none",
            "store_preload": bool(self.store_preload),
        }
        named = [name for name, is_asked in asked.items() if is_asked]
        if named and not self.has_store:
            raise ConfigError(
                f"setting {named[0]}: there is no store (store is {self.store}); name one with"
                f" store, or leave {named[0]} out"
            )
