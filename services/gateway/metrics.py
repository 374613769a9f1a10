"""The gateway's metrics, in Prometheus form."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_REQUEST_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)


class GatewayMetrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "flowpath_http_requests",
            "HTTP requests answered, by route and status code; probes and scrapes are left out.",
            ("route", "status"),
            registry=self.registry,
        )
        self.disconnects = Counter(
            "flowpath_client_disconnects",
            "Requests whose client went away before the answer was complete.",
            ("route",),
            registry=self.registry,
        )
        self.cut_by_drain = Counter(
            "flowpath_requests_cut_by_drain",
            "Requests that had not ended when a stop's drain_seconds were over.",
            registry=self.registry,
        )
        self.running = Gauge(
            "flowpath_num_requests_running",
            "Requests in work in this gateway; each prompt of a list is one.",
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "flowpath_prompt_tokens", "Prompt tokens of admitted requests.", registry=self.registry
        )
        self.cached_tokens = Counter(
            "flowpath_prompt_tokens_cached",
            "Prompt tokens whose KV was found instead of computed.",
            registry=self.registry,
        )
        self.generation_tokens = Counter(
            "flowpath_generation_tokens", "Tokens answered.", registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "flowpath_time_to_first_token_seconds",
            "From a streamed request's arrival until its first token is written to the socket.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_seconds = Histogram(
            "flowpath_inter_token_latency_seconds",
            "Between two tokens of one choice as they reach the gateway; a burst shares its time.",
            buckets=_INTER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "flowpath_e2e_request_latency_seconds",
            "From a completion's arrival until its answer is written whole.",
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )

    def render(self) -> bytes:
        """Return the text exposition of all metrics."""
        return generate_latest(self.registry)
