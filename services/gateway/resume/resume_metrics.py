"""Prometheus metrics of resumable requests; see `deploy/prometheus/metrics.md`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

# begun: a new request; resumed: a client got the rest of a stream, or an answer that was computed before; repeated: a
# request was run again because its process is gone; expired: a request was cancelled because its client stayed away;
# refused: a client asked in vain; unguarded: a request began that ends with its process, because there is no launcher,
# or it has no room or does not answer
EVENTS = ("begun", "resumed", "repeated", "expired", "refused", "unguarded")


class ResumeMetrics:
    """Counts what becomes of resumable requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        events = Counter(
            "twostroke_gateway_resumable_requests_total",
            "Resumable requests, by what became of them.",
            ["event"],
            registry=registry,
        )
        self._events = {event: events.labels(event) for event in EVENTS}

    def on(self, event: str) -> None:
        """Counts one of `EVENTS`."""
        self._events[event].inc()
