"""Requests and journal entries for tests of the gateway without its APIs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from services.common.sampling_params import SamplingParams
from services.gateway.access.access import Access
from services.gateway.access.admission import Admission
from services.gateway.core.generation import Generation
from services.gateway.link.journal import Journal
from services.gateway.link.journal_entry import JournalEntry
from services.gateway.metrics.gateway_metrics import GatewayMetrics
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.text.tokenizer import Tokenizer
from services.rpc.spans import NoSpan
from services.step import SequenceSpec

_SHOWN = ("num_logprobs", "priority")  # what the client named, and what the dense worker gets
_SPEC_FIELDS = {field.name for field in fields(SequenceSpec)}


def make_request(request_id: str = "r", max_tokens: int = 10, **options: Any) -> GenerationRequest:
    """A plain request for one answer; `options` override fields of it or of its spec. 0 tokens: for the prompt only."""
    asked = {name: options.pop(name) for name in list(options) if name in _SPEC_FIELDS and name not in _SHOWN}
    shown = {name: options[name] for name in _SHOWN if options.get(name) is not None}
    defaults = {"prompt_token_ids": [1, 2], "sampling": SamplingParams(), **shown}
    spec = SequenceSpec(request_id=request_id, max_tokens=max(1, max_tokens), **{**defaults, **asked})
    own: dict[str, Any] = {
        "wants_output": max_tokens > 0,
        "stop": (),
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "n": 1,
        "best_of": 1,
        "num_logprobs": None,
        "prompt_text": None,
        "echo": False,
        "priority": None,
        "user": "",
    }
    return GenerationRequest(spec, **{**own, **options})


def make_generation(
    request: GenerationRequest, tokenizer: Tokenizer, journal: Journal, dense: Any, metrics: GatewayMetrics
) -> Generation:
    """The answers to a request of a caller without limits."""
    ticket = Admission(journal, 1000, 10**6).open(Access(None, "").identify(None))
    return Generation(request, tokenizer, journal, dense, metrics, ticket, NoSpan())


def open_entry(journal: Journal, request: GenerationRequest) -> JournalEntry:
    """Opens a request for one answer; returns its only sequence."""
    [entry] = journal.open(request)
    return entry


async def take(entry: JournalEntry) -> list[int]:
    """Waits for updates of an entry, as its request's handler does, and returns its new tokens."""
    assert await entry.updates.next() is entry
    token_ids, _, _ = entry.take_new_tokens()
    return token_ids
