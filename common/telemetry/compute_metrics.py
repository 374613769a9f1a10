"""A worker's metrics of what it computes."""

from prometheus_client import CollectorRegistry, Counter


class ComputeMetrics:
    """What one worker's steps computed, in the worker's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.flops = Counter(
            "flowpath_model_flops",
            "Floating-point operations of the model in the steps that ran (common/models/flops.py "
            "says which count); of all devices of the worker together.",
            registry=registry,
        )
        self.attention_seconds = Counter(
            "flowpath_attention_seconds",
            "Time of attention over prompts, estimated for the steps that ran from the cost that "
            "was fitted to steps with prompts alone; 0 where there were none of these.",
            registry=registry,
        )
