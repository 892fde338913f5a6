"""`python -m services.launch ctl`: calls the launcher that runs on this machine, or a dense worker, by its socket.

Exit status: 0 done; 1 refused or rolled back, nothing has changed; 2 wrong command line; 3 no launcher answers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from services.common.cli import dashed
from services.common.config import toml_value
from services.common.errors import PeerError
from services.launch.addresses import control_address
from services.launch.run_directory import live_directories
from services.pb import dense_pb2, dense_pb2_grpc, launch_pb2, launch_pb2_grpc
from services.rpc.error_details import error_of

DONE, FAILED, NO_LAUNCHER = 0, 1, 3
STATUS_TIMEOUT_S = 10.0
MIB = 2**20
PATHS = ("model.path", "dense.plan_dir", "dense.step_log")  # relative to where `ctl` is called


def main(argv: Sequence[str], program: str = "services.launch ctl") -> int:
    """Returns the exit status. `program` is the name of the command in its usage."""
    parser = make_parser(program)
    arguments = parser.parse_args(dashed(argv))
    try:
        whom, address = _whom(arguments)
    except PeerError as error:
        return _fail(program, str(error), NO_LAUNCHER)
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = launch_pb2_grpc.LauncherStub(channel)
        try:
            if arguments.command == "status":
                return print_status(stub)
            if arguments.command == "add-attention":
                return add_attention(stub, arguments)
            if arguments.command == "drain-attention":
                if arguments.dense is not None:
                    return leave_dense(dense_pb2_grpc.DenseWorkerStub(channel), arguments)
                return drain_attention(stub, arguments)
            return replace_dense(stub, arguments)
        except grpc.RpcError as error:
            if (
                error.code() is grpc.StatusCode.UNAVAILABLE and error_of(error) is None
            ):  # else the launcher's own answer
                return _fail(program, f"{whom} at {address} does not answer: {error.details()}", NO_LAUNCHER)
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return _fail(program, _describe_timeout(arguments), FAILED)
            return _fail(program, error.details() or error.code().name, FAILED)


def find_launcher() -> str:
    """The address of the only launcher of this user. Raises `PeerError`."""
    addresses = [control_address(directory) for directory in live_directories()]
    if not addresses:
        raise PeerError("no launcher runs here: start one with `python -m services.launch`")
    if len(addresses) > 1:
        raise PeerError(f"{len(addresses)} launchers run here; choose one with --launcher: {' '.join(addresses)}")
    return addresses[0]


def make_parser(program: str) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog=program, description="Calls a running launcher.")
    parser.add_argument("--launcher", metavar="unix:PATH", help="the launcher's socket, if several run; see its log")
    commands = parser.add_subparsers(dest="command", required=True)
    replace = commands.add_parser("replace-dense", help="replace the dense worker by a new one")
    replace.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="changed config, in the sections dense and model",
    )
    replace.add_argument("--model", metavar="DIR", help="other weights of a model of the same shape (model.path)")
    replace.add_argument(
        "--open-requests",
        choices=["keep", "wait", "abort"],
        help="accept other weights. keep: open requests go on with them; wait: the running ones end first; abort: all "
        "end with an error",
    )
    replace.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="for running requests (60)")
    caches = replace.add_mutually_exclusive_group()
    caches.add_argument(
        "--drop-caches",
        action="store_true",
        help="accept other weights: the KV cache is emptied and running requests fail",
    )
    caches.add_argument(
        "--keep-caches",
        action="store_true",
        help="accept another precision of the same model: running requests go on with the present KV cache",
    )
    replace.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="then it is undone (3600)")
    add = commands.add_parser("add-attention", help="start one more attention worker, which gets the next sequences")
    add.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="then it is undone (300)")
    drain = commands.add_parser("drain-attention", help="move the sequences of an attention worker, and stop it")
    drain.add_argument("name", help="its name, as `status` has it; with --dense, its address")
    drain.add_argument(
        "--dense",
        metavar="unix:PATH",
        help="ask this dense worker, about an attention worker that another launcher has started and will stop",
    )
    drain.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="then it stays (60)")
    commands.add_parser("status", help="list the running services and their standbys")
    return parser


def replace_dense(stub: launch_pb2_grpc.LauncherStub, arguments: argparse.Namespace) -> int:
    """Replaces the dense worker and prints the new one."""
    model = [] if arguments.model is None else [f"model.path={toml_value(arguments.model)}"]
    request = launch_pb2.ReplaceDenseRequest(
        overrides=[_absolute(override) for override in (*model, *arguments.set)],
        drop_caches=arguments.drop_caches,
        keep_caches=arguments.keep_caches,
        open_requests=arguments.open_requests and arguments.open_requests.upper(),
        wait_timeout_ms=round(1000 * arguments.wait),
    )
    reply = stub.ReplaceDense(request, timeout=arguments.timeout)
    weights = "other weights, the KV cache was dropped" if reply.has_other_weights else "the same weights and KV cache"
    if arguments.keep_caches:
        weights = "the same KV cache, whatever the weights"
    print(
        f"replaced the dense worker: process {reply.pid} serves now, backend {reply.backend}, {weights}; "
        f"no step for {reply.pause_ms:.0f} ms"
    )
    return DONE


def add_attention(stub: launch_pb2_grpc.LauncherStub, arguments: argparse.Namespace) -> int:
    """Adds an attention worker and prints its name."""
    reply = stub.AddAttention(launch_pb2.AddAttentionRequest(), timeout=arguments.timeout)
    print(f"added {reply.name}, process {reply.pid}")
    return DONE


def drain_attention(stub: launch_pb2_grpc.LauncherStub, arguments: argparse.Namespace) -> int:
    """Takes an attention worker away."""
    request = launch_pb2.DrainAttentionRequest(name=arguments.name, timeout_ms=round(1000 * arguments.timeout))
    stub.DrainAttention(request, timeout=arguments.timeout + STATUS_TIMEOUT_S)
    print(f"{arguments.name} has no sequence any more, and has been stopped")
    return DONE


def leave_dense(stub: dense_pb2_grpc.DenseWorkerStub, arguments: argparse.Namespace) -> int:
    """Lets a dense worker leave an attention worker that others start and stop, such as one in a container."""
    request = dense_pb2.RemoveAttentionWorkerRequest(
        address=arguments.name, timeout_ms=round(1000 * arguments.timeout)
    )
    stub.RemoveAttentionWorker(request, timeout=arguments.timeout + STATUS_TIMEOUT_S)
    print(f"the dense worker has left {arguments.name}, which may be stopped")
    return DONE


def print_status(stub: launch_pb2_grpc.LauncherStub) -> int:
    """Prints one line per service."""
    reply = stub.GetStatus(launch_pb2.GetStatusRequest(), timeout=STATUS_TIMEOUT_S)
    for service in reply.services:
        last_end = f", last end: {service.last_end}" if service.last_end else ""
        print(f"{service.name} process {service.pid}, {service.num_restarts} restarts{last_end}")
    for standby in reply.standbys:
        print(describe_standby(standby))
    return DONE


def describe_standby(standby: launch_pb2.StandbyStatus) -> str:
    """One line about a standby: what it is, and what it costs."""
    name, took_over = f"standby of {standby.name}", f"took over {standby.num_take_overs} times"
    if standby.state == launch_pb2.StandbyStatus.OFF:
        return f"{name}: none, {standby.reason}"
    if standby.state == launch_pb2.StandbyStatus.STARTING:
        return f"{name}: starting, {took_over}"
    kind = "weights loaded" if standby.has_weights else "modules imported"
    memory = f"{standby.host_bytes / MIB:.0f} MB of host memory"
    if standby.device_bytes:
        memory += f", {standby.device_bytes / MIB:.0f} MB of GPU memory"
    return f"{name}: process {standby.pid} ready, {kind}, {memory}, {took_over}"


def _whom(arguments: argparse.Namespace) -> tuple[str, str]:
    """Who is asked, and the address. Raises `PeerError`."""
    if dense := getattr(arguments, "dense", None):
        return "the dense worker", dense
    return "the launcher", arguments.launcher or find_launcher()


def _describe_timeout(arguments: argparse.Namespace) -> str:
    if arguments.command == "status":
        return f"the launcher has not answered within {STATUS_TIMEOUT_S:g} s, the limit"
    limit = f"{arguments.timeout:g} s, the limit (--timeout)"
    if dense := getattr(arguments, "dense", None):
        return f"the dense worker at {dense} has not answered within {limit}: call it again, to see whether it was done"
    return f"not done within {limit}; what was not done yet is undone, see `ctl status`"


def _absolute(override: str) -> str:
    """Resolves paths from the directory of the command, not from that of the launcher."""
    key, equals, value = override.partition("=")
    if key.strip() not in PATHS or not equals:
        return override
    path = Path(value.strip().strip("'\"")).expanduser()
    return f"{key}={os.path.abspath(path)}"


def _fail(program: str, message: str, status: int) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return status
