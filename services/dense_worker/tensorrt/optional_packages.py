"""The packages that only export and TensorRT need: requirements-export.txt."""

from __future__ import annotations

import importlib.util

from services.common.errors import ConfigError


def require(package: str) -> None:
    """Raises ConfigError, saying how to install it, if `package` is not there."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: `pip install -r requirements-export.txt`")
