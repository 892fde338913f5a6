"""Counts that the gateway processes of a server add up, so that a limit is the sum's and not each process's.

They lie in shared memory, which the launcher makes. Each process writes one row, and reads those of the others: each
number is an aligned word with one writer, so nobody waits, and a process that is killed leaves none half-written. Two
processes that decide at the same moment may exceed a limit by what they decide on.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from services.common.errors import CapacityError, ConfigError, PeerError

GAUGES = (  # of all callers
    *("preparing", "waiting", "waiting_tokens"),
    *("held_bytes", "held_waiting", "held_small"),
    *("held_bodies", "held_unsettled"),
    *("held_last_bodies_any", "held_last_bodies_little", "held_last_features_any", "held_last_features_little"),
    "resumable",
)
MAX_KEYS = 4096  # API keys with counts of their own; those that are gone keep their place
_LOCK_TIMEOUT_S, _LOCK_POLL_S = 2.0, 0.001
_WORD_BYTES = 8
_NAME_BYTES = 16  # of a hash; zeros: the place is free
_COUNTS_PER_KEY = 3
_ROW_WORDS = len(GAUGES) + _COUNTS_PER_KEY * MAX_KEYS
_ROWS_AT = _NAME_BYTES * MAX_KEYS


class Count:
    """A number that this process changes. Alone it is the total, too."""

    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = 0

    def add(self, amount: int) -> None:
        """Changes the number of this process."""
        self.own += amount

    @property
    def others(self) -> int:
        """The sum of the other processes' numbers."""
        return 0

    @property
    def total(self) -> int:
        """The sum of all processes' numbers."""
        return self.own


class KeyCounts(NamedTuple):
    """What an API key uses."""

    open_answers: Count
    taken_requests: Count  # since the launcher has started; it never falls
    taken_tokens: Count  # likewise


class Counts:
    """The counts of a process that is the only one."""

    is_shared = False

    def gauge(self, name: str) -> Count:
        """One of `GAUGES`, which is 0 now for this process."""
        assert name in GAUGES
        return Count()

    def of_keys(self, names: Sequence[str], *, waits: bool = True) -> list[KeyCounts]:
        """Those of the API keys of these names.

        Raises `ConfigError`, and changes nothing, if not all have a place, and `PeerError` if another process looks
        for its keys: at once, or with `waits` after `_LOCK_TIMEOUT_S`.
        """
        return [KeyCounts(Count(), Count(), Count()) for _ in names]


class SharedCounts(Counts):
    """The counts of one of several processes. Each object that it gives is for one caller."""

    is_shared = True

    def __init__(self, path: Path, index: int) -> None:
        """`index`: of this process among those that share the file of `make`. One that has died had the same."""
        self._path = path
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._memory)[_ROWS_AT:].cast("q")
        self._index = index

    @staticmethod
    def make(path: Path, num_processes: int) -> None:
        """Makes the file, with all its space: a store to a page without space would end a process.

        Raises `CapacityError` without room.
        """
        num_bytes = _ROWS_AT + num_processes * _ROW_WORDS * _WORD_BYTES
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            raise CapacityError(
                f"the counts of {num_processes} gateway processes need {num_bytes} bytes in {path.parent}:"
                f" {error.strerror}"
            ) from error
        finally:
            os.close(file)

    def gauge(self, name: str) -> Count:
        return self._count(GAUGES.index(name), starts_anew=True)

    def of_keys(self, names: Sequence[str], *, waits: bool = True) -> list[KeyCounts]:
        firsts = [len(GAUGES) + _COUNTS_PER_KEY * place for place in self._places_of(names, _LOCK_TIMEOUT_S * waits)]
        return [
            KeyCounts(
                self._count(first, starts_anew=True),
                self._count(first + 1, starts_anew=False),
                self._count(first + 2, starts_anew=False),
            )
            for first in firsts
        ]

    def _count(self, column: int, *, starts_anew: bool) -> Count:
        places = range(column, len(self._words), _ROW_WORDS)
        return _SharedCount(self._words, places[self._index], places, starts_anew=starts_anew)

    def _places_of(self, names: Sequence[str], timeout_s: float) -> list[int]:
        """The places of keys, the same in all processes. One look at the table, and one change of it, for all."""
        digests = {name: blake2b(name.encode(), digest_size=_NAME_BYTES).digest() for name in names}
        if not digests:
            return []
        with self._locked(timeout_s):
            table = self._memory[: _NAME_BYTES * MAX_KEYS]
            places: dict[bytes, int] = {}
            for start in range(0, len(table), _NAME_BYTES):
                if not any(found := table[start : start + _NAME_BYTES]):
                    break
                places[found] = start // _NAME_BYTES
            new = list(dict.fromkeys(digest for digest in digests.values() if digest not in places))
            first, room = len(places), MAX_KEYS - len(places)
            if len(new) > room:
                name = next(name for name, digest in digests.items() if digest == new[room])
                raise ConfigError(
                    f"several gateway processes have room for {MAX_KEYS} API keys since the launcher has started, "
                    f"{name!r} is one more: set launch.gateway_processes to 1"
                )
            places |= {digest: first + number for number, digest in enumerate(new)}
            self._memory[_NAME_BYTES * first : _NAME_BYTES * (first + len(new))] = b"".join(new)
        return [places[digests[name]] for name in names]

    @contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        """Another process has the lock for milliseconds, while it looks for keys. Raises `PeerError` after a while."""
        deadline = time.monotonic() + timeout_s
        with self._path.open("rb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() >= deadline:
                        raise PeerError(
                            f"another gateway process has held the lock of the shared counts for {timeout_s:g} s"
                        ) from error
                time.sleep(_LOCK_POLL_S)
            yield  # closing the file gives up the lock


class _SharedCount(Count):
    __slots__ = ("_place", "_places", "_words")

    def __init__(self, words: memoryview, place: int, places: range, *, starts_anew: bool) -> None:
        """`places`: in `words`, those of all processes."""
        self._words, self._place, self._places = words, place, places
        self.own = 0 if starts_anew else words[place]
        words[place] = self.own

    def add(self, amount: int) -> None:
        self.own += amount
        self._words[self._place] = self.own

    @property
    def others(self) -> int:
        words = self._words
        return sum([words[place] for place in self._places]) - self.own

    @property
    def total(self) -> int:
        words = self._words
        return sum([words[place] for place in self._places])
