"""How long the parts of an answer took, as llama.cpp writes it; measured in the gateway.

Only the time in the queue is the dense worker's. A pause in which a worker was replaced counts like any other time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from services.gateway.core.chunks import Chunk, Finish
from services.gateway.features.progress import Progress, PromptProgress


class TimingsObject(TypedDict):
    """Counts of tokens, and times, as in llama.cpp."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class ProgressObject(TypedDict):
    """How far a prompt is computed, in tokens, as in llama.cpp."""

    total: int
    cache: int  # found in the prefix cache
    processed: int  # those included
    time_ms: int  # since its first step


def timings(finish: Finish) -> TimingsObject:
    """llama.cpp's object: the prompt from its first step to the first token, and the tokens from there to the end."""
    times = finish.timings
    first_token_s = times.total_s if times.first_token_s is None else times.first_token_s
    num_new = finish.num_prompt_tokens - finish.num_cached_tokens
    return {  # type: ignore[return-value]
        "cache_n": finish.num_cached_tokens,
        **_rates("prompt", num_new, first_token_s - (times.queue_s or 0.0)),
        **_rates("predicted", finish.num_output_tokens, times.total_s - first_token_s),
    }


class TimingsSoFar:
    """The object for the chunks of a stream: `begin` when its prompts are known, then `of` for each chunk."""

    def __init__(self) -> None:
        self._begun_at = 0.0
        self._num_prompt_tokens: Sequence[int] = ()
        self._first_at: dict[tuple[int, int], float] = {}  # when the first tokens came, by prompt and answer

    def begin(self, prompts: Sequence[list[int]]) -> None:
        """The answers begin now."""
        self._begun_at = time.monotonic()
        self._num_prompt_tokens = [len(each) for each in prompts]

    def of(self, prompt_index: int, chunk: Chunk) -> TimingsObject:
        """What is known when this chunk has come."""
        now = time.monotonic()
        first_at = self._first_at.setdefault((prompt_index, chunk.index), now)
        if chunk.finish is not None:
            return timings(chunk.finish)
        num_new = self._num_prompt_tokens[prompt_index] - chunk.num_cached_tokens
        return {  # type: ignore[return-value]
            "cache_n": chunk.num_cached_tokens,
            **_rates("prompt", num_new, first_at - self._begun_at),
            **_rates("predicted", chunk.num_output_tokens, now - first_at),
        }


def prompt_progress(reports: Mapping[str, Any]) -> list[ProgressObject]:
    """llama.cpp's objects: how far the prompt is computed, and the time since its first step began.

    The first one of a prompt says what was cached, before anything was computed.
    """
    progress: Progress | None = reports.get(PromptProgress.name)
    if progress is None:
        return []
    total, cache = progress.num_prompt_tokens, progress.num_cached_tokens
    now: ProgressObject = {
        "total": total,
        "cache": cache,
        "processed": progress.num_computed_tokens,
        "time_ms": round(1e3 * progress.time_s),
    }
    return [{"total": total, "cache": cache, "processed": cache, "time_ms": 0}, now] if progress.is_first else [now]


def _rates(name: str, count: int, seconds: float) -> Any:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
    }
