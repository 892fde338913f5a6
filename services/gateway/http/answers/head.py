"""What every object of one answer begins with, and its counts."""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Any

from services.gateway.frontend import Frontend
from services.gateway.generation import Finish
from services.gateway.http.schemas.answers import UsageObject


def head(frontend: Frontend, kind: str, answer_id: str, model: str | None) -> dict[str, Any]:
    """`kind` as in OpenAI's reference: `text_completion`, `chat.completion` or `chat.completion.chunk`.

    `model`: what the request calls it, whose answers do the same.
    """
    return {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": model or frontend.names.first,
        "system_fingerprint": f"fp_{frontend.model.weights_hash[:12]}",
    }


class UsageCounter:
    """Counts a request's tokens: each prompt once, all answers to it."""

    def __init__(self) -> None:
        self._prompts: dict[int, Finish] = {}
        self._num_output_tokens = 0

    def add(self, place: int, finish: Finish) -> None:
        """One answer to the prompt at `place`."""
        first = self._prompts.setdefault(place, finish)
        if finish.num_cached_tokens < first.num_cached_tokens:
            self._prompts[place] = finish  # of several answers the first to run computes the prompt for the others
        self._num_output_tokens += finish.num_output_tokens

    def usage(self) -> UsageObject:
        """OpenAI's object."""
        num_prompt_tokens = sum(finish.num_prompt_tokens for finish in self._prompts.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(finish.num_cached_tokens for finish in self._prompts.values())
            },
        }


def running_usage(num_prompt_tokens: int, num_output_tokens: int) -> UsageObject:
    """Of one answer while it grows; cached tokens are told at its end."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }


def stop_reason(finish: Finish, eos_token_ids: Container[int]) -> str | int | None:
    """vLLM's field: the stop string or stop token of the request that ended it; None for EOS, as for all else."""
    if finish.stop_string is not None:
        return finish.stop_string
    return None if finish.stop_token_id in eos_token_ids else finish.stop_token_id
