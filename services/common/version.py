"""The version of all services: they are released together."""

from __future__ import annotations

VERSION = "0.1.0"
