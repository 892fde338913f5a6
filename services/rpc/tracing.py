"""Traces of requests through the services: what the code sees, with or without OpenTelemetry behind it.

`tracing` decides once, at start. Without an endpoint nothing is imported, kept or sent. Contexts travel between
services as W3C `traceparent` strings (https://www.w3.org/TR/trace-context/). Times are on the monotonic clock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from services.common.config import TracingSection

Attribute = str | int | float | bool


class Span(Protocol):
    """Something that takes time, as part of a trace."""

    @property
    def traceparent(self) -> str:
        """For spans below this one, in this service or the next; empty if there is no trace."""
        ...

    def add_child(self, name: str, start_s: float, end_s: float) -> None:
        """A span below this one that is over already."""

    def end(self, error: str | None = None, **attributes: Attribute) -> None:
        """It is over; `error` says why it failed. Ending it twice does nothing."""


class Tracer(Protocol):
    """Makes spans."""

    is_enabled: bool

    def start(self, name: str, traceparent: str, start_s: float | None = None, **attributes: Attribute) -> Span:
        """A span below `traceparent`, or of a new trace if that is empty or malformed; from now on if not earlier."""
        ...


class NoSpan:
    """A `Span` that leaves no trace."""

    traceparent = ""

    def add_child(self, name: str, start_s: float, end_s: float) -> None:
        """See `Span`."""

    def end(self, error: str | None = None, **attributes: Attribute) -> None:
        """See `Span`."""


class NoTracer:
    """A `Tracer` for those who configured none."""

    is_enabled = False

    def start(self, name: str, traceparent: str, start_s: float | None = None, **attributes: Attribute) -> Span:
        """See `Tracer`."""
        return NoSpan()


@contextlib.contextmanager
def tracing(section: TracingSection, service: str) -> Iterator[Tracer]:
    """The tracer of this process, as long as the context lasts."""
    if section.endpoint is None:
        yield NoTracer()
        return
    from services.rpc.otel import OtelTracer  # time and memory that most do not need

    tracer = OtelTracer(section.endpoint, section.sample_ratio, service)
    try:
        yield tracer
    finally:
        tracer.stop()
