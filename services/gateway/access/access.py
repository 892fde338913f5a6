"""`Access`: finds the `Caller` of a request by its `authorization` header.

Without API keys all requests come from one anonymous caller without limits. With keys, every request over HTTP and
gRPC needs one, except those for health, metrics and reflection. A changed keys file takes effect within
`RELOAD_INTERVAL_S`.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import structlog

from services.common.errors import ConfigError, PeerError, PermissionDenied, Unauthenticated
from services.common.fairness import Client
from services.common.shared_counts import Counts
from services.gateway.access.api_keys import ApiKey, hash_key, read_api_keys
from services.gateway.access.client_address import FORWARDED_FOR, ClientAddresses, number_of
from services.gateway.access.rate_limits import PartsUsage, RateLimits, Usage
from services.gateway.request.generation_request import GenerationRequest, Owner, owner_of

log = structlog.get_logger()

RELOAD_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. `key` is None for the anonymous caller."""

    key: ApiKey | None
    usage: Usage
    tenant: int = 0  # number of the key's name; 0 for the anonymous caller
    client: int = 0  # number of the client's address; 0 if nobody asked for it

    @property
    def name(self) -> str:
        """The name of the API key; empty for the anonymous caller."""
        return "" if self.key is None else self.key.name

    @property
    def client_id(self) -> Client:
        """Names the client among those of all keys, as `SequenceSpec.client_id` does."""
        return self.tenant, self.client

    @property
    def owner(self) -> Owner:
        """Whose the sender's requests are."""
        return owner_of(self.name, self.client)

    def for_parts(self) -> Caller:
        """The caller for the parts of a request that is counted already: only their tokens count."""
        return replace(self, usage=PartsUsage(self.usage))

    def adapt(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the key's priority, salt and name.

        Raises `PermissionDenied` if it is too urgent.
        """
        key = self.key
        if key is None:
            return request
        priority = key.priority if request.priority is None else request.priority
        if priority < key.lowest_priority:
            raise PermissionDenied(
                f"priority is {priority}, the lowest of the API key {key.name!r} is {key.lowest_priority}", "priority"
            )
        # The salt of a key has no space, so the salts of two keys stay different, whatever salts the requests add.
        salt = f"salt:{key.cache_salt}" if key.cache_salt is not None else f"name:{key.name}"
        spec = replace(
            request.spec,
            priority=priority,
            cache_salt=f"{salt} {request.spec.cache_salt}",
            tenant=self.tenant,
        )
        return replace(request, spec=spec, caller=key.name)


class Access:
    """Holds all keys. `run` watches the keys file. Everything runs in the event loop."""

    def __init__(
        self,
        file: Path | None,
        pairs: str,
        on_refusal: Callable[[Unauthenticated], None] | None = None,
        trusted_proxies: Sequence[str] = (),
        counts: Counts | None = None,
    ) -> None:
        """Takes the keys of a file and of `pairs` (`NAME=KEY,NAME=KEY`). Raises `ConfigError` for invalid keys.

        `counts`: those of all processes that have the same keys; None: this is the only one.
        """
        self._counts = counts or Counts()
        self.client_addresses = ClientAddresses(trusted_proxies)
        self._on_refusal = on_refusal
        self._file = file
        self._pairs = pairs
        self._anonymous = Caller(None, Usage("", RateLimits()))
        self._callers: list[tuple[bytes, Caller]] = []  # (digest of the key, its caller)
        self._usage: dict[str, Usage] = {}  # by name; kept when a key is removed, in case it returns
        self._version = _version(file)
        self._set_keys(read_api_keys(file, pairs), waits=True)

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self._callers)

    @property
    def key_names(self) -> frozenset[str]:
        """The names of all present keys."""
        return frozenset(caller.name for _, caller in self._callers)

    def identify(self, authorization: str | None, address: str = "") -> Caller:
        """The caller who sent this header from this address.

        Raises `Unauthenticated` if the key is missing or unknown.
        """
        try:
            caller = self._find(authorization)
            number = number_of("address", address) if address else 0
            return Caller(caller.key, caller.usage, caller.tenant, number) if number else caller
        except Unauthenticated as error:
            if self._on_refusal is not None:
                self._on_refusal(error)
            raise

    def _find(self, authorization: str | None) -> Caller:
        if not self._callers:
            return self._anonymous
        if authorization is None:
            raise Unauthenticated("no API key: send the header `authorization: Bearer KEY`")
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("the authorization is not of the form `Bearer KEY`")
        digest, found = hash_key(key.strip()), None
        for each, caller in self._callers:  # compare all of them, so that the time reveals nothing
            if hmac.compare_digest(each, digest):
                found = caller
        if found is None:
            raise Unauthenticated("the API key is unknown")
        return found

    def identify_call(self, context: grpc.aio.ServicerContext) -> Caller:
        """The caller of a gRPC call, by its metadata. Raises `Unauthenticated` if the key is missing or unknown."""
        values = defaultdict[str, list[str]](list)
        for name, value in context.invocation_metadata() or ():
            if isinstance(value, str):
                values[name].append(value)
        authorization = values["authorization"][0] if values["authorization"] else None
        return self.identify(
            authorization, self.client_addresses.find_peer(context.peer(), values[FORWARDED_FOR])
        )

    async def run(self) -> None:
        """Reads the file again whenever it changes, until cancelled. An invalid file is only logged.

        Keeps up with what other processes count, too.
        """
        while self._file is not None or self._counts.is_shared:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            self.reload_if_changed()
            if self._counts.is_shared:
                for usage in self._usage.values():
                    usage.note_others()

    def reload_if_changed(self) -> None:
        """Reads the file if it has changed since the last time, or could not be read then."""
        version = _version(self._file)
        if version == self._version:
            return
        try:
            self._set_keys(read_api_keys(self._file, self._pairs), waits=False)
        except ConfigError as error:
            log.error("the API keys file is invalid, the keys stay as they were", error=str(error))
            if version is not None and isinstance(error.__cause__, OSError):
                return
        except (PeerError, OSError) as error:
            log.warning("the API keys cannot be taken now, the next look tries again", error=str(error))
            return
        self._version = version

    def _set_keys(self, keys: list[ApiKey], *, waits: bool) -> None:
        new = [key for key in keys if key.name not in self._usage]
        of_new = self._counts.of_keys([key.name for key in new], waits=waits)  # if it raises, nothing has changed
        self._usage |= {key.name: Usage(key.name, key.limits, each) for key, each in zip(new, of_new, strict=True)}
        callers = []
        for key in keys:
            usage = self._usage[key.name]
            usage.set_limits(key.limits)
            callers.append((key.digest, Caller(key, usage, number_of("key", key.name))))
        self._callers = callers
        if keys:
            log.info("API keys read", num_keys=len(keys), names=",".join(key.name for key in keys))


def _version(file: Path | None) -> tuple[int, int, int] | None:
    """A value that changes when the file, or a link in its path, changes; None if there is no file."""
    if file is None:
        return None
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
