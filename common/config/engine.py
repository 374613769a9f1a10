"""Settings of one worker's engine and memory."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field

from common.config.value_types import Bytes

DEBUG_ALLOC_VARIABLE = "FLOWKV_DEBUG_ALLOC"


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"{value} is no power of two; 64 is usual")
    return value


class EngineSettings(BaseModel):
    """How each worker computes, and its memory."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")] = Field(
        "auto",
        description="Where a worker computes: cpu, cuda (workers take the host's GPUs in turn) or "
        "cuda:N; auto is cuda where there is a GPU.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights and, where kv_cache_dtype names none, of KV; auto is bfloat16 "
        "on a GPU, and on a CPU the fastest that it supports natively. float16 needs a GPU.",
    )
    kv_cache_dtype: Literal["auto", "float8_e4m3"] = Field(
        "auto",
        description="Type of KV; auto is dtype's. float8_e4m3 needs GPUs: it halves KV memory and "
        "transfers for some precision, with the model folder's k_scale and v_scale, or 1.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="Ranks of each worker, which compute every step together: each has its share "
        "of the heads and of the MLP, and a GPU of its own. It must divide the model's KV heads.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=4096,
        description="Compute threads of a worker; 0 shares the cores evenly among the workers that "
        "there may be.",
    )
    block_size: Annotated[int, AfterValidator(_power_of_two)] = Field(
        64, ge=8, le=1024, description="Tokens of one KV block; a power of two."
    )
    segment_min_size: Bytes = Field(
        64 * 2**20,
        ge=0,
        description="Smallest run of free KV memory worth leaving behind when a segment is cut "
        "(size).",
    )
    defragment: bool = Field(
        default=True,
        description="Whether idle workers move cached blocks so that free KV memory comes "
        "together.",
    )
    kv_bytes: Bytes = Field(
        0,
        ge=0,
        description="KV pool of each worker (size): blocks of all layers; 0 is 1 GiB on a CPU, and "
        "on a GPU what gpu_memory_fraction leaves.",
    )
    gpu_memory_fraction: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that its workers of this cluster take together: "
        "weights, KV pools and room to compute.",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="Whether a GPU's decode steps are captured at the start and replayed; without, "
        "they start sooner and run slower.",
    )
    max_model_len: int = Field(
        0, ge=0, description="Longest prompt plus output in tokens; 0 is the model's own limit."
    )
    max_num_batched_tokens: int = Field(
        0,
        ge=0,
        description="Token budget of one engine step, a multiple of block_size; 0 is 512 on a CPU "
        "and 4096 on a GPU (8192 where combined).",
    )
    max_num_seqs: int = Field(
        0,
        ge=0,
        le=65536,
        description="Most sequences in one engine step; 0 is 64 on a CPU and 256 on a GPU.",
    )
    swap_bytes: Bytes = Field(
        0,
        ge=0,
        description="Host memory of each worker for the KV of preempted sequences (size); what "
        "does not fit is computed again.",
    )
    layer_ring: Bytes = Field(
        0,
        ge=0,
        description="Memory in which a prefill worker keeps two layers' K and V of a step while "
        "the others pass through it from the pool and back (size); it must hold max_model_len "
        "tokens. On a GPU the ring is in its memory and the pool, of kv_bytes, on the host. 0 "
        "computes in the pool.",
    )
    slow_down: float = Field(
        1.0,
        ge=1,
        le=1000,
        description="Makes a worker's steps take this many times as long, to try a cluster of "
        "unequal workers on equal machines.",
    )
    debug_alloc: bool = Field(
        default=False,
        description=f"Log every operation of the KV allocator as JSON lines; its variable is "
        f"{DEBUG_ALLOC_VARIABLE}=1.",
    )
