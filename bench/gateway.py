"""Measures gateway processes: tokens per second, CPU time per token, and the latency that they add.

A stub replaces the dense worker and emits a token per stream and step. Clients on plain sockets, in processes of their
own, read the streams. The gateway between them is the real process, or several that a launcher starts at the same
ports. Throughput is related to the gateway's CPU time, because on few cores stub and clients also use the CPU.

`python bench/gateway.py --protocols grpc,sse --streams 1,64,512 --json FILE`
`python bench/gateway.py --processes 1,2,4 --no-free --paced-streams 64,500 --pace-ms 40 --client-processes 4`
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.load.options import REPOSITORY, counts, positive, run_facts, whole_number
from bench.load.process_load import children, cpu_s, resident_bytes
from bench.load.stats import GatewayFigures, WireRun, gateway_figures
from bench.load.stub_dense import RECEIPT, Stub, StubSettings, running_stub
from bench.load.wire_clients import Connection, GrpcConnection, SseConnection, StreamLog, WireError, read_streams
from services.pb import gateway_pb2, sampling_pb2

PROTOCOLS = ("grpc", "sse", "chat")
PATHS = {"sse": "/v1/completions", "chat": "/v1/chat/completions"}  # of those over HTTP
# Texts of the embedded model's vocabulary with exactly one T. The rest of an SSE event has no T, so clients can count
# tokens without parsing. T, The, Two, Twostroke, " Twostroke", " The", HT, TP.
TOKEN_IDS = (57, 352, 406, 421, 555, 811, 927, 934)
TOKEN_MARK = b"T"
PROMPT = (8, 9)  # the same for all streams: the stub tells them apart by their seeds
PROMPTS = {"sse": {"prompt": PROMPT}, "chat": {"messages": [{"role": "user", "content": "Hi"}]}}
MAX_TOKENS = 10_000_000  # more than any stream gets
START_TIMEOUT_S = 60.0
STREAMS_TIMEOUT_S = 60.0  # until every stream has had a token
STOP_TIMEOUT_S = 20.0
NS_PER_S = 1_000_000_000


class BenchError(Exception):
    """The benchmark failed to run."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    protocol: str  # of PROTOCOLS
    num_streams: int
    pace_ms: float  # from one step to the next; 0: as fast as clients take the tokens
    connections: int  # number that share the gRPC streams; each SSE stream has a connection of its own
    num_processes: int = 1  # gateways
    has_kernel_times: bool = False  # tokens arrive when the client's kernel has them, not when the client reads them

    @property
    def label(self) -> str:
        """The name of the case in plots."""
        pace = f", every {self.pace_ms:g} ms" if self.pace_ms else ""
        processes = f", {self.num_processes} processes" if self.num_processes > 1 else ""
        return f"{self.protocol}, {self.num_streams}{pace}{processes}"


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway process, or several that share the addresses."""

    pids: list[int]
    addresses: dict[str, str]  # by protocol
    begun_at: float  # on the monotonic clock


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 after an error, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        results = [run_case(case, arguments) for case in _cases(arguments)]
    except (BenchError, WireError, TimeoutError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(format_table([(case, figures) for case, _, figures in results]))
    if arguments.json:
        document = run_facts(arguments) | {
            "cases": [
                {
                    "case": dataclasses.asdict(case),
                    "figures": dataclasses.asdict(figures),
                    "raw": dataclasses.asdict(run),
                }
                for case, run, figures in results
            ]
        }
        arguments.json.write_text(json.dumps(document))
    if arguments.plot:
        from bench.load.plots import save_gateway_plot  # it needs matplotlib

        runs = [(case.label, run, figures) for case, run, figures in results]
        save_gateway_plot(runs, "gateway processes before a stub worker", arguments.plot)
    return 0


def run_case(case: Case, arguments: argparse.Namespace) -> tuple[Case, WireRun, GatewayFigures]:
    """Starts all processes, measures for `arguments.duration` seconds, and stops all processes."""
    print(case.label, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="twostroke-bench-") as name:
        directory = Path(name)
        settings = StubSettings(
            address=f"unix:{directory}/dense.sock",
            receipt_file=directory / "receipts.sock",
            token_ids=TOKEN_IDS,
            pace_s=case.pace_ms / 1e3,
            max_backlog=arguments.max_backlog,
            offers_socket=arguments.worker_link == "socket",
        )
        with running_stub(settings) as stub, running_gateway(directory, arguments, case.num_processes) as gateway:
            _wait_connected(stub, case.num_processes)
            start_s = time.monotonic() - gateway.begun_at
            run = _measure(case, stub, gateway, settings.receipt_file, arguments)
            megabytes = [round(resident_bytes(pid) / 2**20) for pid in gateway.pids]
            print(f"  served after {start_s:.1f} s; resident at the end, MiB: {megabytes}", file=sys.stderr)
    return case, run, gateway_figures(run)


def format_table(rows: Sequence[tuple[Case, GatewayFigures]]) -> str:
    """A Markdown table with a row per case."""
    lines = [
        "| processes | protocol | streams | step, ms | tok/s | gateway CPU, us/token | tok per CPU second "
        "| tokens a message | gateways, cores | clients, cores | added latency P50 / P99, ms "
        "| first / last of a step, ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, figures in rows:
        latency, spread = _latency(figures)
        lines.append(
            f"| {case.num_processes} | {case.protocol} | {case.num_streams} | {case.pace_ms or 'free'} "
            f"| {figures.output_throughput:,.0f} | {figures.cpu_us_per_token:.1f} | {figures.tokens_per_cpu_s:,.0f} "
            f"| {figures.tokens_per_message:.2f} | {figures.gateway_cores:.2f} | {figures.client_cores:.2f} "
            f"| {latency} | {spread} |"
        )
    return "\n".join(lines)


@contextlib.contextmanager
def running_gateway(directory: Path, arguments: argparse.Namespace, num_processes: int = 1) -> Iterator[Gateway]:
    """Runs a real gateway in front of the stub, or several with their launcher; stops them at the end."""
    if arguments.sockets == "unix":
        addresses = {protocol: f"unix:{directory}/{protocol}.sock" for protocol in PROTOCOLS}
    else:
        ports = _free_ports(len(PROTOCOLS))
        addresses = {protocol: f"127.0.0.1:{port}" for protocol, port in zip(PROTOCOLS, ports, strict=True)}
    addresses["chat"] = addresses["sse"]
    overrides = [
        f"gateway.address={addresses['grpc']}",
        f"gateway.http_address={addresses['sse']}",
        f"dense.address=unix:{directory}/dense.sock",
        "log.level=warning",
        *arguments.set,
    ]
    command = [sys.executable, "-m", "services.gateway"]
    if num_processes > 1:
        command = [sys.executable, "-m", "services.launch"]
        overrides += ['launch.services=["gateway"]', f"launch.gateway_processes={num_processes}"]
    for override in overrides:
        command += ["--set", override]
    with (directory / "gateway.log").open("w+") as log:
        start = time.monotonic()
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=log)
        try:
            _wait_serving(process, addresses["grpc"], directory / "gateway.log")
            yield Gateway(_descendants(process.pid), addresses, start)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _measure(case: Case, stub: Stub, gateway: Gateway, receipts: Path, arguments: argparse.Namespace) -> WireRun:
    context = multiprocessing.get_context("spawn")
    num_clients = min(arguments.client_processes, case.num_streams)
    clients, pipes = [], []
    for first in range(num_clients):
        pipe, far_end = context.Pipe()
        indexes = range(first, case.num_streams, num_clients)
        job = (case, gateway.addresses[case.protocol], receipts, indexes, far_end)
        client = context.Process(target=_run_clients, args=job, daemon=True)
        client.start()
        far_end.close()
        clients.append(client)
        pipes.append(pipe)
    try:
        for pipe in pipes:
            _expect(pipe, STREAMS_TIMEOUT_S, "started")
        time.sleep(arguments.warmup)
        client_pids = [client.pid for client in clients if client.pid is not None]
        pids = {"gateway": gateway.pids, "client": client_pids, "stub": [stub.pid]}
        start_cpu_s = {name: sum(map(cpu_s, group)) for name, group in pids.items()}
        start_ns = time.monotonic_ns()
        if arguments.profile:
            _profile(gateway.pids[0], arguments.duration, arguments.profile)
        else:
            time.sleep(arguments.duration)
        end_ns = time.monotonic_ns()
        end_cpu_s = {name: sum(map(cpu_s, group)) for name, group in pids.items()}
        report = stub.report()
        for pipe in pipes:
            pipe.send("stop")
        logs: list[StreamLog] = [log for pipe in pipes for log in _expect(pipe, STREAMS_TIMEOUT_S)]
    finally:
        for client in clients:
            client.kill()
            client.join()
    return WireRun(
        start_ns=start_ns,
        end_ns=end_ns,
        cpu_s={name: end_cpu_s[name] - start_cpu_s[name] for name in pids},
        step_ns=report.step_ns,
        first_step=[report.first_step[log.index] for log in logs],
        chunk_ns=[log.chunk_ns for log in logs],
        chunk_num_tokens=[log.chunk_num_tokens for log in logs],
        num_messages=sum(log.num_messages for log in logs),
        is_paced=bool(case.pace_ms),
    )


def _run_clients(case: Case, address: str, receipts: Path, indexes: Sequence[int], parent: Pipe) -> None:
    """In a client process: runs its streams of a case until the parent sends stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
    receipt = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receipt.connect(str(receipts))

    def report(num_tokens: int) -> None:
        receipt.send(RECEIPT.pack(num_tokens))

    connections = _connections(case, address, indexes)
    gc.collect()
    gc.disable()  # a collection would delay every token behind it
    try:
        # A stub with a pace needs no receipts, which would take processor time from the gateway where cores are few.
        read_streams(
            connections,
            None if case.pace_ms else report,
            parent.fileno(),
            lambda: parent.send("started"),
            has_kernel_times=case.has_kernel_times,
        )
        parent.send([log for connection in connections for log in connection.logs])
    except WireError as error:
        parent.send(error)


