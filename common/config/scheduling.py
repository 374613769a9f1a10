"""Settings of scheduling: where requests go, who does what, and how much is taken on."""

from typing import Literal

from pydantic import BaseModel, Field


class SchedulingSettings(BaseModel):
    """Where requests go, which worker does what, and how much is taken on."""

    policy: Literal[
        "round_robin",
        "random",
        "least_loaded",
        "power_of_two",
        "prefix_aware",
        "flowkv",
        "dualpath",
    ] = Field(
        "flowkv",
        description="How the controller places requests: flowkv, or dualpath for KV that is mostly "
        "read from a store; the others are for comparison.",
    )
    dualpath_preset: Literal["small", "medium", "large", "adaptive"] = Field(
        "medium",
        description="How much work the policy dualpath gives a worker ahead: medium is 5 s of "
        "computing, and 3 s of reads before other hosts are preferred; small half of it, large "
        "twice; adaptive moves between them as links and workers are used.",
    )
    hot_replicas: int = Field(
        0,
        ge=0,
        le=256,
        description="Workers for prompts that are to hold a prefix in much use: idle ones get it "
        "copied before a request needs it there, under the policies flowkv, dualpath and "
        "prefix_aware; 0 copies none ahead of need.",
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
    compute_quota: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="Most milliseconds that the prompts of one step may take, as predicted from "
        "earlier steps by their tokens and what these attend to; 0 is no bound but "
        "max_num_batched_tokens.",
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
        description="Most workers, those of the start counted, that `flowpath serve` keeps on this "
        "host under load; 0 neither adds nor stops any.",
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
    request_timeout_seconds: float = Field(
        0.0, ge=0, description="Longest life of a request; 0 is none."
    )
    max_resumes: int = Field(
        3,
        ge=0,
        le=16,
        description="How often a request that loses its worker is placed again, to go on after the "
        "tokens that it has; 0 ends it with an error that names the worker.",
    )
