"""Spans as a collector receives them; without an endpoint there are none."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import opentelemetry.sdk.trace
import pytest

from services.common.config import TracingSection
from services.rpc import otel
from services.rpc.tracing import tracing
from tests.support.cluster import free_port
from tests.support.monitoring.otlp_collector import running_collector

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # the example of the W3C specification
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


def test_a_span_joins_the_trace_and_passes_it_on() -> None:
    with running_collector() as collector:
        with tracing(TracingSection(endpoint=collector.endpoint), "dense") as tracer:
            now_s = time.monotonic()
            span = tracer.start("outer", TRACEPARENT, now_s - 3, answer=42)
            span.add_child("inner", now_s - 2, now_s - 1)
            inner_parent = span.traceparent
            span.end("it failed", reason="test")
            span.end()
        outer, inner = collector.spans_of(TRACE_ID)  # sent at the end of the context
    assert (outer.name, outer.service, outer.parent_span_id) == ("outer", "twostroke-dense", SPAN_ID)
    assert (inner.name, inner.parent_span_id) == ("inner", outer.span_id)
    assert inner_parent == f"00-{TRACE_ID}-{outer.span_id}-01"
    assert outer.is_error and outer.attributes == {"twostroke.answer": 42, "twostroke.reason": "test"}
    assert inner.end_ns - inner.start_ns == pytest.approx(1e9, abs=1e3)
    assert inner.start_ns - outer.start_ns == pytest.approx(1e9, abs=1e3)
    assert abs(time.time_ns() - outer.start_ns - 3e9) < 30e9  # spans have wall-clock times


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_step_of_the_wall_clock_changes_no_duration(monkeypatch: pytest.MonkeyPatch, step_s: int) -> None:
    with running_collector() as collector:
        with tracing(TracingSection(endpoint=collector.endpoint), "dense") as tracer:
            now_s, real = time.monotonic(), time.time_ns
            span = tracer.start("outer", TRACEPARENT, now_s - 3)
            for module in (time, opentelemetry.sdk.trace):
                monkeypatch.setattr(module, "time_ns", lambda: real() + step_s * 10**9)
            span.add_child("inner", now_s - 2, now_s - 1)
            span.end()
            tracer.start("late", TRACEPARENT).end()
            taken_s = time.monotonic() - now_s
            monkeypatch.undo()
        spans = {span.name: span for span in collector.spans_of(TRACE_ID)}
    outer, inner, late = (spans[name] for name in ("outer", "inner", "late"))
    assert inner.start_ns - outer.start_ns == pytest.approx(1e9, abs=1e3)
    assert 3e9 <= outer.end_ns - outer.start_ns <= (3 + taken_s) * 1e9 + 1e3
    assert abs(late.start_ns - outer.start_ns - (3 + step_s) * 1e9) < 30e9, "a later span has the clock's new time"


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{TRACE_ID}-{SPAN_ID}", f"ff-{TRACE_ID}-{SPAN_ID}-01"])
def test_a_missing_or_malformed_parent_begins_a_new_trace(traceparent: str) -> None:
    with (
        running_collector() as collector,
        tracing(TracingSection(endpoint=collector.endpoint), "gateway") as tracer,
    ):
        trace_id = tracer.start("request", traceparent).traceparent.split("-")[1]
        assert trace_id != TRACE_ID and int(trace_id, 16) > 0


def test_a_missing_collector_delays_nothing() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    start = time.monotonic()
    with tracing(TracingSection(endpoint=endpoint), "gateway") as tracer:
        for _ in range(5000):  # more than the queue holds
            tracer.start("request", TRACEPARENT).end()
        made_s = time.monotonic() - start
    assert made_s < 10.0 and time.monotonic() - start < 20.0


def test_a_collector_that_is_away_for_a_moment_gets_the_spans_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "EXPORT_INTERVAL_MS", 10)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with tracing(TracingSection(endpoint=f"http://127.0.0.1:{port}"), "dense") as tracer:
            tracer.start("request", TRACEPARENT).end()
            listener.settimeout(30.0)
            connection, _ = listener.accept()  # the spans are being sent
            listener.close()
            connection.close()
            with running_collector(port) as collector:
                collector.wait_for(TRACE_ID, lambda spans: len(spans) == 1)


def test_without_an_endpoint_nothing_is_imported_or_passed_on() -> None:
    code = (
        "import sys\n"
        "from services.common.config import TracingSection\n"
        "from services.rpc.tracing import tracing\n"
        "with tracing(TracingSection(), 'dense') as tracer:\n"
        f"    span = tracer.start('x', {TRACEPARENT!r})\n"
        "    span.add_child('y', 0.0, 1.0); span.end()\n"
        "    assert span.traceparent == '' and not tracer.is_enabled\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
