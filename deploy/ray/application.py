"""A Ray Serve application whose replicas are Twostroke servers: `serve run deploy/ray/serve.yaml`.

    client ─ Serve's proxy ─ Ingress ─ Serve's router of prefixes ─ Server ─ twostroke serve, at a Unix socket

`Server` starts a whole server (launcher, workers, gateway) as its child and passes requests on. `Ingress` reads a
request's prompt, by which the router chooses a server whose prefix cache may have it. docs/ray.md says more.
"""

import asyncio
import contextlib
import json
import logging
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pydantic
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .bodies import Bodies, Refused  # the package has another name in a checkout than where it is installed

log = logging.getLogger("ray.serve")

# The public name of this class, in `ray.serve.llm`, cannot be imported without vLLM.
PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
PREFIX_ROUTER_OPTIONS = {"imbalanced_threshold": 8, "do_eviction": True}
NUM_SEQUENCES, NUM_WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
PROMPT_FIELDS = ("messages", "prompt", "input", "text", "input_ids")
MAX_PROMPT_CHARACTERS = 20_000
RETRY_AFTER_S = 1
PROBE_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 60.0
MAX_BODY_BYTES = 2 * 2**20  # the default of the setting gateway.max_body_bytes, at which the server would stop
MOST_REQUESTS = 4096  # of one replica: the server itself has the queue, and limits it
# Between two hosts; the sockets here have their own.
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host"})
# Stops a process when standard input ends, which the replica holds, and kills it if it does not stop: no server
# outlives its replica, however that dies. A killed launcher takes its services with it.
GUARD = 'read -r _; kill -TERM "$1" && ! timeout "$2" tail --pid="$1" -f /dev/null && kill -KILL "$1"'


class Options(pydantic.BaseModel):
    """The arguments of the application, in its section `args` of `serve.yaml`."""

    model_config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())

    command: list[str] = ["twostroke", "serve"]  # starts a server; more arguments may follow, such as a model
    settings: dict[str, str | int | float | bool] = {}  # of its config: section.key to value
    num_gpus: float = pydantic.Field(0, ge=0)  # of one replica
    num_cpus: float = pydantic.Field(1, gt=0)
    min_replicas: int = pydantic.Field(1, ge=1)
    max_replicas: int = pydantic.Field(1, ge=1)
    sequences_per_replica: float = pydantic.Field(32, gt=0)  # running and waiting ones; for more, replicas are added
    upscale_delay_s: float = pydantic.Field(10, ge=0)
    downscale_delay_s: float = pydantic.Field(300, ge=0)
    look_back_s: float = pydantic.Field(20, gt=0)  # over which the number of sequences is averaged
    ingress_replicas: int = pydantic.Field(2, ge=1)
    # What an ingress takes of its node. By default it runs on the head node, without which Ray does not run at all:
    # of a stream through an ingress that dies, clients see only that it ends.
    ingress_resources: dict[str, float] = {"node:__internal_head__": 0.001}
    start_timeout_s: float = pydantic.Field(600, gt=0)  # for a server to load its model


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request on its way to a server. The router looks at `prompt`."""

    method: str
    target: str  # path and query
    headers: dict[str, str]
    body: bytes
    prompt: str


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an answer; its body follows in chunks."""

    status: int
    headers: dict[str, str]


