"""Checks for packages that only export and TensorRT need (requirements-export.txt)."""

from __future__ import annotations

import importlib.util

from services.common.errors import ConfigError


def require(package: str) -> None:
    """Raises ConfigError, with the command to install it, if `package` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: `pip install -r requirements-export.txt`")
