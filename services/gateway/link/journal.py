"""`Journal`: every open sequence of this gateway, and which stream to a dense worker runs it.

It is what makes the death of a worker a pause: all that is needed to continue is here. Runs in the gateway's event
loop.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Iterator

from services.common.errors import InvalidRequest, TwostrokeError
from services.gateway.link.journal_entry import JournalEntry, UpdateQueue
from services.gateway.link.stream_sequences import StreamSequences
from services.gateway.request import GenerationRequest


class Journal:
    """All open sequences of this gateway, by seq_id, and by request_id among those of one caller."""

    def __init__(self) -> None:
        self._entries: dict[int, JournalEntry] = {}
        self._streams: dict[int, StreamSequences] = {}  # which runs a sequence, by seq_id, once it is submitted
        self._by_request_id: dict[tuple[str, str], list[JournalEntry]] = {}  # and by caller, who comes first
        self._instance = secrets.randbits(31)  # tells the gateways of one dense worker apart
        self._counter = itertools.count(1)
        self._shut_error: TwostrokeError | None = None
        self.num_waiting = 0  # sequences that have not started yet
        self.num_waiting_tokens = 0  # of their prompts
        self.left_at: deque[float] = deque(maxlen=256)  # when the last ones ceased to wait, on the monotonic clock

    def open(self, request: GenerationRequest, updates: UpdateQueue) -> list[JournalEntry]:
        """`request.best_of` new entries with seq_ids of their own, which announce themselves at `updates`.

        Raises `InvalidRequest` if the request_id is in use by the same caller; of others' nobody learns.
        """
        if self._shut_error is not None:
            raise self._shut_error
        name = (request.caller, request.request_id)
        if name in self._by_request_id:
            raise InvalidRequest(f"request_id {request.request_id!r} is in use by a running request", "request_id")
        entries = []
        for index in range(request.best_of):
            seq_id = self._instance << 32 | next(self._counter) & 0xFFFF_FFFF
            entries.append(JournalEntry(seq_id, request, index, updates, self._count_started))
            self._entries[seq_id] = entries[-1]
        self._by_request_id[name] = entries
        self.num_waiting += len(entries)
        self.num_waiting_tokens += len(entries) * len(request.prompt_token_ids)
        return entries

    def close(self, entry: JournalEntry) -> None:
        """Forgets a sequence; tokens that still come for it are ignored."""
        del self._entries[entry.seq_id]
        stream = self._streams.pop(entry.seq_id, None)
        if stream is not None:
            stream.discard(entry)
        name = (entry.request.caller, entry.request.request_id)
        siblings = self._by_request_id[name]
        siblings.remove(entry)
        if not siblings:
            del self._by_request_id[name]
        if entry.queue_s is None:
            self._count_started(entry)

    def new_stream(self) -> StreamSequences:
        """What one more stream to a dense worker runs; nothing yet."""
        return StreamSequences(self._instance)

    def assign(self, entry: JournalEntry, stream: StreamSequences) -> None:
        """`stream` runs this sequence from now on, and the one that had it does not."""
        previous = self._streams.get(entry.seq_id)
        if previous is not None:
            previous.discard(entry)
        self._streams[entry.seq_id] = stream
        stream.add(entry)

    def stream_of(self, entry: JournalEntry) -> StreamSequences:
        """Which stream runs a sequence that has been assigned to one and is open still."""
        return self._streams[entry.seq_id]

    def of_request(self, caller: str, request_id: str) -> list[JournalEntry]:
        """The open sequences of a caller's request."""
        return list(self._by_request_id.get((caller, request_id), ()))

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

    def _count_started(self, entry: JournalEntry) -> None:
        """An entry does not wait any more."""
        self.num_waiting -= 1
        self.num_waiting_tokens -= len(entry.request.prompt_token_ids)
        self.left_at.append(time.monotonic())