class Server:
    """A deployment: one server and the way to it."""

    async def __init__(self, options: Options) -> None:
        """Returns when the server can answer. Raises `RuntimeError` if it ends, or takes too long."""
        self._directory = Path(tempfile.mkdtemp(prefix="twostroke-"))
        self._process, self._guard = _start(options, self._directory)
        self._session = aiohttp.ClientSession(
            "http://localhost",
            connector=aiohttp.UnixConnector(str(self._directory / "http.sock"), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        deadline = time.monotonic() + options.start_timeout_s
        while not await self._answers("/ready"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start within {options.start_timeout_s} s")
            await asyncio.sleep(0.2)

    async def forward(self, call: Call) -> AsyncIterator[Head | bytes]:
        """The answer of the server. A caller that goes away closes the connection, which ends the request."""
        async with self._session.request(call.method, call.target, headers=call.headers, data=call.body) as answer:
            yield Head(answer.status, _passed_on(answer.headers.items()))
            async for chunk in answer.content.iter_any():
                yield chunk

    async def check_health(self) -> None:
        """Raises `RuntimeError` if the server has ended or its gateway does not answer.

        Then Serve replaces this replica. Workers that died are the server's own business: its gateway still answers.
        """
        if not await self._answers("/live"):
            raise RuntimeError("the server does not answer")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The server's own queue, for `scale_by_queue`."""
        async with self._session.get("/metrics", timeout=aiohttp.ClientTimeout(PROBE_TIMEOUT_S)) as answer:
            families = text_string_to_metric_families(await answer.text())
        values = {each.name: each.samples[0].value for each in families if each.name in (NUM_SEQUENCES, NUM_WAITING)}
        return {"sequences": sum(values.values())}

    async def __del__(self) -> None:
        """Stops the server; Serve has waited for its requests."""
        await self._session.close()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        await asyncio.to_thread(self._process.wait)  # the guard bounds it
        await asyncio.to_thread(self._guard.wait)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _answers(self, path: str) -> bool:
        if (status := self._process.poll()) is not None:
            raise RuntimeError(f"the server has ended with status {status}: the log of this replica says why")
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get(path, timeout=aiohttp.ClientTimeout(PROBE_TIMEOUT_S)) as answer:
                return answer.status == 200
        return False


class Ingress:
    """A deployment: reads a whole request, has it routed by its prompt, and passes the answer on as it comes."""

    def __init__(self, server: DeploymentHandle, max_body_bytes: int) -> None:
        """`max_body_bytes`: of one request; the servers of a larger limit have it from `Options.settings`."""
        self._server = server.options(stream=True, method_name="forward")
        self._bodies = Bodies(max_body_bytes)

    async def __call__(self, request: Request) -> Response:
        try:
            async with self._bodies.read(request) as body:
                return await self._forward(request, body)
        except Refused as error:
            return _refusal(error)

    async def _forward(self, request: Request, body: bytes) -> Response:
        """Returns when the answer has begun."""
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        call = Call(request.method, target, _passed_on(request.headers.items()), body, prompt_of(body) or target)
        chunks = aiter(self._server.remote(call))
        try:
            head = await anext(chunks)
        except (RayError, RayServeException) as error:
            log.warning("a server was lost before its answer: %s", type(error).__name__)
            return JSONResponse(_lost(), 503, {"retry-after": str(RETRY_AFTER_S)})
        headers = {name: value for name, value in head.headers.items() if name != "content-length"}
        return StreamingResponse(_rest(chunks, headers), head.status, headers)


async def _rest(chunks: AsyncIterator[Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body. If the server is lost, a stream of events ends with an error, and any other body ends too early."""
    try:
        async for chunk in chunks:
            yield chunk
    except (RayError, RayServeException) as error:
        log.warning("a server was lost in its answer: %s", type(error).__name__)
        if not headers.get("content-type", "").startswith("text/event-stream"):
            raise
        yield b"event: error\ndata: " + json.dumps({"type": "error"} | _lost()).encode() + b"\n\n"


def _refusal(error: Refused) -> Response:
    kind = "server_error" if error.status == 503 else "invalid_request_error"
    content = {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
    retry = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else {}
    return JSONResponse(content, error.status, {"connection": "close"} | retry)


def _lost() -> dict[str, Any]:
    message = "the server that answered was lost; send the request again"
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "unavailable"}}


def prompt_of(body: bytes) -> str:
    """The beginning of what a request asks, as the router compares it; empty if that cannot be told."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    asked = next((fields[name] for name in PROMPT_FIELDS if fields.get(name)), "")
    text = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)
    return text[:MAX_PROMPT_CHARACTERS]


def scale_by_queue(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """An autoscaling policy: as many replicas as their servers' sequences need, waiting ones included.

    Serve's own policy counts HTTP requests, of which each may be many sequences. Serve applies delays and bounds.
    """
    counted = (context.aggregated_metrics or {}).get("sequences", {})
    if not counted:
        return context.target_num_replicas, {}  # nobody has told yet
    return math.ceil(sum(counted.values()) / context.config.target_ongoing_requests), {}


def build(options: Options) -> serve.Application:
    """The application, for `import_path` of `serve.yaml`."""
    server = serve.deployment(
        Server,
        name="Server",
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=MOST_REQUESTS,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.sequences_per_replica,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
            look_back_period_s=options.look_back_s,
            policy=AutoscalingPolicy(policy_function=scale_by_queue),
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=PREFIX_ROUTER, request_router_kwargs=PREFIX_ROUTER_OPTIONS
        ),
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=1,
        graceful_shutdown_timeout_s=120,
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=options.ingress_replicas,
        ray_actor_options={"num_cpus": 0.1, "resources": options.ingress_resources},
        max_ongoing_requests=MOST_REQUESTS,
    )
    return ingress.bind(server.bind(options), int(options.settings.get("gateway.max_body_bytes", MAX_BODY_BYTES)))


def _start(options: Options, directory: Path) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Starts a server, whose sockets lie in `directory`, and its guard. Its log is that of the replica."""
    addresses = {f"{name}.address": f"unix:{directory}/{name}.sock" for name in ("gateway", "dense", "attention")}
    settings = {**addresses, **options.settings, "gateway.http_address": f"unix:{directory}/http.sock"}
    command = list(options.command)
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    guard = ["sh", "-c", GUARD, "guard", str(server.pid), str(STOP_TIMEOUT_S)]
    return server, subprocess.Popen(guard, stdin=subprocess.PIPE)


def _passed_on(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers if name.lower() not in HOP_BY_HOP}