def _connections(case: Case, address: str, indexes: Sequence[int]) -> list[Connection]:
    if case.protocol in PATHS:
        return [
            SseConnection(address, index, PATHS[case.protocol], _sse_body(case.protocol, index), TOKEN_MARK)
            for index in indexes
        ]
    num_connections = max(1, min(case.connections * len(indexes) // case.num_streams, len(indexes)))
    return [
        GrpcConnection(address, {index: _grpc_request(index) for index in indexes[first::num_connections]})
        for first in range(num_connections)
    ]


def _grpc_request(index: int) -> bytes:
    return gateway_pb2.GenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(ids=PROMPT),
        sampling=sampling_pb2.SamplingParams(temperature=0.0, seed=index),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    ).SerializeToString()


def _sse_body(protocol: str, index: int) -> bytes:
    request = {
        **PROMPTS[protocol],
        "seed": index,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(request).encode()


def _wait_serving(process: subprocess.Popen[bytes], address: str, log_file: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.RpcError):
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            if process.poll() is not None:
                raise BenchError(f"the gateway ended with {process.returncode}: {log_file.read_text()}")
            if time.monotonic() > deadline:
                raise BenchError(f"the gateway is not serving after {START_TIMEOUT_S:g} s: {log_file.read_text()}")
            time.sleep(0.02)


def _wait_connected(stub: Stub, num_processes: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while (number := stub.report().num_gateways) < num_processes:
        if time.monotonic() > deadline:
            raise BenchError(f"{number} of {num_processes} gateways have connected after {START_TIMEOUT_S:g} s")
        time.sleep(0.02)


def _descendants(pid: int) -> list[int]:
    return [pid, *(each for child in children(pid) for each in _descendants(child))]


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _profile(pid: int, duration_s: float, file: Path) -> None:
    """Samples the gateway's Python stacks for `duration_s` seconds; the file's name decides the format."""
    kind = {".svg": "flamegraph", ".txt": "raw", ".json": "speedscope"}[file.suffix]
    command = ["py-spy", "record", "--pid", str(pid), "--duration", str(round(duration_s)), "--rate", "500"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    options = ["--format", kind, "--output", str(file)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL, env=environment)


def _expect(pipe: Pipe, timeout_s: float, message: str | None = None) -> Any:
    if not pipe.poll(timeout_s):
        raise BenchError(f"the clients said nothing within {timeout_s:g} s")
    try:
        answer = pipe.recv()
    except EOFError:
        raise BenchError("the client process died") from None
    if isinstance(answer, WireError):
        raise answer
    if message is not None and answer != message:
        raise BenchError(f"the clients ended before all streams had started: {answer}")
    return answer


def _cases(arguments: argparse.Namespace) -> list[Case]:
    loads = [(num_streams, 0.0) for num_streams in arguments.streams]
    loads += [(num_streams, arguments.pace_ms) for num_streams in arguments.paced_streams]
    return [
        Case(protocol, num_streams, pace_ms, arguments.connections, num_processes, arguments.arrivals == "kernel")
        for num_processes in arguments.processes
        for protocol in arguments.protocols
        for num_streams, pace_ms in loads
    ]


def _latency(figures: GatewayFigures) -> tuple[str, str]:
    added, first, last = figures.added_ms, figures.first_of_step_ms, figures.last_of_step_ms
    if added is None or first is None or last is None:
        return "-", "-"
    return f"{added.median:.2f} / {added.p99:.2f}", f"{first.median:.2f} / {last.median:.2f}"


def _protocols(text: str) -> list[str]:
    protocols = text.split(",")
    for protocol in protocols:
        if protocol not in PROTOCOLS:
            raise argparse.ArgumentTypeError(f"{protocol!r} is none of {', '.join(PROTOCOLS)}")
    return protocols


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/gateway.py",
        description="Throughput, CPU time per token and added latency of gateway processes before a stub worker.",
        epilog="Free-running cases tell throughput: a step is emitted as soon as clients have the tokens of all but "
        "the last --max-backlog steps. Paced cases tell latency: from the stub handing a step on to a client's "
        "recv() of the token.",
    )
    add = parser.add_argument
    add("--protocols", type=_protocols, default=list(PROTOCOLS), metavar="LIST",
        help="some of grpc, sse (completions over HTTP) and chat (chats over HTTP); all by default")
    add("--streams", type=counts, default=[1, 64, 512], metavar="LIST", help="streams of free-running cases (1,64,512)")
    add("--paced-streams", type=counts, default=[1, 64], metavar="LIST", help="streams of paced cases (1,64)")
    add("--no-paced", dest="paced_streams", action="store_const", const=[], help="only free-running cases")
    add("--no-free", dest="streams", action="store_const", const=[], help="only paced cases")
    add("--processes", type=counts, default=[1], metavar="LIST", help="gateway processes (1)")
    add("--client-processes", type=whole_number, default=1, metavar="N", help="that share the streams (%(default)s)")
    add(
        "--pace-ms",
        type=positive,
        default=20.0,
        metavar="MS",
        help="milliseconds between the steps of paced cases (%(default)g)",
    )
    add(
        "--max-backlog", type=whole_number, default=2, metavar="STEPS",
        help="steps in flight in free-running cases (%(default)s)",
    )
    add(
        "--worker-link", choices=["socket", "grpc"], default="socket",
        help="what the messages of stub and gateway go by (%(default)s)",
    )
    add(
        "--arrivals", choices=["read", "kernel"], default="read",
        help="when a token has arrived: when the client has read it, or when its kernel had it (%(default)s)",
    )
    add("--sockets", choices=["tcp", "unix"], default="tcp", help="transport between gateway and clients (%(default)s)")
    add(
        "--connections", type=whole_number, default=8, metavar="N",
        help="connections that gRPC streams share (%(default)s)",
    )
    add("--duration", type=positive, default=5.0, metavar="S", help="seconds of each measurement (%(default)g)")
    add("--warmup", type=positive, default=1.0, metavar="S", help="seconds before each measurement (%(default)g)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override of the gateway's config")
    add("--json", type=Path, metavar="FILE", help="saves figures, options and the time of every chunk and step")
    add("--plot", type=Path, metavar="FILE.png", help="saves rates, latencies over time and their distribution")
    add("--profile", type=Path, metavar="FILE", help="py-spy's stacks of the gateway: .svg, .txt or .json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
