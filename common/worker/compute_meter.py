"""From the steps that ran to the metrics of what they computed."""

from common.models.config import ModelConfig
from common.models.flops import step_flops
from common.scheduler.steps import RowFailed
from common.telemetry.compute_metrics import ComputeMetrics
from common.worker.stepping import FinishedStep


class ComputeMeter:
    """Counts steps. Without ``config`` nothing is known of their operations: 0 are counted."""

    def __init__(self, metrics: ComputeMetrics, config: ModelConfig | None) -> None:
        self._metrics = metrics
        self._config = config

    def note(self, step: FinishedStep, attention_seconds: float) -> None:
        """Count a finished step, unless all of it failed."""
        if all(isinstance(result, RowFailed) for result in step.results):
            return
        self._metrics.attention_seconds.inc(attention_seconds)
        if self._config is not None:
            self._metrics.flops.inc(step_flops(self._config, step.plan.rows))
