"""Structured logs on standard error: one line an event, key=value or JSON, by structlog."""

from __future__ import annotations

import logging
import sys

import structlog

from services.common.config import LogSection


def configure_logs(section: LogSection, service: str) -> None:
    """Sets up this process's logs; every line carries `service`."""
    renderers = {
        "logfmt": structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "service", "event"]),
        "json": structlog.processors.JSONRenderer(),
    }
    structlog.configure(
        processors=[
            lambda logger, method, event: {"service": service, **event},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderers[section.format],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[section.level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
