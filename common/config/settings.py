"""Every setting with its meaning, default and bounds; ``docs/settings.md`` is made from it."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from common.config.folders import (
    MAX_RUN_DIR_BYTES,
    default_cache_dir,
    default_log_dir,
    default_run_dir,
)
from common.config.sizes import parse_size

ENVIRONMENT_PREFIX = "FLOWPATH_"
DEBUG_ALLOC_VARIABLE = "FLOWKV_DEBUG_ALLOC"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
environment = os.environ  # noqa: TID251 - the one place that reads it


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"{value} is no power of two; 64 is usual")
    return value


def _short_enough(path: Path) -> Path:
    size = len(str(path.absolute()).encode())
    if size > MAX_RUN_DIR_BYTES:
        raise ValueError(
            f"is {size} bytes long, over {MAX_RUN_DIR_BYTES}: the sockets in it would have paths "
            "that the kernel cuts; choose a shorter one"
        )
    return path.absolute()


def _endpoint_with_key(endpoint: str) -> str:
    if endpoint and not re.fullmatch(r"tcp://[^\s?]+:[0-9]{1,5}\?key=[0-9a-f]{64}", endpoint):
        raise ValueError(
            "is no endpoint of a controller; copy what `flowpath serve` prints on its host: "
            "tcp://address:port?key=64 hex digits"
        )
    return endpoint


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _absolute_or_empty(path: str) -> str:
    return str(_absolute(Path(path))) if path else ""


Bytes = Annotated[int, BeforeValidator(parse_size)]
Folder = Annotated[Path, AfterValidator(_absolute)]


class Settings(BaseSettings):
    """All settings of one cluster, frozen; every process of it gets the same.

    Made directly it takes defaults and arguments alone; ``load_settings`` reads the layers.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENVIRONMENT_PREFIX,
        env_ignore_empty=True,
        validate_default=True,
        protected_namespaces=(),
    )

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address that the gateway listens on; one that is not loopback needs "
        "api_key_file or open_http.",
    )
    port: int = Field(
        8000, ge=0, le=65535, description="HTTP port of the gateway; 0 takes any free one."
    )
    model: Annotated[str, AfterValidator(_absolute_or_empty)] = Field(
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
    block_size: Annotated[int, AfterValidator(_power_of_two)] = Field(
        64, ge=8, le=1024, description="Tokens of one KV block; a power of two."
    )
    segment_min_size: Bytes = Field(
        64 * 2**20,
        ge=0,
        description="Smallest run of free KV memory worth leaving behind when a segment is cut "
        "(size).",
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
    max_queue: int = Field(
        1024,
        ge=1,
        description="Most requests that wait for their decode to start; one more is refused with "
        "429.",
    )
    max_open_requests: int = Field(
        4096,
        ge=1,
        description="Most requests in work in one gateway; one more is refused with 429.",
    )
    policy: Literal[
        "round_robin", "random", "least_loaded", "power_of_two", "prefix_aware", "flowkv"
    ] = Field(
        "flowkv",
        description="How the controller places requests; all but flowkv are for comparison.",
    )
    roles: Literal["auto", "manual"] = Field(
        "auto",
        description="Whether load may let workers do the other role's work and change roles, or "
        "only `flowpath switch-role` does.",
    )
    prefill_threshold: int = Field(
        8,
        ge=1,
        le=65536,
        description="Waiting prompts beyond which a worker lets prefill lead its steps.",
    )
    decode_sla: float = Field(
        50.0,
        gt=0,
        le=1e6,
        description="Milliseconds between two tokens beyond which a worker lets decode lead its "
        "steps.",
    )
    ttft_slo_seconds: float = Field(
        2.0,
        gt=0,
        le=3600,
        description="Time to first token that the controller aims at: more work than fits into it "
        "counts as overload.",
    )
    max_workers: int = Field(
        0,
        ge=0,
        le=256,
        description="Most workers that `flowpath serve` keeps under load; 0 neither adds nor stops "
        "any.",
    )
    swap_bytes: Bytes = Field(
        0,
        ge=0,
        description="Host memory of each worker for the KV of preempted sequences (size); what "
        "does not fit is computed again.",
    )
    slow_down: float = Field(
        1.0,
        ge=1,
        le=1000,
        description="Makes a worker's steps take this many times as long, to try a cluster of "
        "unequal workers on equal machines.",
    )
    max_resumes: int = Field(
        0,
        ge=0,
        le=16,
        description="How often a request that loses its worker is placed again, to go on after the "
        "tokens that it has; 0 ends it with an error that names the worker.",
    )
    stalled_client_seconds: float = Field(
        60.0,
        ge=0,
        le=86400,
        description="Time after which a client that takes nothing of its answer is cut off; 0 "
        "waits for ever.",
    )
    metrics_port_base: int = Field(
        0,
        ge=0,
        le=65000,
        description="First of the loopback ports on which each process serves its own metrics: "
        "controller, gateways, workers, in this order; 0 opens none.",
    )
    threads: int = Field(
        0, ge=0, le=4096, description="Compute threads of a worker; 0 shares the cores evenly."
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
    cluster_host: str = Field(
        "",
        max_length=256,
        description="This host's address for workers and gateways on other hosts; empty keeps the "
        "cluster on one host, over private socket files.",
    )
    control_port: int = Field(
        7400, ge=0, le=65535, description="TCP port of the controller where cluster_host is set."
    )
    controller: Annotated[str, AfterValidator(_endpoint_with_key)] = Field(
        "",
        max_length=512,
        description="Endpoint of a controller on another host, as `flowpath serve` prints it there "
        "(tcp://address:port?key=...).",
    )
    worker_id: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,31})?$",
        description="Name in the cluster of a worker or gateway started on its own; empty is its "
        "program's name and 0.",
    )
    keys: Folder | None = Field(
        default=None,
        description="Key folder of this host (`flowpath keygen`); needed as soon as processes talk "
        "over TCP.",
    )
    transport: Literal["auto", "shm", "tcp", "cuda_ipc", "nccl", "layerwise", "gather_buffer"] = (
        Field(
            "auto",
            description="How KV moves between workers; auto takes the best that both sides offer. "
            "layerwise and gather_buffer are what cuda_ipc is compared with.",
        )
    )
    run_dir: Annotated[Folder, AfterValidator(_short_enough)] = Field(
        default_factory=lambda data: default_run_dir(environment, data["port"]),
        description="Folder of sockets, private to the user (mode 0700); by default in "
        "XDG_RUNTIME_DIR or the temporary folder, one per user and port.",
    )
    log_dir: Folder = Field(
        default_factory=lambda data: default_log_dir(environment, data["port"]),
        description="Folder of log files, one per process; by default flowpath/PORT in "
        "XDG_STATE_HOME or ~/.local/state.",
    )
    cache_dir: Folder = Field(
        default_factory=lambda: default_cache_dir(environment),
        description="Folder of converted models; by default flowpath in XDG_CACHE_HOME or "
        "~/.cache.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged."
    )
    log_stderr: bool = Field(
        default=False,
        description="Whether a program started on its own writes its log lines to standard error "
        "too, as containers want it.",
    )
    heartbeat_seconds: float = Field(
        0.2, ge=0.01, le=60, description="Time between heartbeats to the controller."
    )
    death_seconds: float = Field(
        1.5,
        gt=0,
        le=600,
        description="Silence after which a process is taken for dead; at least three heartbeats. "
        "One on the controller's host that still runs gets five times as long.",
    )
    lease_seconds: float = Field(
        5.0, ge=0.05, le=600, description="Lease of a handoff, renewed by both workers."
    )
    request_timeout_seconds: float = Field(
        0.0, ge=0, description="Longest life of a request; 0 is none."
    )
    drain_seconds: float = Field(
        30.0, ge=0, le=3600, description="Time that running requests get to finish at a stop."
    )
    max_body_bytes: Bytes = Field(
        32 * 2**20, ge=1024, le=2**31, description="Largest HTTP request body (size)."
    )
    debug_alloc: bool = Field(
        default=False,
        description=f"Log every operation of the KV allocator as JSON lines; its variable is "
        f"{DEBUG_ALLOC_VARIABLE}=1.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_num_batched_tokens % self.block_size:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is no multiple of "
                f"block_size {self.block_size}"
            )
        if self.host not in LOOPBACK and not (self.api_key_file or self.open_http):
            raise ValueError(
                f"setting host: {self.host} is reachable from other machines: set api_key_file to "
                "a file of keys, or open_http to serve everybody"
            )
        if (self.cluster_host or self.controller) and self.keys is None:
            raise ValueError(
                "cluster_host and controller make processes talk over TCP, which needs keys: make "
                "them with `flowpath keygen FOLDER` and set keys to the folder"
            )
        if self.controller and not self.cluster_host:
            raise ValueError(
                "controller is on another host, so this one needs cluster_host: the address at "
                "which the others reach it"
            )
        if self.death_seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                f"death_seconds {self.death_seconds} is under three heartbeat_seconds "
                f"({self.heartbeat_seconds}): one late heartbeat would end a worker"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take arguments alone; the layers are merged in ``load_settings``."""
        return (init_settings,)

    @property
    def num_workers(self) -> int:
        """Workers of the whole cluster."""
        return self.combined_workers if self.combined else self.prefill + self.decode

    @property
    def has_weights(self) -> bool:
        """Whether the weights are those of the model folder."""
        return self.load_format != "dummy"

    @property
    def process_names(self) -> tuple[str, ...]:
        """Every process of the cluster by its id: controller, gateways, workers."""
        workers = (
            [f"combined-{number}" for number in range(self.combined_workers)]
            if self.combined
            else [
                f"{role}-{number}"
                for role, count in (("prefill", self.prefill), ("decode", self.decode))
                for number in range(count)
            ]
        )
        gateways = [f"gateway-{number}" for number in range(self.gateways)]
        return ("controller", *gateways, *workers)

    def metrics_port(self, process_id: str) -> int | None:
        """Return the loopback port of a process's metrics; None when none is asked for.

        A process that is not among ``process_names`` has none.
        """
        if not self.metrics_port_base or process_id not in self.process_names:
            return None
        return self.metrics_port_base + self.process_names.index(process_id)

    @property
    def num_threads(self) -> int:
        """Compute threads of one worker, at least 1."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.num_workers)

    @property
    def model_name(self) -> str:
        """The model's name as clients use it."""
        if self.served_model_name:
            return self.served_model_name
        return Path(self.model).name if self.model else DEFAULT_MODEL_NAME

    @property
    def url(self) -> str:
        """Where the gateway answers."""
        return f"http://{bracketed(self.host)}:{self.port}"

    @property
    def control_address(self) -> str:
        """Where this host's controller binds the control channel."""
        if self.cluster_host:
            return f"tcp://{bracketed(self.cluster_host)}:{self.control_port}"
        return f"ipc://{self.run_dir}/controller.control"

    def socket_address(self, name: str) -> str:
        """Where a process of this host binds a channel that other processes connect to.

        On TCP any free port is taken.
        """
        if self.cluster_host:
            return f"tcp://{bracketed(self.cluster_host)}:0"
        return f"ipc://{self.run_dir}/{name}"

    @property
    def admin_endpoint(self) -> str:
        """The controller's socket for the operator; always a private file of its host."""
        return f"ipc://{self.run_dir}/controller.admin"


def bracketed(host: str) -> str:
    """Return a host as it stands in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
