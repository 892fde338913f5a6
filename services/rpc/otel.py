"""Tracing by OpenTelemetry: a thread sends the spans in batches over OTLP/gRPC.

The queue is bounded. If the collector is slow or absent, spans are dropped; no request waits for it.
"""

from __future__ import annotations

import threading
import time

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services import VERSION
from services.rpc.spans import Attribute

MAX_NUM_PENDING = 2048  # spans
EXPORT_INTERVAL_MS = 1000
EXPORT_TIMEOUT_S = 10.0  # of one batch, retries included, the first of which comes after a second
END_TIMEOUT_S = 2.0  # of the last batches, when the process ends

_PROPAGATOR = TraceContextTextMapPropagator()


class OtelTracer:
    """A `services.rpc.spans.Tracer` that exports spans to a collector."""

    is_enabled = True

    def __init__(self, endpoint: str, sample_ratio: float, service: str) -> None:
        resource = Resource({SERVICE_NAME: f"twostroke-{service}", SERVICE_VERSION: VERSION})
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))  # the client's decision takes precedence
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S),
                max_queue_size=MAX_NUM_PENDING,
                max_export_batch_size=MAX_NUM_PENDING,
                schedule_delay_millis=EXPORT_INTERVAL_MS,
            )
        )
        self._tracer = self._provider.get_tracer("twostroke", VERSION)

    def start(self, name: str, traceparent: str, start_s: float | None = None, **attributes: Attribute) -> OtelSpan:
        """Starts a span below `traceparent`, at `start_s` on the monotonic clock, or now."""
        return OtelSpan(self, name, traceparent, start_s, attributes)

    def begin(self, name: str, traceparent: str, start_ns: int, attributes: dict[str, Attribute]) -> trace.Span:
        """Starts a span of the library, `start_ns` since 1970; the names of its attributes get the project's prefix."""
        return self._tracer.start_span(
            name,
            context=_PROPAGATOR.extract({"traceparent": traceparent}),
            attributes=prefixed(attributes),
            start_time=start_ns,
        )

    def stop(self) -> None:
        """Sends the remaining spans; those that take longer than `END_TIMEOUT_S` are lost."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(END_TIMEOUT_S)


class OtelSpan:
    """A `services.rpc.spans.Span` around a span of the library."""

    def __init__(
        self,
        tracer: OtelTracer,
        name: str,
        traceparent: str,
        start_s: float | None,
        attributes: dict[str, Attribute],
    ) -> None:
        self._tracer = tracer
        # Of all times of this span and its children, so that a step of the wall clock changes none of their durations.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._span = tracer.begin(name, traceparent, self._to_ns(start_s), attributes)

    @property
    def traceparent(self) -> str:
        """The span's context as a W3C string."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return carrier["traceparent"]

    def add_child(self, name: str, start_s: float, end_s: float) -> None:
        """Adds a finished span below this one; times are on the monotonic clock."""
        child = self._tracer.begin(name, self.traceparent, self._to_ns(start_s), {})
        child.end(self._to_ns(end_s))

    def end(self, error: str | None = None, **attributes: Attribute) -> None:
        """Ends the span, with status ERROR if there is an `error`. Does nothing the second time."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(prefixed(attributes))
        if error is not None:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        self._span.end(self._to_ns(None))

    def _to_ns(self, at_s: float | None) -> int:
        """Nanoseconds since 1970 at a time on the monotonic clock, or now."""
        return self._epoch_ns + (time.monotonic_ns() if at_s is None else int(at_s * 1e9))


def prefixed(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    """The attributes with the project's prefix in their names."""
    return {f"twostroke.{name}": value for name, value in attributes.items()}
