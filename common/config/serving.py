"""Settings of what is served, to whom, and by how many processes."""

from typing import Literal

from pydantic import BaseModel, Field

from common.config.value_types import Bytes, Folder, FolderOrEmpty


class ServingSettings(BaseModel):
    """What is served, to whom, and by how many processes."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address that the gateway listens on; one that is not loopback needs "
        "api_key_file or open_http.",
    )
    port: int = Field(
        8000, ge=0, le=65535, description="HTTP port of the gateway; 0 takes any free one."
    )
    api_key_file: Folder | None = Field(
        default=None,
        description="File of API keys, one a line, of which HTTP requests must bring one; readable "
        "by its owner alone.",
    )
    open_http: bool = Field(
        default=False,
        description="Let everybody who reaches a host that is not loopback use the API without a "
        "key.",
    )
    max_body_bytes: Bytes = Field(
        32 * 2**20, ge=1024, le=2**31, description="Largest HTTP request body (size)."
    )
    stalled_client_seconds: float = Field(
        60.0,
        ge=0,
        le=86400,
        description="Time after which a client that takes nothing of its answer is cut off; 0 "
        "waits for ever.",
    )
    model: FolderOrEmpty = Field(
        "",
        description="Hugging Face model folder (Llama, Mistral, Qwen2 or Qwen3); empty is the "
        "default model, SmolLM2-135M-Instruct.",
    )
    served_model_name: str = Field(
        "",
        max_length=256,
        description="Model name that clients use; empty is the folder's name.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="Where weights come from: the model folder, or with dummy from a random "
        "generator, for benchmarks; then the folder needs no weights.",
    )
    prefill: int = Field(1, ge=1, le=256, description="Number of prefill workers.")
    decode: int = Field(1, ge=1, le=256, description="Number of decode workers.")
    gateways: int = Field(
        1, ge=1, le=64, description="Number of gateway processes; they share the HTTP port."
    )
    combined: bool = Field(
        default=False,
        description="Run workers that do prefill and decode, instead of separate ones.",
    )
    combined_workers: int = Field(
        1, ge=1, le=256, description="Number of workers where combined is set."
    )
