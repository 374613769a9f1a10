"""The settings that the controller's decisions depend on."""

from dataclasses import dataclass
from typing import Literal

from common.config.settings import Settings
from common.messages.admin import RoleControl


@dataclass(frozen=True, slots=True)
class ControllerLimits:
    """Bounds and periods. A silent process whose pid still runs is suspect, not dead, until
    ``suspect_factor`` times ``death_seconds``. A request waits ``room_wait_seconds`` for a
    decode worker with room, and ``no_worker_wait_seconds`` where none is ready; so long it is
    queued, too, while no ready workers could serve it. ``ttft_seconds`` and ``tpot_seconds`` are
    what load is measured against. ``store_read`` says which sides read from the store,
    ``store_load`` whether that is weighed, ``dualpath_preset`` how far ahead ``dualpath`` looks.
    ``hot_replicas`` workers are to hold a prefix in much use; 0 copies none ahead of need.
    """

    heartbeat_seconds: float = 0.2
    death_seconds: float = 1.5
    suspect_factor: float = 5.0
    max_queue: int = 1024
    request_timeout_seconds: float = 0.0
    room_wait_seconds: float = 60.0
    no_worker_wait_seconds: float = 10.0
    retry_seconds: float = 0.02
    stall_seconds: float = 20.0
    retry_after_seconds: float = 1.0
    policy: str = "least_loaded"
    role_control: RoleControl = RoleControl.MANUAL
    ttft_seconds: float = 2.0
    tpot_seconds: float = 0.05
    store_read: Literal["dual", "prefill", "decode"] = "dual"
    store_load: Literal["auto", "always"] = "auto"
    dualpath_preset: Literal["small", "medium", "large", "adaptive"] = "medium"
    hot_replicas: int = 0

    @property
    def settle_seconds(self) -> float:
        """How long after its start a controller expects workers that it has not heard from yet."""
        return 2 * self.death_seconds

    @classmethod
    def of(cls, settings: Settings) -> "ControllerLimits":
        """Take them from the settings."""
        return cls(
            heartbeat_seconds=settings.heartbeat_seconds,
            death_seconds=settings.death_seconds,
            max_queue=settings.max_queue,
            request_timeout_seconds=settings.request_timeout_seconds,
            policy=settings.policy,
            role_control=RoleControl(settings.roles),
            ttft_seconds=settings.ttft_slo_seconds,
            tpot_seconds=settings.decode_sla / 1000,
            store_read=settings.store_read,
            store_load=settings.store_load,
            dualpath_preset=settings.dualpath_preset,
            hot_replicas=settings.hot_replicas,
        )
