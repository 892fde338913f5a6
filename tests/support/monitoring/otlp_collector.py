"""A collector of OpenTelemetry spans for tests: a real OTLP/gRPC server in this process that stores all spans."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str  # all ids are hexadecimal
    span_id: str
    parent_span_id: str
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores the spans it receives. `endpoint` is the value for the setting `tracing.endpoint`."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []
        self._lock = threading.Lock()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            self._spans += read_spans(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans_of(self, trace_id: str) -> list[ReceivedSpan]:
        """All spans received so far, in the order of their start."""
        with self._lock:
            return sorted((span for span in self._spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    def wait_for(
        self, trace_id: str, is_complete: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 20.0
    ) -> list[ReceivedSpan]:
        """Waits until the trace is complete, and returns its spans."""
        deadline = time.monotonic() + timeout_s
        while not is_complete(spans := self.spans_of(trace_id)):
            assert time.monotonic() < deadline, f"after {timeout_s} s only {spans}"
            time.sleep(0.05)
        return spans


@contextlib.contextmanager
def running_collector(port: int = 0) -> Iterator[Collector]:
    """Listens at `port`; 0: at any."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


def read_spans(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource_spans in request.resource_spans:
        service = {each.key: each.value.string_value for each in resource_spans.resource.attributes}["service.name"]
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    {
                        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
                        for each in span.attributes
                    },
                )
