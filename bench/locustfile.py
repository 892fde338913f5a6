"""Users for locust: each requests a streamed answer, reads it, pauses, and repeats, over HTTP or gRPC.

`locust -f bench/locustfile.py --headless -u 16 -r 4 -t 1m --host http://127.0.0.1:8080 --grpc-address 127.0.0.1:50051`

In addition to requests, locust's tables show two events per answer, by protocol: `TTFT` in ms, and `tokens/s`, whose
"response time" is a rate: the output tokens after the first, divided by the time from the first to the last.
"""

from __future__ import annotations

import json
import random
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
from grpc.experimental import gevent as grpc_gevent
from locust import HttpUser, User, events, task
from locust.env import Environment

from services.pb import gateway_pb2, gateway_pb2_grpc, sampling_pb2

grpc_gevent.init_gevent()  # otherwise a gRPC call would block all users of this process

PROMPTS = ("San Francisco is a", "The capital of", "Twostroke has two", "Once upon a time", "The dense worker owns")
REQUEST_TIMEOUT_S = 600.0


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    """Adds options to the command line and to locust's web page."""
    parser.add_argument("--grpc-address", default="127.0.0.1:50051", help="address of the gateway, for gRPC users")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--think-s", type=float, default=1.0, help="mean pause of a user, seconds")
    parser.add_argument("--api-key", default="", help="API key, if the gateway requires one")


class _Thinking:
    environment: Environment

    def wait_time(self) -> float:
        """An exponentially distributed pause, so that users do not send in step."""
        mean_s = self.environment.parsed_options.think_s
        return random.expovariate(1 / mean_s) if mean_s > 0 else 0.0


class HttpStreamUser(_Thinking, HttpUser):
    """Reads server-sent events of /v1/completions."""

    @task
    def complete(self) -> None:
        options = self.environment.parsed_options
        body = {
            "prompt": random.choice(PROMPTS),
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        timing = _Timing()
        with self.client.post(
            "/v1/completions",
            json=body,
            headers=headers,
            stream=True,
            timeout=REQUEST_TIMEOUT_S,
            catch_response=True,
        ) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {response.text[:200]}")
                return
            error = _read_events(response.iter_lines(), timing)
            if error is not None:
                response.failure(error)
                return
            response.success()
        timing.report(self.environment, "HTTP")


class GrpcStreamUser(_Thinking, User):
    """Reads GenerateStream."""

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self._channel = grpc.insecure_channel(options.grpc_address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)
        self._metadata = [("authorization", f"Bearer {options.api_key}")] if options.api_key else []

    def on_stop(self) -> None:
        self._channel.close()

    @task
    def generate(self) -> None:
        request = gateway_pb2.GenerateRequest(
            prompt=random.choice(PROMPTS),
            sampling=sampling_pb2.SamplingParams(temperature=0.0),
            max_tokens=self.environment.parsed_options.max_tokens,
            ignore_eos=True,
        )
        timing, error, num_bytes = _Timing(), None, 0
        try:
            for chunk in self._stub.GenerateStream(request, timeout=REQUEST_TIMEOUT_S, metadata=self._metadata):
                num_bytes += chunk.ByteSize()
                timing.add(len(chunk.token_ids))
        except grpc.RpcError as failure:
            error = failure
        self.environment.events.request.fire(
            request_type="gRPC",
            name="GenerateStream",
            response_time=timing.elapsed_ms(),
            response_length=num_bytes,
            exception=error,
            context={},
        )
        if error is None:
            timing.report(self.environment, "gRPC")


class _Timing:
    """Arrivals of one answer's tokens."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._num_first = 0  # number of tokens in the first arrival
        self.num_tokens = 0

    def add(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s, self._num_first = self._last_s, num_tokens
        self.num_tokens += num_tokens

    def elapsed_ms(self) -> float:
        return 1e3 * (time.perf_counter() - self._start_s)

    def report(self, environment: Environment, protocol: str) -> None:
        """Fires the two events of an answer that ended well."""
        if self._first_s is None:
            return
        _fire(environment, protocol, "TTFT", 1e3 * (self._first_s - self._start_s))
        if self._last_s > self._first_s:
            rate = (self.num_tokens - self._num_first) / (self._last_s - self._first_s)
            _fire(environment, protocol, "tokens/s", rate)


def _read_events(lines: Any, timing: _Timing) -> str | None:
    """Records the tokens of an event stream. Returns an error, or None."""
    num_said, is_done = None, False
    for line in lines:
        if line == b"data: [DONE]":
            is_done = True
        elif line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                return f"an error in the stream: {event['error']}"
            timing.add(sum(1 for choice in event["choices"] if choice["text"]))
            if event.get("usage"):
                num_said = event["usage"]["completion_tokens"]
    if not is_done:
        return "the stream ended without [DONE]"
    if num_said is None:
        return "the stream told no usage"
    timing.num_tokens = num_said  # an event may carry several tokens, or the rest of one
    return None


def _fire(environment: Environment, protocol: str, name: str, value: float) -> None:
    environment.events.request.fire(
        request_type=protocol, name=name, response_time=value, response_length=0, exception=None, context={}
    )
