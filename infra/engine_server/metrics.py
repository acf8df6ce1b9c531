"""What /metrics shows; one registry for each server, so that two in one process do not mix."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "k3_requests", "Answers, by endpoint and status", ["endpoint", "status"], registry=registry
        )
        self.running = Gauge("k3_running", "Turns in the engine", registry=registry)
        self.waiting = Gauge("k3_waiting", "Turns in line", registry=registry)
        self.aborted = Counter("k3_aborted", "Turns whose client went away or whose drain ran out", registry=registry)
        self.faults = Counter("k3_engine_faults", "Turns that the engine failed", registry=registry)
        self.prompt_tokens = Counter("k3_prompt_tokens", "Tokens of finished turns' prompts", registry=registry)
        self.cached_tokens = Counter("k3_cached_tokens", "Of these, those that were computed before", registry=registry)
        self.generated_tokens = Counter("k3_generated_tokens", "Tokens sampled", registry=registry)
        self.first_token_s = Histogram(
            "k3_time_to_first_token_seconds", "From the request's arrival", buckets=SECONDS, registry=registry
        )
        self.token_s = Histogram(
            "k3_time_per_output_token_seconds", "After the first, mean of a turn", buckets=SECONDS, registry=registry
        )
        self.policy_step = Gauge("k3_policy_step", "The version that is served; -1 for none", registry=registry)
