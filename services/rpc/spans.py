"""Spans of traces: the interface that the code uses, with or without OpenTelemetry.

Services pass contexts to each other as W3C `traceparent` strings (https://www.w3.org/TR/trace-context/). Times are on
the monotonic clock.
"""

from __future__ import annotations

from typing import Protocol

Attribute = str | int | float | bool


class Span(Protocol):
    """A part of a trace: an operation with a start and an end."""

    @property
    def traceparent(self) -> str:
        """The context for spans below this one, in this or another service; empty if there is no trace."""
        ...

    def add_child(self, name: str, start_s: float, end_s: float) -> None:
        """Adds a finished span below this one."""

    def end(self, error: str | None = None, **attributes: Attribute) -> None:
        """Ends the span; `error` says why it failed. Does nothing the second time."""


class Tracer(Protocol):
    """Starts spans."""

    is_enabled: bool

    def start(self, name: str, traceparent: str, start_s: float | None = None, **attributes: Attribute) -> Span:
        """Starts a span below `traceparent`, or in a new trace if that is empty or malformed.

        `start_s` is its start if that is in the past.
        """
        ...


class NoSpan:
    """A `Span` that leaves no trace."""

    traceparent = ""

    def add_child(self, name: str, start_s: float, end_s: float) -> None:
        """Does nothing."""

    def end(self, error: str | None = None, **attributes: Attribute) -> None:
        """Does nothing."""


class NoTracer:
    """The `Tracer` without a configured endpoint."""

    is_enabled = False

    def start(self, name: str, traceparent: str, start_s: float | None = None, **attributes: Attribute) -> Span:
        """A span that records nothing."""
        return NoSpan()
