"""`Journal`: all open sequences of this gateway.

Because of the journal the death of a worker is only a pause: it has everything that is needed to continue. Runs in the
gateway's event loop.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from services.common.errors import InvalidRequest, TwostrokeError
from services.common.fairness import Client
from services.common.shared_counts import Counts
from services.gateway.link.journal_entry import JournalEntry, StreamSequences
from services.gateway.link.stepwise import StepwiseEntry, TurnQueue
from services.gateway.link.update_queue import Turns, UpdateQueue
from services.gateway.request.generation_request import GenerationRequest, Owner

NUM_SEQ_IDS = 2**32  # of one gateway; later ones are used again


class Journal:
    """All open sequences of this gateway, by seq_id, and by request_id among those of one caller.

    `waiting`, `waiting_tokens`: sequences that have not started yet, and the tokens of their prompts, also those of
    other processes.
    """

    def __init__(self, counts: Counts | None = None) -> None:
        """`counts`: those of all processes; None: this is the only one."""
        counts = counts or Counts()
        self.waiting, self.waiting_tokens = counts.gauge("waiting"), counts.gauge("waiting_tokens")
        self.turns = Turns()
        self._entries: dict[int, JournalEntry] = {}
        self._by_request_id: dict[tuple[Owner, str], list[JournalEntry]] = {}
        self._instance = secrets.randbits(31)  # identifies this gateway at a dense worker
        self._next_number = 1  # lower half of the next seq_id
        self._shut_error: TwostrokeError | None = None
        self._waiting_of = Counter[Client]()  # the same two counts by client; a client without has no entry
        self._waiting_tokens_of = Counter[Client]()
        self.left_at: deque[float] = deque(maxlen=256)  # when the last ones stopped waiting, on the monotonic clock

    def open(self, request: GenerationRequest) -> list[JournalEntry]:
        """Adds new entries with new seq_ids, one for each answer, which announce their updates in one queue.

        Behind the seq_id of a beam search as many are left free as it has beams.

        Raises `InvalidRequest` if the same owner uses the request_id already; the ids of others do not matter.
        """
        if self._shut_error is not None:
            raise self._shut_error
        self.turns.note_arrival()
        name = (request.owner, request.spec.request_id)
        if name in self._by_request_id:
            raise InvalidRequest(
                f"Duplicate request ID: request_id {request.spec.request_id!r} is in use by a running request",
                "request_id",
            )
        new_entry: type[JournalEntry] = JournalEntry
        updates: UpdateQueue[JournalEntry] = UpdateQueue(self.turns)
        if request.is_stepwise:
            new_entry, updates = StepwiseEntry, TurnQueue(request.num_sequences)
        entries = []
        first = self._take_seq_ids(request.best_of)
        for index in range(request.num_sequences):
            entries.append(new_entry(first + index, request, index, updates, self._count_started))
            self._entries[first + index] = entries[-1]
        if request.spec.beam_search is not None:
            entries[0].followers = entries[1:]
        self._by_request_id[name] = entries
        self._count_waiting(request, len(entries))
        return entries

    def waiting_of(self, client: Client) -> tuple[int, int]:
        """How many sequences of a client have not started yet, and the number of tokens of their prompts."""
        return self._waiting_of[client], self._waiting_tokens_of[client]

    def close(self, entry: JournalEntry) -> None:
        """Forgets a sequence; later tokens for it are ignored."""
        del self._entries[entry.seq_id]
        if entry.stream is not None:
            entry.stream.discard(entry)
        name = (entry.request.owner, entry.spec.request_id)
        entries = self._by_request_id[name]
        entries.remove(entry)
        if not entries:
            del self._by_request_id[name]
        if entry.queue_s is None:
            self._count_started(entry)

    def new_stream(self) -> StreamSequences:
        """The sequences of one more stream to a dense worker; none yet."""
        return StreamSequences(self._instance)

    def of_owner(self, owner: Owner, is_meant: Callable[[str], bool]) -> list[JournalEntry]:
        """The open sequences of an owner's requests with such ids."""
        return [
            entry
            for (of_request, request_id), entries in self._by_request_id.items()
            if of_request == owner and is_meant(request_id)
            for entry in entries
        ]

    def unfinished(self) -> Iterator[JournalEntry]:
        """Entries that a dense worker must continue, oldest first."""
        return (entry for entry in self._entries.values() if not entry.is_ended)

    def adapter_names(self) -> tuple[set[str], set[str]]:
        """The names of the adapters of sequences that have started, and of those that wait."""
        running: set[str] = set()
        waiting: set[str] = set()
        for entry in self.unfinished():
            if entry.spec.adapter is not None:
                (waiting if entry.queue_s is None else running).add(entry.spec.adapter.name)
        return running, waiting

    def shut(self, error: TwostrokeError) -> None:
        """Fails all sequences, and all later ones, with `error`."""
        self._shut_error = error
        for entry in self._entries.values():
            entry.fail(error)

    def __len__(self) -> int:
        return len(self._entries)

    def _take_seq_ids(self, count: int) -> int:
        """The first of `count` consecutive seq_ids that are new."""
        if self._next_number + count > NUM_SEQ_IDS:
            self._next_number = 1
        first = self._next_number
        self._next_number += count
        return self._instance << 32 | first

    def _count_started(self, entry: JournalEntry) -> None:
        """Counts that an entry no longer waits."""
        self._count_waiting(entry.request, -1)
        self.left_at.append(time.monotonic())

    def _count_waiting(self, request: GenerationRequest, num_more: int) -> None:
        num_more_tokens = num_more * len(request.spec.prompt_token_ids)
        self.waiting.add(num_more)
        self.waiting_tokens.add(num_more_tokens)
        client = request.spec.client_id
        self._waiting_of[client] += num_more
        self._waiting_tokens_of[client] += num_more_tokens
        if not self._waiting_of[client]:
            del self._waiting_of[client], self._waiting_tokens_of[client]


def is_of_batch(request_id: str, name: str) -> bool:
    """Whether it is `name`-0, `name`-1, or so on."""
    return request_id.startswith(f"{name}-") and request_id[len(name) + 1 :].isdecimal()
