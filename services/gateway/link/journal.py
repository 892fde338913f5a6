"""The journal: all that is needed to continue every open sequence after a worker died.

One entry per open sequence: its request and every token so far. The dense client's reader appends
tokens, the request's handler takes them; both run in the gateway's event loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from services.common.errors import InvalidRequest, TwostrokeError
from services.common.sampling_params import MAX_SEED, SamplingParams
from services.common.token_logprobs import TokenLogprobs
from services.gateway.request import GenerationRequest

if TYPE_CHECKING:
    from services.gateway.link.dense_pool import Share


class FinishReason(Enum):
    """Why a generation ended without an error."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # somebody asked for it


class UpdateQueue:
    """Tells a request's handler which of its sequences have something new."""

    def __init__(self) -> None:
        self._entries: deque[JournalEntry] = deque()  # each once
        self._waiter: asyncio.Future[None] | None = None

    def put(self, entry: JournalEntry) -> None:
        """Announces an entry that is not announced already."""
        self._entries.append(entry)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> JournalEntry:
        """Waits for an entry with updates. For one caller at a time."""
        while not self._entries:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._entries.popleft()


class JournalEntry:
    """One open sequence: answer `index` of its request. Ends with at most `request.max_tokens` tokens."""

    __slots__ = (
        "_is_announced",
        "_journal",
        "_num_taken",
        "arrival",
        "crash_start",
        "error",
        "finish_reason",
        "first_token_at",
        "index",
        "is_admitted",
        "last_token_at",
        "logprobs",
        "num_cached_tokens",
        "num_crashes",
        "output_token_ids",
        "prompt_logprobs",
        "queue_s",
        "request",
        "sampling",
        "seq_id",
        "share",
        "updates",
    )

    def __init__(
        self, journal: Journal, seq_id: int, request: GenerationRequest, index: int, updates: UpdateQueue
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.sampling: SamplingParams = request.sampling
        if index:
            self.sampling = replace(request.sampling, seed=(request.sampling.seed + index) & MAX_SEED)
        self.output_token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # aligned with `output_token_ids`, if asked for
        self.prompt_logprobs: list[TokenLogprobs] = []  # of all prompt tokens but the first, if asked for
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when it first ran
        self.queue_s: float | None = None  # from its arrival at the dense worker until it first ran
        self.arrival = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error: TwostrokeError | None = None
        self.is_admitted = False  # a step of the dense worker may have it
        self.num_crashes = 0  # of a worker, in a row, that it may have caused: no token came in between
        self.crash_start = 0  # index of the first token that a step was computing in the last of them, as far as known
        self.share: Share | None = None  # of which stream
        self._journal = journal
        self._num_taken = 0  # output tokens that the handler has
        self.updates = updates
        self._is_announced = False  # announced, and not taken since

    @property
    def is_ended(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None or self.error is not None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """How many likeliest prompt tokens to report still; None: nothing, or all of it is here.

        All answers have the same: the first one asks for them.
        """
        if self.index:
            return None
        is_complete = len(self.prompt_logprobs) == len(self.request.prompt_token_ids) - 1
        return None if is_complete else self.request.num_prompt_logprobs

    @property
    def queue_timeout_ms(self) -> int:
        """What is left of the time it may wait; 0, for ever, once it has run."""
        limit_s = self.request.queue_timeout_s
        if limit_s is None or self.queue_s is not None:
            return 0
        return max(1, round(1e3 * (self.arrival + limit_s - time.monotonic())))

    def start(self, queue_s: float, num_cached_tokens: int) -> None:
        """The sequence took part in a step; it may do so again after a worker died, which changes nothing."""
        if self.queue_s is None:
            self.queue_s, self.num_cached_tokens = queue_s, num_cached_tokens
            self._journal.count_started(self)

    def append(self, token_id: int, now: float) -> None:
        """Adds one token, which came at `now` by the monotonic clock."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.num_crashes = 0
        self.output_token_ids.append(token_id)
        if not self._is_announced:
            self._announce()

    def set_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Those of the prompt tokens from index `start` on; a span may come again after a worker died."""
        if start - 1 <= len(self.prompt_logprobs):
            self.prompt_logprobs[start - 1 : start - 1 + len(logprobs)] = logprobs

    def finish(self, reason: FinishReason) -> None:
        """Ends the sequence; its last token has been appended before."""
        if self.request.max_tokens == 0 and reason is not FinishReason.ABORT:
            self._forget_token()
            reason = FinishReason.LENGTH
        self.finish_reason = reason
        self._announce()

    def _forget_token(self) -> None:
        """The prompt alone was wanted; this came in the same step as the end, so that nobody has seen it."""
        self.output_token_ids.clear()
        self.logprobs.clear()
        self.first_token_at = self.last_token_at = None

    def fail(self, error: TwostrokeError) -> None:
        """Ends the sequence with an error for its client, unless it has ended already."""
        if not self.is_ended:
            self.error = error
            self._announce()

    def take(self) -> tuple[list[int], list[TokenLogprobs]]:
        """All tokens not taken yet, with their log-probabilities if asked for.

        Raises the error that ended the sequence, once its tokens are taken.
        """
        self._is_announced = False
        start = self._num_taken
        token_ids = self.output_token_ids[start:]
        if self.error is not None:
            if not token_ids:
                raise self.error
            self._announce()  # for the next call
        self._num_taken += len(token_ids)
        return token_ids, self.logprobs[start:]

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            self.updates.put(self)


class Journal:
    """All open sequences of this gateway, by seq_id, and by request_id among those of one caller."""

    def __init__(self) -> None:
        self._entries: dict[int, JournalEntry] = {}
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
            entries.append(JournalEntry(self, seq_id, request, index, updates))
            self._entries[seq_id] = entries[-1]
        self._by_request_id[name] = entries
        self.num_waiting += len(entries)
        self.num_waiting_tokens += len(entries) * len(request.prompt_token_ids)
        return entries

    def close(self, entry: JournalEntry) -> None:
        """Forgets a sequence; tokens that still come for it are ignored."""
        del self._entries[entry.seq_id]
        if entry.share is not None:
            entry.share.discard(entry)
        name = (entry.request.caller, entry.request.request_id)
        siblings = self._by_request_id[name]
        siblings.remove(entry)
        if not siblings:
            del self._by_request_id[name]
        if entry.queue_s is None:
            self.count_started(entry)

    def get(self, seq_id: int) -> JournalEntry | None:
        """The open entry of that name, if there is one."""
        return self._entries.get(seq_id)

    def of_request(self, caller: str, request_id: str) -> list[JournalEntry]:
        """The open sequences of a caller's request."""
        return list(self._by_request_id.get((caller, request_id), ()))

    @property
    def instance(self) -> int:
        """Upper half of all seq_ids of this gateway."""
        return self._instance

    def unfinished(self) -> Iterator[JournalEntry]:
        """Entries that a dense worker has to continue, oldest first."""
        return (entry for entry in self._entries.values() if not entry.is_ended)

    def count_started(self, entry: JournalEntry) -> None:
        """An entry does not wait any more."""
        self.num_waiting -= 1
        self.num_waiting_tokens -= len(entry.request.prompt_token_ids)
        self.left_at.append(time.monotonic())

    def shut(self, error: TwostrokeError) -> None:
        """Fails every sequence, and from now on every new one, with `error`."""
        self._shut_error = error
        for entry in self._entries.values():
            entry.fail(error)

    def __len__(self) -> int:
        return len(self._entries)
