"""How long the parts of an answer took, as llama.cpp and vLLM write it; measured in the gateway.

Only the time in the queue is the dense worker's. A pause in which a worker was replaced counts like any other time.
"""

from __future__ import annotations

from typing import Any

from services.gateway.apis.shared.answer_objects import ProgressObject, RequestMetrics, TimingsObject
from services.gateway.core.chunks import Finish, Progress


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


def timings_so_far(prompt_s: float, num_tokens: int, predicted_s: float) -> TimingsObject:
    """The same for an answer that goes on; what of its prompt was cached is told at the end."""
    return {"prompt_ms": 1e3 * prompt_s, **_rates("predicted", num_tokens, predicted_s)}  # type: ignore[return-value]


def prompt_progress(progress: Progress) -> ProgressObject:
    """llama.cpp's object: how far the prompt is computed, and the time since its first step began."""
    return {
        "total": progress.num_prompt_tokens,
        "cache": progress.num_cached_tokens,
        "processed": progress.num_computed_tokens,
        "time_ms": round(1e3 * progress.time_s),
    }


def request_metrics(finish: Finish) -> RequestMetrics:
    """vLLM's object; null where there is nothing to measure."""
    times, num_tokens = finish.timings, finish.num_output_tokens
    if times.first_token_s is None or times.queue_s is None:
        first_s = generation_s = rate = None
    else:
        first_s = times.first_token_s - times.queue_s
        generation_s = 0.0 if times.per_token_s is None else times.per_token_s * (num_tokens - 1)
        rate = num_tokens / (first_s + generation_s) if first_s + generation_s > 0 else None
    return {
        "time_to_first_token_ms": _ms(first_s),
        "generation_time_ms": _ms(generation_s),
        "queue_time_ms": _ms(times.queue_s),
        "mean_itl_ms": _ms(times.per_token_s),
        "tokens_per_second": rate,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _rates(name: str, count: int, seconds: float) -> Any:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
    }
