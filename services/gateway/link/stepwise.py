"""Answers in chunks of one token each, whose order does not depend on time.

Otherwise a chunk has all tokens that arrived since the last one, from whichever answer had some. In a resumable
request equal tokens give equal chunks, so that a second run can go on exactly behind a chunk of the first one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from services.common.errors import InvalidRequest
from services.common.token_logprobs import LogprobRows
from services.gateway.features.progress import PromptProgress
from services.gateway.link.journal_entry import FinishReason, JournalEntry
from services.gateway.link.update_queue import UpdateQueue
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.resources.repeatable import current_run


class TurnQueue(UpdateQueue[JournalEntry]):
    """The answers to one request take turns, a chunk each, whichever has tokens first."""

    __slots__ = ("_ready", "_remaining")

    def __init__(self, num_answers: int) -> None:
        self._remaining = deque(range(num_answers))  # indexes of the answers that have not ended
        self._ready: dict[int, JournalEntry] = {}  # entries with updates, by index
        self._waiter: asyncio.Future[None] | None = None

    def put(self, entry: JournalEntry) -> None:
        self._ready[entry.index] = entry
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> JournalEntry:
        while self._remaining[0] not in self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        entry = self._ready.pop(self._remaining[0])
        self._remaining.rotate(-1)
        return entry

    def leave(self, entry: JournalEntry) -> None:
        self._remaining.remove(entry.index)


class StepwiseEntry(JournalEntry):
    """An entry whose tokens are taken one at a time. Notes them in the `Repeatable` of the task that opens it."""

    __slots__ = ("_run",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        run = current_run()
        assert run is not None, "only resumable requests are stepwise"
        self._run = run

    def take_new_tokens(self) -> tuple[list[int], LogprobRows, FinishReason | None]:
        self._is_in_updates = False
        start = self._num_taken_tokens
        token_ids = self.output_token_ids[start : start + 1]
        if self.error is not None and not token_ids:
            raise self.error
        self._num_taken_tokens += len(token_ids)
        for token_id in token_ids:
            self._run.note(token_id)
        logprobs = self.logprobs[: len(token_ids)]
        self.logprobs = self.logprobs[len(token_ids) :]
        has_more = self._num_taken_tokens < len(self.output_token_ids)
        if has_more or self.error is not None:
            self._put_in_updates()
        return token_ids, logprobs, None if has_more else self.finish_reason


def check_repeatable(request: GenerationRequest) -> None:
    """Raises `InvalidRequest` for what cannot be the same again."""
    if PromptProgress.name in request.spec.features:
        raise InvalidRequest(
            "return_progress cannot be used in a resumable request: progress depends on time", "return_progress"
        )
