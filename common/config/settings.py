"""All settings together; ``docs/settings.md`` is made from them."""

import os
from pathlib import Path
from typing import Self

from pydantic import model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from common.config.cluster import ClusterSettings
from common.config.engine import EngineSettings
from common.config.environment import ENVIRONMENT_PREFIX
from common.config.scheduling import SchedulingSettings
from common.config.serving import ServingSettings
from common.config.storage import StorageSettings

LOOPBACK = ("127.0.0.1", "localhost", "::1")
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

GROUPS = (ServingSettings, EngineSettings, SchedulingSettings, StorageSettings, ClusterSettings)
"""The settings by subject, in the order in which people are told of them."""


class Settings(
    ClusterSettings,
    StorageSettings,
    SchedulingSettings,
    EngineSettings,
    ServingSettings,
    BaseSettings,
):
    """All settings of one cluster, frozen; every process of it gets the same.

    Made directly it takes defaults and arguments alone; ``load_settings`` reads the layers. Fields
    stand in the order of ``GROUPS``: those of the last base come first.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENVIRONMENT_PREFIX,
        env_ignore_empty=True,
        validate_default=True,
        protected_namespaces=(),
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
        if self.combined and self.layer_ring:
            raise ValueError("layer_ring is for prefill workers and cannot be used with combined")
        if self.tensor_parallel > 1 and self.layer_ring:
            raise ValueError(
                "layer_ring is for workers of one rank and cannot be used with tensor_parallel"
            )
        if self.tensor_parallel > 1 and self.transport not in ("auto", "ranks"):
            raise ValueError(
                f"transport {self.transport} moves the blocks of one rank; with tensor_parallel it "
                "is auto or ranks"
            )
        if self.max_workers and self.max_workers < self.num_workers:
            raise ValueError(
                f"max_workers {self.max_workers} is below the {self.num_workers} workers that are "
                "started: raise it, or set it to 0 to neither add nor stop any"
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
        """Workers that are started with the cluster."""
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
        """Compute threads of one rank of one worker, at least 1.

        The cores are shared among as many workers as there may be, so that one which is started
        under load finds its own.
        """
        num_sharing = max(self.num_workers, self.max_workers) * self.tensor_parallel
        return self.threads or max(1, len(os.sched_getaffinity(0)) // num_sharing)

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
