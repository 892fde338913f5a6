"""`python -m services.rpc.probe --address ADDR`: asks a service for its health once; for containers and scripts.

It calls `grpc.health.v1` and imports nothing heavier than gRPC, since it runs every few seconds. The exit status is

    0  SERVING
    1  the command line is wrong, or a certificate file cannot be read
    2  no server answers at the address within the time limit
    3  a server answers with an error: it does not know the service's name, or the call takes too long
    4  the service answers that it is not serving
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc.tls_arguments import add_tls_arguments, open_sync_channel, read_credentials

DEFAULT_TIMEOUT_MS = 1000
MAX_TIMEOUT_MS = 3_600_000


class ExitCode(IntEnum):
    """The exit statuses of the probe; the module's docstring explains them."""

    SERVING = 0
    USAGE = 1
    UNREACHABLE = 2
    CALL_FAILED = 3
    NOT_SERVING = 4


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\n")  # argparse exits with 2: UNREACHABLE


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Probes once. Prints one line on standard error unless the service serves."""
    parser = _build_parser()
    arguments = parser.parse_args(argv)
    code, message = probe(
        arguments.address,
        arguments.service,
        arguments.timeout_ms / 1000,
        credentials=read_credentials(parser, arguments),
        server_name=arguments.tls_server_name,
    )
    if code is not ExitCode.SERVING:
        name = f" of {arguments.service!r}" if arguments.service else ""
        print(f"services.rpc.probe: health{name} at {arguments.address}: {message}", file=sys.stderr)
    return code


def probe(
    address: str,
    service: str,
    timeout_s: float,
    *,
    credentials: grpc.ChannelCredentials | None,
    server_name: str | None,
) -> tuple[ExitCode, str]:
    """Calls `Check` once, within `timeout_s` including the connection. Returns the exit code and an explanation.

    `service` is a full proto name, or empty for the whole server. Without `credentials` the connection is plain text.
    `server_name` is the name in the server's certificate, if it is not the host of the address.
    """
    with open_sync_channel(address, credentials, server_name) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status
        except grpc.RpcError as error:
            is_unreachable = error.code() is grpc.StatusCode.UNAVAILABLE
            code = ExitCode.UNREACHABLE if is_unreachable else ExitCode.CALL_FAILED
            return code, f"{error.code().name}: {error.details()}"
    is_serving = status == health_pb2.HealthCheckResponse.SERVING
    code = ExitCode.SERVING if is_serving else ExitCode.NOT_SERVING
    return code, health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="services.rpc.probe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", required=True, metavar="ADDR", help="HOST:PORT or unix:PATH of the service")
    parser.add_argument("--service", default="", metavar="NAME", help="full proto name (default: the whole server)")
    parser.add_argument(
        "--timeout-ms",
        type=_milliseconds,
        default=DEFAULT_TIMEOUT_MS,
        metavar="N",
        help="time limit for the answer (%(default)s)",
    )
    add_tls_arguments(parser)
    return parser


def _milliseconds(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_TIMEOUT_MS:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and {MAX_TIMEOUT_MS}")
    return value


if __name__ == "__main__":
    sys.exit(main())
