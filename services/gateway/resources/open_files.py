"""Fits the number of connections to the limit of open files, and reserves some files for the gateway itself.

Without this reserve, many idle clients would use up the files that workers, API keys and the launcher's health checks
need.
"""

from __future__ import annotations

import resource

import structlog

from services.common.config import GatewaySection

log = structlog.get_logger()

# Own files, of which up to 128 have pictures, sockets to workers, and connections that are accepted only to be refused.
RESERVE = 256
MIN_CONNECTIONS = 8  # minimum of each kind, even with few files


def fit_connections(section: GatewaySection) -> GatewaySection:
    """Raises the limit of open files as far as the system allows, and lowers the section's limits to fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return section
    num_http, num_grpc = share_files(
        hard - RESERVE - section.num_dense_streams, section.max_connections, section.max_grpc_connections
    )
    if (num_http, num_grpc) == (section.max_connections, section.max_grpc_connections):
        return section
    log.warning(
        "fewer connections than configured: too few files may be open (ulimit -n)",
        max_open_files=hard,
        max_connections=num_http,
        max_grpc_connections=num_grpc,
    )
    return section.model_copy(update={"max_connections": num_http, "max_grpc_connections": num_grpc})


def share_files(num_files: int, max_connections: int, max_grpc_connections: int) -> tuple[int, int]:
    """Both limits, if they fit into `num_files`; else both lowered in proportion, but not below the minimum."""
    factor = min(1.0, max(0, num_files) / (max_connections + max_grpc_connections))

    def share(limit: int) -> int:
        return min(limit, max(MIN_CONNECTIONS, int(factor * limit)))

    return share(max_connections), share(max_grpc_connections)
