"""The common fields of all objects of one answer, and its token counts."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from services.gateway.apis.openai.answer_objects import UsageObject
from services.gateway.core.chunks import Finish
from services.gateway.core.request_service import RequestService
from services.gateway.resources.repeatable import created_at


def head(service: RequestService, kind: str, answer_id: str, model: str | None) -> dict[str, Any]:
    """The fields that every object of one answer has: id, kind, time and model.

    `kind` is OpenAI's `text_completion`, `chat.completion` or `chat.completion.chunk`. `model` is the name in the
    request, which the answer repeats.
    """
    return {
        "id": answer_id,
        "object": kind,
        "created": created_at(),
        "model": model or service.names.first,
        "system_fingerprint": f"fp_{service.model.weights_hash[:12]}",
    }


class UsageCounter:
    """Counts a request's tokens: each prompt once, all answers to it."""

    def __init__(self) -> None:
        self._prompts: dict[int, Finish] = {}
        self._num_output_tokens = 0
        self._num_reasoning_tokens: int | None = None  # None: reasoning is not separated

    def add(self, prompt_index: int, finish: Finish) -> None:
        """Counts one answer to the prompt with this index."""
        first = self._prompts.setdefault(prompt_index, finish)
        if finish.num_cached_tokens < first.num_cached_tokens:
            self._prompts[prompt_index] = finish  # the first of several answers computes the prompt for the others
        self._num_output_tokens += finish.num_output_tokens
        if finish.num_reasoning_tokens is not None:
            self._num_reasoning_tokens = (self._num_reasoning_tokens or 0) + finish.num_reasoning_tokens

    def usage(self) -> UsageObject:
        """The counts as OpenAI's object."""
        num_prompt_tokens = sum(finish.num_prompt_tokens for finish in self._prompts.values())
        usage: UsageObject = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(finish.num_cached_tokens for finish in self._prompts.values())
            },
        }
        if self._num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage


def running_usage(num_prompt_tokens: int, num_output_tokens: int) -> UsageObject:
    """The counts of one unfinished answer, without cached tokens."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def stop_fields(finish: Finish, eos_token_ids: Container[int]) -> dict[str, str | int | None]:
    """The stop string or the id of the token that ended an answer, None if neither did.

    `matched_stop` is SGLang's field, and `stop_reason` vLLM's, which is None for EOS, too.
    """
    if finish.stop_string is not None:
        return {"stop_reason": finish.stop_string, "matched_stop": finish.stop_string}
    token_id = finish.stop_token_id
    return {"stop_reason": None if token_id in eos_token_ids else token_id, "matched_stop": token_id}
