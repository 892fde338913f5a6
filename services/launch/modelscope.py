"""A model by its name at ModelScope, where the package `modelscope` is installed: downloaded into that package's cache.

MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN and MODELSCOPE_CACHE mean what they mean there.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from services.common.errors import CapacityError, ConfigError, PeerError
from services.common.shorten import one_line

_INSTALL = "pip install 'twostroke[modelscope]'"


def fetch_from_modelscope(
    name: str, revision: str | None, cache_dir: Path | None, wanted: list[str], unwanted: list[str]
) -> Path:
    """The directory of the model; downloads what is missing there of the files that match `wanted` and not `unwanted`.

    Raises `ConfigError` without the package, with an older one, or for a model that is not there or has no safetensors,
    `PeerError` if ModelScope fails, `CapacityError` without room.
    """
    if importlib.util.find_spec("modelscope") is None:
        raise ConfigError(f"model {name!r} is to come from ModelScope: {_INSTALL}")
    try:
        from modelscope import snapshot_download
        from modelscope_hub.errors import HubError, NotExistError
    except ImportError as error:
        said = f"the package modelscope cannot be used ({one_line(error)}), perhaps it is old: {_INSTALL}"
        raise ConfigError(said) from error
    try:
        path = Path(
            snapshot_download(
                name, revision=revision, cache_dir=cache_dir, allow_patterns=wanted, ignore_patterns=unwanted
            )
        )
    except (HubError, OSError) as error:  # the latter also of its HTTP client, which wraps the former
        if isinstance(error, NotExistError) or isinstance(error.__cause__, NotExistError):
            raise ConfigError(f"model {name!r} is not at ModelScope, or not for you: {one_line(error)}") from error
        if isinstance(error, OSError) and error.filename is not None:
            raise CapacityError(f"model {name!r} cannot be written to {error.filename}: {error.strerror}") from error
        raise PeerError(f"model {name!r} cannot be downloaded from ModelScope: {one_line(error)}") from error
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model {name!r} at ModelScope has no safetensors, the only format that is read")
    return path
