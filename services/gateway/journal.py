"""The journal: all that is needed to continue every open sequence after a worker died.

One entry per open sequence: its request and every token so far. The dense client's reader appends
tokens, the request's handler takes them; both run in the gateway's event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator
from enum import Enum

from services.common.errors import InvalidRequest, TwostrokeError
from services.gateway.request import GenerationRequest


class FinishReason(Enum):
    """Why a generation ended as it should."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length


class JournalEntry:
    """One open sequence. `output_token_ids` holds at most `request.max_tokens` tokens."""

    __slots__ = (
        "_num_taken",
        "_waiter",
        "error",
        "finish_reason",
        "num_cached_tokens",
        "output_token_ids",
        "request",
        "seq_id",
    )

    def __init__(self, seq_id: int, request: GenerationRequest) -> None:
        self.seq_id = seq_id
        self.request = request
        self.output_token_ids: list[int] = []
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it first ran
        self.finish_reason: FinishReason | None = None
        self.error: TwostrokeError | None = None
        self._num_taken = 0  # output tokens that the handler has
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_ended(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None or self.error is not None

    def append(self, token_id: int) -> None:
        """Adds one token."""
        self.output_token_ids.append(token_id)
        self._wake()

    def finish(self, reason: FinishReason) -> None:
        """Ends the sequence; its last token has been appended before."""
        self.finish_reason = reason
        self._wake()

    def fail(self, error: TwostrokeError) -> None:
        """Ends the sequence with an error for its client, unless it has ended already."""
        if not self.is_ended:
            self.error = error
            self._wake()

    async def take(self) -> list[int]:
        """Waits for news, then returns all tokens not taken yet; none only if it finished without one.

        Raises the error that ended the sequence, once its tokens are taken. For one caller at a time.
        """
        if self._num_taken == len(self.output_token_ids) and not self.is_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        token_ids = self.output_token_ids[self._num_taken :]
        self._num_taken += len(token_ids)
        if self.error is not None and not token_ids:
            raise self.error
        return token_ids

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Journal:
    """All open sequences of this gateway, by seq_id."""

    def __init__(self) -> None:
        self._entries: dict[int, JournalEntry] = {}
        self._request_ids: set[str] = set()
        self._instance = secrets.randbits(31)  # tells the gateways of one dense worker apart
        self._counter = itertools.count(1)
        self._shut_error: TwostrokeError | None = None

    def open(self, request: GenerationRequest) -> JournalEntry:
        """A new entry with a seq_id of its own. Raises `InvalidRequest` if the request_id is in use."""
        if self._shut_error is not None:
            raise self._shut_error
        if request.request_id in self._request_ids:
            raise InvalidRequest(f"request_id {request.request_id!r} is in use by a running request")
        seq_id = self._instance << 32 | next(self._counter) & 0xFFFF_FFFF
        entry = JournalEntry(seq_id, request)
        self._entries[seq_id] = entry
        self._request_ids.add(request.request_id)
        return entry

    def close(self, entry: JournalEntry) -> None:
        """Forgets a sequence; tokens that still come for it are ignored."""
        del self._entries[entry.seq_id]
        self._request_ids.remove(entry.request.request_id)

    def get(self, seq_id: int) -> JournalEntry | None:
        """The open entry of that name, if there is one."""
        return self._entries.get(seq_id)

    def unfinished(self) -> Iterator[JournalEntry]:
        """Entries that a dense worker has to continue, oldest first."""
        return (entry for entry in self._entries.values() if not entry.is_ended)

    def shut(self, error: TwostrokeError) -> None:
        """Fails every sequence, and from now on every new one, with `error`."""
        self._shut_error = error
        for entry in self._entries.values():
            entry.fail(error)

    def __len__(self) -> int:
        return len(self._entries)
