"""`BeingRead`: requests that wait to be read, for memory, pictures, the tokenizer or a grammar. They can be aborted.

The journal does not know them yet. Runs in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Set
from dataclasses import dataclass, field

from services.common.errors import AbortedByCaller
from services.gateway.request.generation_request import Owner


@dataclass(slots=True, eq=False)
class _Reading:
    owner: Owner
    names: frozenset[str]
    limit: asyncio.Timeout
    aborted: set[str] = field(default_factory=set)  # some of the names


class BeingRead:
    """One for a gateway process."""

    def __init__(self) -> None:
        self._readings: set[_Reading] = set()

    @contextlib.asynccontextmanager
    async def until_started(self, owner: Owner, names: Iterable[str]) -> AsyncIterator[Set[str]]:
        """A context in which the owner's requests with these names are read. Raises `AbortedByCaller` if all of them
        are aborted; gives the names of those that are.
        """
        reading = _Reading(owner, frozenset(names), asyncio.timeout(None))
        limit = reading.limit
        self._readings.add(reading)
        try:
            async with limit:
                yield reading.aborted
            is_aborted = limit.when() is not None  # too late to be interrupted
        except TimeoutError:
            if not limit.expired():
                raise
            is_aborted = True
        finally:
            self._readings.remove(reading)
        if is_aborted:
            raise AbortedByCaller("the request was aborted before it ran")

    def abort(self, owner: Owner, is_meant: Callable[[str], bool]) -> bool:
        """Ends those of an owner with such a name; returns whether there are any, of which some may be ending."""
        now, found = asyncio.get_running_loop().time(), False
        for reading in self._readings:
            if reading.owner != owner or not (meant := set(filter(is_meant, reading.names))):
                continue
            found = True
            reading.aborted |= meant
            if len(reading.aborted) == len(reading.names) and reading.limit.when() is None:  # not ending already
                reading.limit.reschedule(now)
        return found
