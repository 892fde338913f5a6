"""Structured logs on standard error: one line an event, key=value or JSON, by structlog."""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path

import structlog
from structlog.typing import EventDict, WrappedLogger

from services.common.config import LogSection


def configure_logs(section: LogSection, service: str) -> None:
    """Sets up this process's logs; every line carries `service`."""
    renderers = {
        "logfmt": structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "service", "event"]),
        "json": structlog.processors.JSONRenderer(),
    }
    error_file = section.error_file
    structlog.configure(
        processors=[
            lambda logger, method, event: {"service": service, **event},
            structlog.processors.add_log_level,
            *([] if error_file is None else [functools.partial(_keep_error, error_file)]),
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderers[section.format],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[section.level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _keep_error(file: Path, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if event["level"] in ("error", "critical"):
        cause = event.get("exc_info") or event.get("error", "")
        detail = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(cause)
        file.write_text(f"{event['event']}: {detail}".rstrip(": "))
    return event
