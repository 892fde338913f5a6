"""Requests and journal entries for tests of the gateway without its APIs."""

from __future__ import annotations

from typing import Any

from services.common.sampling_params import SamplingParams
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry, UpdateQueue
from services.gateway.request.generation_request import GenerationRequest


def make_request(request_id: str = "r", **fields: Any) -> GenerationRequest:
    """A plain request for one answer of at most 10 tokens; `fields` override its fields."""
    defaults: dict[str, Any] = {
        "prompt_token_ids": [1, 2],
        "sampling": SamplingParams(),
        "max_tokens": 10,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "cache_salt": "",
        "n": 1,
        "best_of": 1,
        "num_logprobs": None,
        "num_prompt_logprobs": None,
        "prompt_text": None,
        "echo": False,
        "priority": None,
        "user": "",
    }
    return GenerationRequest(request_id=request_id, **{**defaults, **fields})


def open_entry(journal: Journal, request: GenerationRequest) -> JournalEntry:
    """Opens a request for one answer; returns its only sequence."""
    [entry] = journal.open(request, UpdateQueue())
    return entry


async def take(entry: JournalEntry) -> list[int]:
    """Waits for updates of an entry, as its request's handler does, and returns its new tokens."""
    assert await entry.updates.next() is entry
    token_ids, _ = entry.take_new_tokens()
    return token_ids
