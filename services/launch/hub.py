"""A model by its name at the Hugging Face Hub, such as `Qwen/Qwen3-0.6B`, or at ModelScope: downloaded, then served.

`huggingface_hub` does the work: HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean everywhere, bars
show the progress at a terminal, and a download that broke off goes on where it was. Only safetensors are downloaded.
At ModelScope the package `modelscope` does it, if it is installed: there MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN and
MODELSCOPE_CACHE mean what they mean everywhere.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import defaultdict
from pathlib import Path

from services.common.errors import CapacityError, ConfigError, PeerError
from services.common.shorten import one_line
from services.launch.gguf import is_gguf

HUBS = ("huggingface", "modelscope")
_INSTALL = "pip install 'twostroke[modelscope]'"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Folders hold other formats of the same weights, but for these. A # stands for a digit.
_FOLDERS = [
    *(f"{number}_{module}" for number in ("#", "##") for module in ("Pooling", "Dense", "Normalize")),  # modules.json
    "additional_chat_templates",
]


def _other_folders() -> list[str]:
    """Patterns of all files in other folders, for *, which matches / as well, has no exceptions.

    Their names begin as one of `_FOLDERS` does, and then have another character or end.
    """
    followers = defaultdict[str, set[str]](set)  # what may follow in `_FOLDERS`, by the beginning
    for folder in _FOLDERS:
        begin = ""
        for each in [*folder, "/"]:
            follower = "0-9" if each == "#" else each
            followers[begin].add(follower)
            begin += f"[{follower}]"
    patterns = ["*/*/*"]
    for begin, allowed in followers.items():
        patterns.append(f"{begin}[!{''.join(sorted(allowed))}]*/*")
        if "/" not in allowed:
            patterns.append(f"{begin}/*")
    return patterns


_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]  # also what tokenizers and configs are made of
_UNWANTED = [
    *_other_folders(),
    "consolidated*",  # Mistral's own format of the same weights
]


def is_hub_name(text: str) -> bool:
    """Whether it is a model's name at the Hub, and no directory or GGUF file here."""
    return _NAME.fullmatch(text) is not None and not Path(text).is_dir() and not is_gguf(text)


def fetch_model(name: str, revision: str | None, cache_dir: Path | None, hub: str) -> Path:
    """The directory of a model with this name in the Hub's cache; downloads what is missing there.

    hub: one of `HUBS`. revision: a branch, tag or commit; None: the main branch. Raises `ConfigError` if there is no
    such model, if the caller may not read it or if it has no safetensors, `PeerError` if the Hub fails,
    `CapacityError` without room.
    """
    if hub == "modelscope":
        return _fetch_from_modelscope(name, revision, cache_dir)
    # Imported here: it takes time that a start from a directory need not wait for.
    import httpx2
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    model = f"model {name!r}" + ("" if revision is None else f", revision {revision!r}")
    endpoint = constants.ENDPOINT
    try:
        try:
            info = HfApi().model_info(name, revision=revision, timeout=constants.DEFAULT_ETAG_TIMEOUT)
            _check_format(model, [file.rfilename for file in info.siblings or ()])
        except (OfflineModeIsEnabled, httpx2.ConnectError, httpx2.TimeoutException):
            pass  # the cache may have it whole; `snapshot_download` tells
        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=cache_dir, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )
    except HFValidationError as error:
        raise ConfigError(f"{model} is no name of a model: {one_line(error)}") from error
    except GatedRepoError as error:
        raise ConfigError(
            f"{model} is gated: accept its terms at {endpoint}/{name}, then set HF_TOKEN to a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{model} is not at {endpoint}: the model is there, the revision is not") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model} is neither a directory here nor a public model at {endpoint}; for a private one set HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        reason = one_line(error.__cause__ or error)
        raise PeerError(f"{model} is not complete in the cache, and not to be had from {endpoint}: {reason}") from error
    except HfHubHTTPError as error:
        raise PeerError(f"{model} cannot be downloaded from {endpoint}: {one_line(error)}") from error
    except httpx2.HTTPError as error:
        reason = one_line(error) or type(error).__name__
        raise PeerError(f"{model} cannot be downloaded from {endpoint}: {reason}") from error
    except OSError as error:
        if error.errno is None:  # the library's own: a file whose size is not the one that the Hub has told
            raise PeerError(f"{model} was not downloaded whole from {endpoint}: {one_line(error)}") from error
        raise CapacityError(f"{model} cannot be written to the cache {error.filename}: {error.strerror}") from error


def _check_format(model: str, files: list[str]) -> None:
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        return
    others = sorted({Path(file).suffix for file in files} & {".bin", ".pt", ".pth", ".gguf", ".h5", ".onnx"})
    found = f"its weights are in {' and '.join(others)}" if others else "it has no weights"
    raise ConfigError(f"{model} has no safetensors, the only format that is read; {found}")


def _fetch_from_modelscope(name: str, revision: str | None, cache_dir: Path | None) -> Path:
    """The same for a model at ModelScope.

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
                name, revision=revision, cache_dir=cache_dir, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
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
