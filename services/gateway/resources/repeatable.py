"""`Repeatable`: what a request leaves to chance. With the same one, a second run of a request gives the same answer.

The functions here are for all code of the gateway that draws a number or reads the clock for an answer. For ordinary
requests they ask the operating system. Within a resumable request they ask its `Repeatable`, which a peer also has.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random

from services.common.errors import InvalidRequest

ENTROPY_BYTES = 16

_current: ContextVar[Repeatable | None] = ContextVar("repeatable", default=None)  # of the request that this task runs


@dataclass(slots=True)
class Repeatable:
    """One run of a resumable request. A further run needs one with the same name, entropy and time."""

    request_id: str
    entropy: bytes = field(default_factory=lambda: secrets.token_bytes(ENTROPY_BYTES))
    created: float = field(default_factory=time.time)  # when the first run began, in seconds since 1970
    has_failed: bool = False  # then what is sent is not part of the answer; a further run may succeed
    is_opening: bool = field(default=False, init=False)  # see `opening`
    _crc: int = field(default=0, init=False)
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.entropy)

    @property
    def digest(self) -> int:
        """CRC-32 of all output tokens that have been given out, each as 4 bytes, little-endian."""
        return 0 if self.is_opening else self._crc

    def draw_bits(self, num_bits: int) -> int:
        """The next number."""
        return self._random.getrandbits(num_bits)

    def note(self, token_id: int) -> None:
        """Adds an output token to the digest."""
        self._crc = zlib.crc32(token_id.to_bytes(4, "little"), self._crc)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in the task that runs the request."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_run() -> Repeatable | None:
    """That of the request which the current task runs; None if it is not resumable."""
    return _current.get()


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """A context to send what precedes all tokens in: its digest is that of none, though the first may be there."""
    run = _current.get()
    if run is None:
        yield
        return
    run.is_opening = True
    try:
        yield
    finally:
        run.is_opening = False


def note_failure() -> None:
    """Called before the events that end a stream with an error."""
    run = _current.get()
    if run is not None:
        run.has_failed = True


def check_one_prompt(num_prompts: int) -> None:
    """Raises `InvalidRequest` if the current task runs a resumable stream with several prompts."""
    if num_prompts > 1 and _current.get() is not None:
        raise InvalidRequest(
            f"prompt has {num_prompts} prompts: a resumable stream must have 1, because the order of the others' "
            "chunks depends on time",
            "prompt",
        )


def draw_bits(num_bits: int) -> int:
    """A random number of so many bits."""
    run = _current.get()
    return secrets.randbits(num_bits) if run is None else run.draw_bits(num_bits)


def draw_hex(num_bytes: int) -> str:
    """A random number of so many bytes in hexadecimal digits."""
    return f"{draw_bits(8 * num_bytes):0{2 * num_bytes}x}"


def created_at() -> int:
    """When the request began, in seconds since 1970, as answers tell it."""
    run = _current.get()
    return int(time.time() if run is None else run.created)
