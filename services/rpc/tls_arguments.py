"""The command-line flags for TLS that clients of the services share. Imports nothing heavier than gRPC."""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path

import grpc


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--tls` and the flags for its files."""
    parser.add_argument("--tls", action="store_true", help="use TLS; the flags below imply it")
    parser.add_argument("--tls-ca-cert", type=Path, metavar="FILE", help="PEM of the CA of the server's certificate")
    parser.add_argument("--tls-client-cert", type=Path, metavar="FILE", help="PEM of the client's certificate")
    parser.add_argument("--tls-client-key", type=Path, metavar="FILE", help="PEM of the client's key")
    parser.add_argument("--tls-server-name", metavar="NAME", help="name in the certificate (default: the host)")


def read_credentials(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> grpc.ChannelCredentials | None:
    """The credentials of the flags; None for plain text. Invalid flags and files end the process by `parser.error`."""
    if (arguments.tls_client_cert is None) != (arguments.tls_client_key is None):
        parser.error("--tls-client-cert and --tls-client-key belong together")
    flags = (arguments.tls_ca_cert, arguments.tls_client_cert, arguments.tls_server_name)
    if not arguments.tls and all(flag is None for flag in flags):
        return None
    files = (arguments.tls_ca_cert, arguments.tls_client_key, arguments.tls_client_cert)
    try:
        ca_cert, key, cert = (None if file is None else file.read_bytes() for file in files)
        _check(*files)
    except ssl.SSLError as error:
        names = ", ".join(str(file) for file in files if file is not None)
        parser.error(f"TLS files {names} cannot be used: {error.reason or error}")
    except OSError as error:
        parser.error(f"{error.filename!r} cannot be read: {error.strerror}")
    return grpc.ssl_channel_credentials(ca_cert, key, cert)


def open_sync_channel(
    address: str, credentials: grpc.ChannelCredentials | None, server_name: str | None
) -> grpc.Channel:
    """A blocking channel. `server_name` is the name in the server's certificate, if it is not the address's host."""
    options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0)]
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def _check(ca_cert: Path | None, key: Path | None, cert: Path | None) -> None:
    """Raises `ssl.SSLError` for invalid files; gRPC would only report that the server is unavailable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_cert is not None:
        context.load_verify_locations(ca_cert)
    if cert is not None:
        context.load_cert_chain(cert, key, password="")
