"""TLS: the PEM files that a config names, checked and read once at start, as gRPC and uvicorn want them."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from services.common.errors import ConfigError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side. With `ca`, the other side must show a certificate that it signed."""

    certificate: Path  # and those that lead to the root, in this order
    key: Path
    ca: Path | None

    def check(self) -> None:
        """Raises `ConfigError` for files that are missing, damaged or do not belong together."""
        files = [file for file in (self.certificate, self.key, self.ca) if file is not None]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            for file in files:
                file.read_bytes()  # else the error would not say which
            context.load_cert_chain(self.certificate, self.key, password="")
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            names = ", ".join(map(str, files))
            raise ConfigError(f"TLS files {names} cannot be used: {error.reason or error}") from error
        except OSError as error:
            raise ConfigError(f"TLS file {str(error.filename)!r} cannot be read: {error.strerror}") from error

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server; `check` has passed."""
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=None if self.ca is None else self.ca.read_bytes(),
            require_client_auth=self.ca is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC client; `check` has passed."""
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_channel_credentials(ca, self.key.read_bytes(), self.certificate.read_bytes())


def tls_files(certificate: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """Checked, or None if the config names no files. Raises `ConfigError`."""
    if certificate is None or key is None:
        return None
    files = TlsFiles(certificate, key, ca)
    files.check()
    return files


def warn_if_exposed(address: str) -> None:
    """For an address without TLS."""
    if is_exposed(address):
        log.warning("others than this machine can reach this address, and nothing is encrypted", address=address)


def is_exposed(address: str) -> bool:
    """Whether others than this machine can reach it."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
