"""Reads API keys from a TOML file and, for the simple case, from `NAME=KEY,NAME=KEY` in the environment.

    [[keys]]
    name = "team-a"                  # in logs and messages; unique
    key = "…"                        # at least 16 characters; or key_sha256 = "…", so that the file holds no secret
    max_concurrent_answers = 8       # optional, like all keys below
    requests_per_minute = 600        # each prompt, file of sound, /tokenize and /detokenize counts as one
    tokens_per_minute = 100000       # of prompts and answers together
    priority = 0                     # of requests that name none; lower goes first
    min_priority = 0                 # the lowest that requests may name; default: `priority`
    cache_salt = "…"                 # keys with equal salts share cached prefixes; default: no sharing
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import Field

from services.common.config import API_KEYS_VARIABLE
from services.common.errors import ConfigError
from services.common.sampling_params import MAX_PRIORITY
from services.gateway.access.rate_limits import RateLimits

MIN_KEY_CHARACTERS = 16

_Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Word = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]  # visible ASCII, because logs show it


class ApiKey(pydantic.BaseModel):
    """One API key with its limits. Only the hash of the key itself is kept."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: _Word
    key_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    max_concurrent_answers: Annotated[int, Field(ge=1)] | None = None
    requests_per_minute: _Rate | None = None
    tokens_per_minute: _Rate | None = None
    priority: _Priority = 0
    min_priority: _Priority | None = None
    cache_salt: _Word | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _hash_key(cls, values: object) -> object:
        if not isinstance(values, dict) or "key" not in values:
            return values
        if "key_sha256" in values:
            raise ValueError("has both key and key_sha256, one is enough")
        key = values["key"]
        if not isinstance(key, str) or len(key) < MIN_KEY_CHARACTERS or not (key.isascii() and key.isprintable()):
            raise ValueError(f"key must be a string of at least {MIN_KEY_CHARACTERS} printable ASCII characters")
        return {name: value for name, value in values.items() if name != "key"} | {"key_sha256": hash_key(key).hex()}

    @pydantic.model_validator(mode="after")
    def _check_priorities(self) -> ApiKey:
        if self.min_priority is not None and self.min_priority > self.priority:
            raise ValueError(f"priority is {self.priority}, min_priority is {self.min_priority}")
        return self

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.key_sha256)

    @property
    def lowest_priority(self) -> int:
        """The lowest (most urgent) priority that a request may have."""
        return self.priority if self.min_priority is None else self.min_priority

    @property
    def limits(self) -> RateLimits:
        return RateLimits(self.max_concurrent_answers, self.requests_per_minute, self.tokens_per_minute)


class _KeysFile(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: list[ApiKey]


def hash_key(key: str) -> bytes:
    """The SHA-256 of a key. Keys have enough entropy, so they need no salt and no slow hash."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def read_api_keys(file: Path | None, pairs: str) -> list[ApiKey]:
    """The keys of a file and of `NAME=KEY,NAME=KEY`; an empty list if there are neither.

    Raises `ConfigError` for invalid keys. Its message never quotes a key.
    """
    keys = [] if file is None else _read_file(file)
    keys += _read_pairs(pairs)
    for what, field in (("name", "name"), ("key", "key_sha256")):
        seen: dict[str, ApiKey] = {}
        for key in keys:
            other = seen.setdefault(getattr(key, field), key)
            if other is not key:
                raise ConfigError(f"API keys {other.name!r} and {key.name!r} have the same {what}")
    return keys


def _read_file(file: Path) -> list[ApiKey]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"API keys file {str(file)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"API keys file {str(file)!r} is not TOML") from error  # the cause's message may quote a key
    try:
        keys = _KeysFile.model_validate(document).keys
    except pydantic.ValidationError as error:
        raise ConfigError(f"API keys file {str(file)!r}: {_describe(error)}") from error
    if not keys:
        raise ConfigError(f"API keys file {str(file)!r} has no keys: the server would refuse all requests")
    return keys


def _read_pairs(text: str) -> list[ApiKey]:
    keys = []
    for number, pair in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
        name, equals, key = pair.partition("=")
        try:
            if not equals:
                raise ConfigError(f"{API_KEYS_VARIABLE}: entry {number} is not of the form NAME=KEY")
            keys.append(ApiKey.model_validate({"name": name, "key": key}))
        except pydantic.ValidationError as error:
            raise ConfigError(f"{API_KEYS_VARIABLE}: entry {number}: {_describe(error)}") from error
    return keys


def _describe(error: pydantic.ValidationError) -> str:
    problems = (
        (".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, "))
        for each in error.errors(include_input=False, include_url=False)
    )
    return "; ".join(f"{path}: {message}" if path else message for path, message in problems)
