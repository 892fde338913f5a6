"""Traces of requests through the services, with or without OpenTelemetry: decided once, at start.

Without an endpoint nothing is imported, kept or sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from services.common.config import TracingSection
from services.rpc.spans import NoTracer, Tracer


@contextlib.contextmanager
def tracing(section: TracingSection, service: str) -> Iterator[Tracer]:
    """The tracer of this process, as long as the context lasts."""
    if section.endpoint is None:
        yield NoTracer()
        return
    from services.rpc.otel import OtelTracer  # imported late: it takes time and memory

    tracer = OtelTracer(section.endpoint, section.sample_ratio, service)
    try:
        yield tracer
    finally:
        tracer.stop()
