"""TLS: checks and reads the PEM files of the config once at start, for gRPC and uvicorn."""

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
    """The PEM files of one side. With `ca`, the other side must present a certificate signed by that CA."""

    certificate: Path  # followed by the intermediate certificates up to the root
    key: Path
    ca: Path | None

    def check(self) -> None:
        """Raises `ConfigError` for files that are missing, damaged or do not belong together."""
        files = [file for file in (self.certificate, self.key, self.ca) if file is not None]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            for file in files:
                file.read_bytes()  # so that the error names the file
            context.load_cert_chain(self.certificate, self.key, password="")
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            names = ", ".join(map(str, files))
            raise ConfigError(f"TLS files {names} cannot be used: {error.reason or error}") from error
        except OSError as error:
            raise ConfigError(f"TLS file {str(error.filename)!r} cannot be read: {error.strerror}") from error

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC server. Call `check` first."""
        return grpc.ssl_server_credentials(
            [(self.key.read_bytes(), self.certificate.read_bytes())],
            root_certificates=None if self.ca is None else self.ca.read_bytes(),
            require_client_auth=self.ca is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a gRPC client. Call `check` first."""
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_channel_credentials(ca, self.key.read_bytes(), self.certificate.read_bytes())


def tls_files(certificate: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """The checked files, or None if the config names none. Raises `ConfigError` if they cannot be used."""
    if certificate is None or key is None:
        return None
    files = TlsFiles(certificate, key, ca)
    files.check()
    return files


def warn_if_exposed(address: str) -> None:
    """Logs a warning if other machines can reach this address, which has no TLS."""
    if is_exposed(address):
        log.warning("other machines can reach this address, and the connection is not encrypted", address=address)


def is_exposed(address: str) -> bool:
    """Whether other machines can reach the address."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
