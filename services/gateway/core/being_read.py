"""`BeingRead`: requests that wait to be read, for memory, pictures, the tokenizer or a grammar. They can be aborted.

The journal does not know them yet. Runs in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from services.common.errors import AbortedByCaller
from services.gateway.request.generation_request import Owner


class BeingRead:
    """One for a gateway process."""

    def __init__(self) -> None:
        self._requests: dict[asyncio.Timeout, tuple[Owner, Sequence[str]]] = {}

    @contextlib.asynccontextmanager
    async def until_started(self, owner: Owner, names: Sequence[str]) -> AsyncIterator[None]:
        """A context in which the owner's requests with these names are read. Raises `AbortedByCaller`."""
        limit = asyncio.timeout(None)
        self._requests[limit] = owner, names
        try:
            async with limit:
                yield
            is_aborted = limit.when() is not None  # too late to be interrupted
        except TimeoutError:
            if not limit.expired():
                raise
            is_aborted = True
        finally:
            del self._requests[limit]
        if is_aborted:
            raise AbortedByCaller("the request was aborted before it ran")

    def abort(self, owner: Owner, is_meant: Callable[[str], bool]) -> bool:
        """Ends those of an owner with such a name; returns whether there are any, of which some may be ending."""
        now, found = asyncio.get_running_loop().time(), False
        for limit, (each, names) in self._requests.items():
            if each == owner and any(map(is_meant, names)):
                if limit.when() is None:  # not aborted before
                    limit.reschedule(now)
                found = True
        return found
